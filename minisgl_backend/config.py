"""The engine options, each declared once.

`EngineConfig` holds the user's settings. Its field names are the `parameters` of model_repository/engine/config.pbtxt
and the command-line flags of the offline tools. `runner.start.resolve` turns it into a `RuntimeConfig`, in which no
"auto" is left.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl_backend import number_formats
from minisgl_backend.errors import ConfigError
from minisgl_backend.foreign_options import explain_unknown_argument
from minisgl_backend.speculative_config import ALLOWED, MEANING, SpeculativeConfig, read_speculative_config

DTYPES = ("auto", *number_formats.DTYPES)
KV_DTYPES = ("auto", *number_formats.KV_CACHE_DTYPES)
BACKENDS = ("fa", "fi", "trtllm", "triton", "flashmla", "torch")
CACHE_TYPES = ("radix", "naive")
POLICIES = ("fcfs", "lpm")
RUNNERS = ("model", "null")
MODEL_IMPLS = ("auto", "native", "transformers")


@dataclass(frozen=True)
class Option:
    """One row of the options table."""

    name: str
    type: type  # str, int, float or bool
    optional: bool  # None is allowed, and written as an empty parameter
    default: Any
    help: str
    flags: tuple[str, ...]  # command-line spellings, the first one is canonical
    allowed: str  # description of allowed values, for error messages
    check: Callable[[Any], bool]
    internal: bool  # for benchmarks and tests: accepted everywhere, but not documented

    def parse(self, text: str) -> Any:
        """The value that `text` stands for. Raises ConfigError naming the option, the text and what is allowed."""
        text = text.strip()
        if self.optional and text.lower() in ("", "none", "auto") and self.default is None:
            return None
        try:
            if self.type is bool:
                value: Any = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[
                    text.lower()
                ]
            else:
                value = self.type(text)
        except (ValueError, KeyError):
            raise ConfigError(f"{self.name} is {text!r}; allowed: {self.allowed}") from None
        return self.validate(value)

    def validate(self, value: Any) -> Any:
        """Returns the value. Raises ConfigError if it is not allowed."""
        if value is None and self.optional:
            return value
        right_type = isinstance(value, self.type) or (self.type is float and isinstance(value, int))
        if not right_type or (self.type is not bool and isinstance(value, bool)) or not self.check(value):
            raise ConfigError(f"{self.name} is {value!r}; allowed: {self.allowed}")
        return value


def _option(
    default: Any,
    help: str,
    allowed: str,
    check: Callable[[Any], bool] = lambda value: True,
    *flags: str,
    internal: bool = False,
) -> Any:
    return field(
        default=default,
        metadata={"help": help, "allowed": allowed, "check": check, "flags": tuple(flags), "internal": internal},
    )


def _positive(value: int) -> bool:
    return value >= 1


def _power_of_two(value: int) -> bool:
    return value >= 1 and value & (value - 1) == 0


def _zmq_address(value: str) -> bool:
    host, colon, port = value.removeprefix("tcp://").rpartition(":")
    is_tcp = value.startswith("tcp://") and bool(host and colon and port.isdigit() and int(port) < 65536)
    return is_tcp or (value.startswith("ipc://") and len(value) > len("ipc://"))


def _host_and_port(value: str) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdecimal() and 1 <= int(port) <= 65535


def _backend_names(value: str) -> bool:
    parts = value.split(",")
    return value == "auto" or (len(parts) <= 2 and all(part in BACKENDS for part in parts))


def read_weights(text: str) -> dict[str, float] | None:
    """Parses `tenant_weights` into weights by tenant; None: the text is invalid."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            return None
        if not name or name in weights or not 0 < weight <= 1000:
            return None
        weights[name] = weight
    return weights


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The user's settings, checked one by one at construction (ConfigError), not yet against a model or machine."""

    model: str = _option(
        "demo",
        "model folder in Hugging Face format (config.json, safetensors, tokenizer), a .gguf file, a hub id where the "
        "host has a network, or `demo` for the model that comes with the project",
        "a folder, a .gguf file, a hub id or `demo`",
        lambda value: bool(value.strip()),
    )
    model_impl: str = _option(
        "auto",
        "code that runs the model: a family of this project (native), or transformers' own classes with this engine's "
        "attention, KV cache and sampling; auto: native where there is such a family, else transformers",
        ", ".join(MODEL_IMPLS),
        MODEL_IMPLS.__contains__,
    )
    dtype: str = _option(
        "auto",
        "number format of weights and computation; auto: bfloat16 models stay so on GPUs, and on CPUs with AVX-512 "
        "BF16 and g++ 11 or later; all others become float16 on a GPU, float32 on a CPU",
        ", ".join(DTYPES),
        DTYPES.__contains__,
    )
    kv_cache_dtype: str = _option(
        "auto",
        "number format of the KV cache; fp8_e4m3 holds twice the tokens of 16-bit numbers, for a little quality; "
        "auto: that of dtype",
        ", ".join(KV_DTYPES),
        KV_DTYPES.__contains__,
    )
    quantization: str | None = _option(
        None,
        "number format that weights of linear layers and experts are converted to while they load; fp8: e4m3 with a "
        "scale for each output, and activations in FP8 with a scale for each token: half the memory of 16 bits for a "
        "little quality, on GPUs from compute capability 8.9 on; unset: as dtype says",
        ", ".join(number_formats.CONVERTED_FORMATS),
        number_formats.CONVERTED_FORMATS.__contains__,
    )
    attention_backend: str = _option(
        "auto",
        "attention kernels, or `PREFILL,DECODE` for one each",
        f"auto, one of {' '.join(BACKENDS)}, or two of them as PREFILL,DECODE",
        _backend_names,
        "--attn",
    )
    page_size: int | None = _option(
        None,
        "tokens a KV page; unset: the best measured one for the backends",
        "a power of two",
        _power_of_two,
    )
    num_pages: int | None = _option(
        None, "exact number of KV pages; unset: as many as memory_ratio allows", "1 or more", _positive
    )
    memory_ratio: float = _option(
        0.9,
        "share of the free device memory that weights and KV cache may take",
        "above 0 and at most 1",
        lambda value: 0 < value <= 1,
    )
    max_prefill_length: int | None = _option(
        None,
        "token budget of one step; longer prompts are computed in chunks; unset: 8192, but 16384 of a mixture of "
        "experts that a GPU computes in a quarter of a second",
        "1 or more",
        _positive,
    )
    mixed_prefill_length: int | None = _option(
        None,
        "chunked prefill: most prompt tokens of a step that also decodes, so that a long prompt does not freeze "
        "streams; 0: prompts first, streams wait; unset: what this machine computes in 22 ms, or in twice the time of "
        "a step of one token where that is more, measured at start, and more while over a second's worth of prompts "
        "waits",
        "0 or more",
        lambda value: value >= 0,
    )
    max_running_requests: int = _option(256, "sequences in one step", "1 to 4096", lambda value: 1 <= value <= 4096)
    max_waiting_requests: int = _option(
        4096,
        "requests in the queue, of each engine core with dp above 1; one more is answered UNAVAILABLE",
        "1 or more",
        _positive,
    )
    max_seq_len_override: int | None = _option(
        None,
        "longest sequence, prompt and answer; unset: the model's own limit",
        "2 or more",
        lambda value: value >= 2,
    )
    cuda_graph_max_bs: int | None = _option(
        None,
        "largest decode batch captured as a CUDA graph; 0 switches graphs off; unset: chosen from free memory",
        "0 or more",
        lambda value: value >= 0,
    )
    cuda_graph_max_tokens: int | None = _option(
        None,
        "largest step with prompt tokens whose layers run as CUDA graphs from one attention to the next; 0: launched "
        "kernel by kernel; unset: 2048 to 8192, more for a small model, but 0 where cuda_graph_max_bs is 0, and never "
        "more than a step can have",
        "0 or more",
        lambda value: value >= 0,
    )
    cache_type: str = _option("radix", "prefix cache", ", ".join(CACHE_TYPES), CACHE_TYPES.__contains__, "--cache")
    schedule_policy: str = _option(
        "fcfs",
        "order of the queue: first come first served, or longest cached prefix first",
        ", ".join(POLICIES),
        POLICIES.__contains__,
    )
    background_slowdown: float = _option(
        2.0,
        "how many times as long as without them a step may take with requests below the default priority, as those of "
        "batches, while others run; 1: they wait meanwhile",
        "1 to 1000",
        lambda value: 1 <= value <= 1000,
    )
    fair_shares: bool = _option(
        False,
        "tenants share the engine fairly, whose names requests bring along (`tenant`, or `--tenants` of the endpoint): "
        "who was served least goes first, and who has more than its share of a full batch gives way to who has less "
        "than half of it",
        "true or false",
    )
    tenant_weights: str = _option(
        "",
        "with fair_shares: the shares of some tenants, as `NAME=WEIGHT,NAME=WEIGHT`; all others have 1",
        "NAME=WEIGHT, more of them after commas; weights above 0 and at most 1000",
        lambda value: read_weights(value) is not None,
    )
    max_waiting_requests_per_tenant: int | None = _option(
        None,
        "with fair_shares: requests of one tenant in the queue; one more is answered UNAVAILABLE; unset: half of "
        "max_waiting_requests",
        "1 or more",
        _positive,
    )
    tp: int = _option(
        1,
        "tensor-parallel size; must divide the model's heads, or be a multiple of its KV heads",
        "1 or more",
        _positive,
    )
    dp: int = _option(
        1,
        "data-parallel size: engine cores of one server, each with a whole model on tp GPUs of its own; a request goes "
        "where its prefix is cached, unless that core has more to do",
        "1 to 64",
        lambda value: 1 <= value <= 64,
    )
    nodes: int = _option(
        1,
        "machines that share one model, each with tp / nodes of its ranks; node 0 serves",
        "1 to 64",
        lambda value: 1 <= value <= 64,
    )
    rendezvous: str | None = _option(
        None, "address of node 0, at which the other nodes meet it", "HOST:PORT", _host_and_port
    )
    kv_events_endpoint: str | None = _option(
        None,
        "address of ZeroMQ at which each engine core publishes what its prefix cache stores and removes, as vLLM does "
        "(KV events): `tcp://*:5557` listens, `tcp://HOST:5557` connects to a subscriber that listens; core i of "
        "several has the port i higher; unset: none",
        "tcp://HOST:PORT or ipc://PATH",
        _zmq_address,
    )
    kv_events_replay_endpoint: str | None = _option(
        None,
        "address at which those who missed KV events ask for them again, without a key: `tcp://127.0.0.1:5657` is for "
        "this machine alone, `tcp://*:5657` for all who reach it; unset: none",
        "tcp://HOST:PORT or ipc://PATH",
        _zmq_address,
    )
    kv_events_topic: str = _option("", "topic of the KV events, which subscribers may filter by", "any text")
    disable_pynccl: bool = _option(
        False,
        "leave all sums over ranks to torch's NCCL; else through memory that the GPUs share, where they can",
        "true or false",
    )
    speculative_config: str | None = _option(
        None,
        f"speculative decoding, which changes no text: {MEANING}; unset: none",
        ALLOWED,
    )
    enable_embeddings: bool = _option(
        True,
        "answer requests for embeddings and scores; false: each is refused",
        "true or false",
    )
    dummy_weights: bool = _option(False, "random weights, for benchmarks", "true or false", internal=True)
    trust_remote_code: bool = _option(
        False,
        "let the tokenizer, and a model that runs through transformers, use Python code found in the model folder",
        "true or false",
    )
    idle_cpus: str = _option(
        "auto",
        "idle processors while sequences run: poll for work, which shortens the way of each token, or sleep as the "
        "kernel likes; auto: poll in a virtual machine, if the process may ask for it",
        "auto, poll, sleep",
        ("auto", "poll", "sleep").__contains__,
    )
    runner: str = _option(
        "model",
        "null replaces the model by a runner that returns tokens without computing, to measure everything else",
        ", ".join(RUNNERS),
        RUNNERS.__contains__,
        internal=True,
    )
    null_runner_rate: float = _option(
        0.0,
        "tokens a second of each stream with runner=null; 0: as fast as steps go",
        "0 or more",
        lambda v: v >= 0,
        internal=True,
    )

    def __post_init__(self) -> None:
        if isinstance(self.speculative_config, Mapping):
            object.__setattr__(self, "speculative_config", json.dumps(self.speculative_config))
        for option in OPTIONS.values():
            option.validate(getattr(self, option.name))
        self._check_nodes()
        self._check_kv_event_ports()
        self._check_speculation()

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """The parsed `speculative_config`; None: no speculative decoding."""
        return None if self.speculative_config is None else read_speculative_config(self.speculative_config)

    @property
    def ranks_per_node(self) -> int:
        """Tensor-parallel ranks on one machine. The first rank of node i is i * ranks_per_node."""
        return self.tp // self.nodes

    def first_device(self, dp_rank: int) -> int:
        """Index of the GPU of an engine core's first rank on its machine; those of its other ranks follow."""
        return dp_rank * self.tp

    def _check_nodes(self) -> None:
        if self.nodes == 1:
            return
        if self.tp % self.nodes:
            raise ConfigError(f"nodes is {self.nodes}; allowed with tp {self.tp}: a number that divides tp")
        if self.dp > 1:
            raise ConfigError(f"dp is {self.dp}; allowed with nodes {self.nodes}: 1")
        if self.rendezvous is None:
            raise ConfigError(f"rendezvous is unset; allowed with nodes {self.nodes}: HOST:PORT, an address of node 0")

    def _check_speculation(self) -> None:
        try:
            _ = self.speculation
        except ValueError as error:
            raise ConfigError(f"speculative_config is {self.speculative_config!r}; {error}") from None

    def _check_kv_event_ports(self) -> None:
        """Each engine core has its own port for KV events, and one for their replay; these must not overlap."""
        addresses = (self.kv_events_endpoint, self.kv_events_replay_endpoint)
        ports = [int(one.rpartition(":")[2]) for one in addresses if one is not None and one.startswith("tcp://")]
        if len(ports) == 2 and abs(ports[0] - ports[1]) < self.dp:
            raise ConfigError(
                f"kv_events_replay_endpoint is {self.kv_events_replay_endpoint!r} with kv_events_endpoint "
                f"{self.kv_events_endpoint!r}; allowed with dp={self.dp}: a port {self.dp} or more away from it"
            )
        if None not in addresses and addresses[0] == addresses[1]:
            raise ConfigError(
                f"kv_events_replay_endpoint is {self.kv_events_replay_endpoint!r}, as kv_events_endpoint is; allowed: "
                "an address of its own"
            )

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> EngineConfig:
        """From the string parameters of a Triton config.pbtxt.

        An unknown name, a wrong value or an unfilled `${placeholder}` raises ConfigError.
        """
        values: dict[str, Any] = {}
        for name, text in parameters.items():
            if name not in OPTIONS:
                raise ConfigError(f"config.pbtxt: {explain_unknown_argument(name, list(OPTIONS))}")
            if text.startswith("${"):
                raise ConfigError(
                    f"{name} is {text!r}: the placeholder was never filled in; remove the line or set a value"
                )
            values[name] = OPTIONS[name].parse(text)
        return cls(**values)


def _options_of(config_class: type) -> dict[str, Option]:
    hints = typing.get_type_hints(config_class)
    options = {}
    for spec in dataclasses.fields(config_class):
        hint, optional = hints[spec.name], False
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
            optional = True
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        options[spec.name] = Option(
            name=spec.name,
            type=hint,
            optional=optional,
            default=spec.default,
            help=spec.metadata["help"],
            flags=("--" + spec.name.replace("_", "-"), *spec.metadata["flags"]),
            allowed=spec.metadata["allowed"],
            check=spec.metadata["check"],
            internal=spec.metadata["internal"],
        )
    return options


OPTIONS: Mapping[str, Option] = types.MappingProxyType(_options_of(EngineConfig))
