"""The options of `minisgl bench`, and what they come to."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from ..request import SamplingOptions
from ..server_options import ApiKey, ModelOfEither, OpenAIUrl
from .pictures import FORMATS, Pictures
from .targets import Target, openai_target, triton_target
from .trace import Arrival
from .workload import Lengths, Load, PromptMaker, closed_load, poisson_load, trace_load

_LEVELS = "1,8,32"
_INPUT_TOKENS, _OUTPUT_TOKENS = "128", "64"
_OPEN_REQUESTS = 100  # of a Poisson run
_WARM_UP = 8
# Fields that the benchmark sets in every request itself -> the command's option.
_OWN_OPTIONS = {
    "max_tokens": "--output-tokens",
    "max_completion_tokens": "--output-tokens",
    "model": "--model",
    "prompt": "--input-tokens",
    "messages": "--chat",
}


@dataclass(frozen=True)
class BenchOptions:
    """As they are given; None: not given. `check` says whether they go together."""

    url: Annotated[
        str | None,
        typer.Option(help="Triton: HOST:PORT, or http://HOST:PORT; default: MINISGL_URL, else 127.0.0.1:8001."),
    ] = None
    openai: OpenAIUrl = None
    api_key: ApiKey = None
    model: ModelOfEither = None
    concurrency: Annotated[
        str | None, typer.Option(help=f"Requests in flight; several with commas: a run each; default: {_LEVELS}.")
    ] = None
    rate: Annotated[
        str | None, typer.Option(help="Requests a second that arrive at random (Poisson); several with commas.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Replay arrival times and lengths from this file of JSON lines.")
    ] = None
    time_scale: Annotated[float, typer.Option(help="Multiplies the trace's times; 0.001 for milliseconds.")] = 1.0
    input_tokens: Annotated[
        str | None,
        typer.Option("--input-tokens", "--prompt-tokens", help="Length of prompts, about: 128 (default), or 64-256."),
    ] = None
    output_tokens: Annotated[
        str | None, typer.Option("--output-tokens", "--max-tokens", help="Length of answers: 64 (default), or 32-128.")
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Of each run; default: 8 times the concurrency or 32; with --rate 100."),
    ] = None
    warm_up: Annotated[
        int | None, typer.Option(min=0, help=f"Requests before each run that do not count; default: {_WARM_UP}.")
    ] = None
    seed: Annotated[int, typer.Option(help="Of lengths, arrival times and words.")] = 0
    chat: Annotated[bool, typer.Option("--chat", help="Prompts as chat messages, not as plain text.")] = False
    image_count: Annotated[int, typer.Option(help="Pictures before each prompt, all different; as chat messages.")] = 0
    image_resolution: Annotated[str, typer.Option(help="Of each: WIDTHxHEIGHT, or as 1080p.")] = "1024x768"
    image_format: Annotated[str, typer.Option(help=f"Of their files: {' or '.join(FORMATS)}.")] = "jpeg"
    ignore_eos: Annotated[bool, typer.Option(help="Answers of exactly the wanted length; not every server can.")] = True
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Another sampling option of each request, as top_k=20; repeatable."),
    ] = None
    timeout: Annotated[float, typer.Option(help="Seconds for one answer; with --perf-analyzer for one run.")] = 900.0
    name: Annotated[str | None, typer.Option(help="What comparisons call these figures; default: the model.")] = None
    output: Annotated[
        Path | None, typer.Option("--json", "--output", help="Also write the figures to this file, as JSON.")
    ] = None
    perf_analyzer: Annotated[
        bool, typer.Option("--perf-analyzer", help="Measure with NVIDIA's perf_analyzer instead (Triton over gRPC).")
    ] = False
    stream: Annotated[bool, typer.Option(help="With --perf-analyzer: streamed answers, or one response each.")] = True

    @cached_property
    def inputs(self) -> Lengths:
        return Lengths.parse("--input-tokens", _INPUT_TOKENS if self.input_tokens is None else self.input_tokens)

    @cached_property
    def outputs(self) -> Lengths:
        return Lengths.parse("--output-tokens", _OUTPUT_TOKENS if self.output_tokens is None else self.output_tokens)

    @cached_property
    def pictures(self) -> Pictures:
        return Pictures.parse(self.image_count, self.image_resolution, self.image_format)

    @cached_property
    def levels(self) -> list[int]:
        text = _LEVELS if self.concurrency is None else self.concurrency
        levels = [int(part) for part in text.split(",") if part.strip().isdigit()]
        if len(levels) != len(text.split(",")) or min(levels, default=0) < 1:
            raise ValueError(f"--concurrency is {text!r}; allowed: whole numbers from 1 with commas between them")
        return levels

    @cached_property
    def rates(self) -> list[float] | None:
        if self.rate is None:
            return None
        try:
            rates = [float(part) for part in self.rate.split(",")]
        except ValueError:
            rates = []
        if not rates or not all(0 < rate < float("inf") for rate in rates):
            raise ValueError(f"--rate is {self.rate!r}; allowed: numbers above 0 with commas between them")
        return rates

    @property
    def warm_ups(self) -> int:
        """Requests before each run."""
        return _WARM_UP if self.warm_up is None else self.warm_up

    def requests_at(self, level: int) -> int:
        """Of a run with this many in flight."""
        return max(32, 8 * level) if self.requests is None else self.requests

    def check(self) -> None:
        """Raises ValueError for options that are wrong, and for some that do not go together."""
        if self.url is not None and self.openai is not None:
            raise ValueError("--url and --openai are both given; allowed: one of them")
        loads = {"--concurrency": self.concurrency, "--rate": self.rate, "--trace": self.trace}
        given = [option for option, value in loads.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; allowed: one of {', '.join(loads)}")
        if not 0 < self.time_scale < float("inf"):
            raise ValueError(f"--time-scale is {self.time_scale:g}; allowed: above 0")
        if self.time_scale != 1 and self.trace is None:
            raise ValueError(f"--time-scale is {self.time_scale:g}; allowed: only with --trace")
        if self.trace is not None:
            lengths = {"--input-tokens": self.input_tokens, "--output-tokens": self.output_tokens}
            _check_alone("--trace", lengths)
        _ = self.inputs, self.outputs, self.levels, self.pictures
        if self.perf_analyzer:
            self._check_perf_analyzer()
        elif not self.stream:
            raise ValueError("--no-stream goes with --perf-analyzer alone")

    def _check_perf_analyzer(self) -> None:
        others = {
            "--openai": self.openai, "--rate": self.rate, "--trace": self.trace, "--chat": self.chat or None,
            "--option": self.option or None, "--no-ignore-eos": None if self.ignore_eos else True,
            "--warm-up": self.warm_up, "--name": self.name, "--image-count": self.image_count or None,
        }  # fmt: skip
        _check_alone("--perf-analyzer", others)
        if self.inputs.low != self.inputs.high or self.outputs.low != self.outputs.high:
            raise ValueError("--perf-analyzer takes one length of prompts and one of answers, no ranges")
        most = max(self.levels)
        if self.requests is not None and self.requests < most:
            raise ValueError(
                f"--requests is {self.requests}; allowed: with --perf-analyzer at least --concurrency, {most}"
            )

    def target(self) -> Target:
        """Raises ValueError and ClientError."""
        options = {"temperature": self.temperature, **({"ignore_eos": True} if self.ignore_eos else {})}
        options |= _sampling_options(self.option, known_only=self.openai is None)
        chat = self.chat or self.pictures.count > 0
        if self.openai is None:
            return triton_target(self.url, self.model or "ensemble", chat, self.timeout, options)
        return openai_target(self.openai, self.api_key, self.model, chat, self.timeout, options)


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    options: BenchOptions
    arrivals: Sequence[Arrival] | None  # of the trace

    @property
    def longest_input(self) -> int:
        if self.arrivals is not None:
            return max(arrival.input_tokens for arrival in self.arrivals)
        return self.options.inputs.high

    def loads(self, maker: PromptMaker) -> Iterator[Load]:
        """One run after the other; their prompts are made just before."""
        given = self.options
        if self.arrivals is not None and given.trace is not None:
            yield trace_load(given.trace.name, self.arrivals, maker, given.seed)
        elif given.rates is not None:
            for rate in given.rates:
                count = given.requests or _OPEN_REQUESTS
                yield poisson_load(rate, count, given.inputs, given.outputs, maker, given.seed)
        else:
            for level in given.levels:
                yield closed_load(level, given.requests_at(level), given.inputs, given.outputs, maker, given.seed)

    def about(self) -> dict[str, Any]:
        given = self.options
        lengths = {"input_tokens": str(given.inputs), "output_tokens": str(given.outputs)}
        common = {"warm_up": given.warm_ups, "seed": given.seed}
        pictures = {"pictures": asdict(given.pictures)} if given.pictures.count else {}
        return {**({} if self.arrivals is not None else lengths), **common, **pictures}


def _check_alone(option: str, others: Mapping[str, object]) -> None:
    """Refuses options that have no effect together with `option`; None: not given."""
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} given; allowed: without {option}")


def _sampling_options(given: list[str] | None, known_only: bool) -> dict[str, Any]:
    """NAME=VALUE, the value as JSON or otherwise as text. Triton's client knows all names; other servers may take
    more."""
    options: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"--option is {text!r}; allowed: NAME=VALUE")
        if name in _OWN_OPTIONS:
            raise ValueError(f"--option is {text!r}; allowed: {_OWN_OPTIONS[name]} instead")
        if known_only and name not in SamplingOptions.__annotations__:
            allowed = ", ".join(sorted(SamplingOptions.__annotations__.keys() - _OWN_OPTIONS))
            raise ValueError(f"--option is {text!r}; allowed names: {allowed}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options
