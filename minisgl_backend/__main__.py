"""`python -m minisgl_backend`: try the engine, look at its options, check what they come to, without a server."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

from minisgl_backend import __version__
from minisgl_backend.config import OPTIONS, EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, MinisglError
from minisgl_backend.foreign_options import explain_unknown
from minisgl_backend.host.options.commands import declared_options, one_option, table_options, with_options
from minisgl_backend.installation import model_repository
from minisgl_backend.process.memory import in_words
from minisgl_backend.process.spawn import log_to_stderr

PANELS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        "model",
        "model_impl",
        "dtype",
        "quantization",
        "max_seq_len_override",
        "dummy_weights",
        "trust_remote_code",
    ),
    "Attention and memory": (
        "attention_backend",
        "page_size",
        "kv_cache_dtype",
        "num_pages",
        "num_state_slots",
        "memory_ratio",
        "cache_type",
        "cuda_graph_max_bs",
        "cuda_graph_max_tokens",
    ),
    "Scheduling": (
        "max_running_requests",
        "max_waiting_requests",
        "max_prefill_length",
        "mixed_prefill_length",
        "schedule_policy",
        "background_slowdown",
        "fair_shares",
        "tenant_weights",
        "max_waiting_requests_per_tenant",
    ),
    "Adapters": (
        "adapters",
        "merge_adapter",
        "max_adapters",
        "adapter_dir",
        "max_lora_rank",
        "max_loaded_adapters",
        "max_adapter_tasks",
    ),
    "Images": (
        "encoder_cache_mib",
        "max_image_tokens",
        "max_images",
        "image_workers",
        "image_cache_mib",
        "media_domains",
    ),
    "Several devices": ("tp", "dp", "nodes", "rendezvous", "disable_pynccl"),
    "Speculation": ("speculative_config",),
    "Serving": ("enable_embeddings",),
    "Processors": ("idle_cpus",),
    "KV events": ("kv_events_endpoint", "kv_events_replay_endpoint", "kv_events_topic"),
    "Measuring": ("runner", "null_runner_rate"),
}

EXAMPLES = """Examples:

* `python -m minisgl_backend generate "What is 17 + 25?"`
* `python -m minisgl_backend generate --model ~/models/Qwen3-0.6B --temperature 0 --max-tokens 50 "Hello"`
* `python -m minisgl_backend check --model ~/models/Qwen3-0.6B --tp 2`
"""

ENVIRONMENT = """Environment:

* `MINISGL_DISABLE_OVERLAP_SCHEDULING=1`: plan each step only after the one before is committed
* `LOG_LEVEL=DEBUG|INFO|WARNING|ERROR`: what is logged; default INFO
* `FLASHINFER_USE_TENSOR_CORES=0|1`: tensor cores in FlashInfer's decode kernels; default: the better measured one
* `HF_HOME`: where models fetched from the hub are kept
"""


def _options_text() -> str:
    """The options as Markdown, for the first help page."""
    lines = [
        "Engine options, the same here, in `parameters` of model_repository/engine/config.pbtxt (with _ for -) and in "
        "`LLM(...)`:"
    ]
    for panel, names in PANELS.items():
        shown = [option for option in map(OPTIONS.__getitem__, names) if not option.internal]
        lines += ["", f"{panel}", ""] if shown else []
        for option in shown:
            lines.append(f"* `{option.flags[0]}` ({option.shown_default}): {option.help}")
    return "\n".join(lines) + "\n"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"minisgl-backend {__version__}")
        raise typer.Exit


app = typer.Typer(
    help="A large language model engine for Triton Inference Server. These commands use it without a server: "
    "`generate` answers prompts, `options` lists every option, `check` says what options come to on this machine, "
    "`kernels` which kernels a model takes.",
    epilog="\n".join((EXAMPLES, _options_text(), ENVIRONMENT)),
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
)


class EngineCommand(TyperCommand):
    """Says in one line what is wrong, and what an option of another server is called here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # typer has click's exceptions of its own, or click's, by its version
            name = getattr(error, "option_name", None)
            if name is None:
                raise
            known = [option for param in self.params for option in param.opts]
            raise _refused(explain_unknown(name, known)) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MinisglError as error:
            raise _refused(error) from None


def _refused(problem: object) -> typer.Exit:
    typer.secho(f"error: {problem}", err=True, fg=typer.colors.RED)
    return typer.Exit(2)


def with_engine_options(function: Callable[..., None]) -> Callable[..., Any]:
    """Adds an option for every row of the options table; the function gets them as one EngineConfig, `config`."""
    file = typer.Option("--config", metavar="FILE", help="YAML as of minisgl serve; options given here come before it")
    added = [one_option("config_file", Path | None, file)]
    for panel, names in PANELS.items():
        added += table_options({name: OPTIONS[name] for name in names}, panel)
    return with_options("config", added, _read_config)(function)


def _read_config(values: dict[str, Any]) -> EngineConfig:
    file = values.pop("config_file")
    texts = {} if file is None else dict(_parameters_in(file))
    texts |= {name: str(value) for name, value in values.items() if value not in (None, False)}
    log_to_stderr("engine", Environment.read().log_level)
    return EngineConfig.from_parameters(texts)


def _parameters_in(file: Path) -> Mapping[str, str]:
    """The engine options in a file of the server's; its other options are checked. Raises ConfigError."""
    from minisgl_backend.host.options.engine import read_parameters
    from minisgl_backend.host.options.server import parse_arguments

    arguments = parse_arguments(["--config", str(file)], "minisgl serve")
    repository = arguments.server.repository
    if repository == model_repository().resolve():
        return arguments.engine_parameters
    try:
        own = read_parameters((repository / "engine" / "config.pbtxt").read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: repository is {str(repository)!r}, which cannot be read: {error}") from None
    return {**own, **arguments.engine_parameters}


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What comes before a command; the help text stands at `app`."""


@dataclass(frozen=True)
class Sampling:
    """What `generate` may say of its answers; None: the model's default."""

    max_tokens: Annotated[int | None, typer.Option(help="New tokens; unset: up to the context limit")] = None
    temperature: Annotated[float | None, typer.Option(help="0: greedy; unset: the model's default")] = None
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling; unset: the model's default")] = None
    top_k: Annotated[int | None, typer.Option(help="0: off; unset: the model's default")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times")] = None


@app.command(cls=EngineCommand)
@with_engine_options
@with_options("sampling", declared_options(Sampling))
def generate(
    config: EngineConfig,
    sampling: dict[str, Any],
    prompts: Annotated[list[str], typer.Argument(help="One prompt or several; `-` reads one a line from stdin")],
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template")] = False,
    system: Annotated[str, typer.Option(help="A system message before each prompt")] = "",
) -> None:
    """Load the model and answer prompts."""
    from minisgl_backend.llm import LLM

    texts = [line.rstrip("\n") for line in sys.stdin] if prompts == ["-"] else prompts
    stop = tuple(sampling.pop("stop") or ())
    values = {name: value for name, value in sampling.items() if value is not None}
    options = {name: value for name, value in dataclasses.asdict(config).items() if name != "model"}
    with LLM(config.model, **options) as llm:
        params = llm.sampling_params(stop=stop, **values)
        bar = len(texts) > 1
        if raw or not llm.tokenizer.has_chat_template:
            outputs = llm.generate(texts, params, progress=bar)
        else:
            before = [{"role": "system", "content": system}] if system else []
            conversations = [[*before, {"role": "user", "content": text}] for text in texts]
            outputs = llm.chat(conversations, params, progress=bar)
    for output in outputs:
        typer.echo(output.text)


@app.command()
def options() -> None:
    """List every engine option: a line of config.pbtxt, a field of EngineConfig and a flag here."""
    table = Table("option", "flags", "default", "allowed", "meaning")
    for option in (option for option in OPTIONS.values() if not option.internal):
        default = "(unset)" if option.default is None else str(option.default)
        table.add_row(option.name, " ".join(option.flags), default, option.allowed, option.help)
    Console().print(table)


@app.command(cls=EngineCommand)
@with_engine_options
def check(
    config: EngineConfig,
    repository: Annotated[
        Path | None, typer.Option(help="A model repository: its engine's options instead of those given here")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say only what is wrong")] = False,
) -> None:
    """Say what the options come to for this model on this machine, without loading it."""
    from minisgl_backend.engine.build import resolve_options
    from minisgl_backend.host.image_calls import images_told
    from minisgl_backend.host.model_check import check_folder
    from minisgl_backend.host.options.engine import read_engine_config
    from minisgl_backend.kernels.cpu.library import cpu_kernels
    from minisgl_backend.runner.start.memory import memory_of, weight_formats
    from minisgl_backend.runner.start.states import fit_rows
    from minisgl_backend.weights.files import Checkpoint

    if repository is not None:
        config = read_engine_config(repository)
    # The null runner computes nothing, so that no weights and no device can be wrong for it.
    null = config.runner == "null"
    if null:
        trusted = config.trust_remote_code
        config = EngineConfig(
            model=config.model, model_impl=config.model_impl, trust_remote_code=trusted, runner="null"
        )
    runtime, model = resolve_options(config, Environment.read())
    runtime = runtime if null else fit_rows(runtime, model)
    check_folder(dataclasses.replace(config, model=str(runtime.model_dir)))  # what the server says of it
    if not (null or config.dummy_weights):
        Checkpoint(Path(runtime.model_dir), model.tensor_names)  # reads the headers of the files
        if runtime.draft is not None:
            Checkpoint(Path(runtime.draft.model_dir), runtime.draft.model.tensor_names)
        memory = memory_of(runtime, model)
    if quiet:
        return
    table = Table("setting", "value")
    table.add_row("architecture", model.architecture)
    through = "a native family" if model.implementation == "native" else f"transformers {version('transformers')}"
    table.add_row("runs through", f"{through} (model_impl {config.model_impl})")
    table.add_row("vocabulary", f"{model.vocab_size} tokens")
    schemes = () if null else weight_formats(runtime, model).schemes
    table.add_row("number format of weights", "; ".join(map(str, schemes)) or f"plain: {runtime.dtype}")
    if runtime.device == "cpu" and not null:
        table.add_row("CPU kernels", str(cpu_kernels()))
    if model.implementation == "native" and not null:
        from minisgl_backend.runner.start.kernel_report import kernel_names  # whose trial run takes torch's compiler

        table.add_row("kernels of weights", f"{kernel_names(runtime, model)} (minisgl kernels says when)")
    if not null and (images := images_told(config, model, runtime.model_dir)) is not None:
        table.add_row("images", images)
    for spec in dataclasses.fields(runtime):
        if spec.name not in ("config", "draft"):
            value = getattr(runtime, spec.name)
            table.add_row(spec.name, "(chosen at start)" if value is None else str(value))
    if not (null or config.dummy_weights):
        table.add_row("weights", in_words(memory.weights) + (" on each GPU" if runtime.device == "cuda" else ""))
        if memory.repacked:
            table.add_row("weights in a library's layout as well", in_words(memory.repacked) + " on each GPU")
        if runtime.draft is not None:
            share = f"{in_words(memory.draft_weights)} of these weights, {memory.draft_share:.0%} of each KV page"
            table.add_row("draft model", f"{runtime.draft.model.architecture}: {share}")
        table.add_row("free memory", in_words(memory.free))
        if memory.states is not None:
            rows = runtime.config.max_running_requests
            slots = f"{memory.states.num_slots} slots for {rows} sequences and the prefix cache"
            table.add_row("states", f"{slots}, {in_words(memory.states.num_bytes)} with the latest tokens of each")
        table.add_row("KV pages", f"about {memory.pages} of {runtime.page_size} tokens: {memory.room}")
    Console().print(table)


@app.command(cls=EngineCommand)
@with_engine_options
def kernels(
    config: EngineConfig,
    device_facts: Annotated[
        str | None, typer.Option(help="h100, h200, a100 or l40s: a GPU that need not be there; unset: this machine's")
    ] = None,
) -> None:
    """Say which kernel multiplies with which weight of this model, by the rows of a step, and why."""
    from minisgl_backend.runner.start.kernel_report import kernel_report

    typer.echo(kernel_report(config, Environment.read(), device_facts))


if __name__ == "__main__":
    app(prog_name="python -m minisgl_backend")
