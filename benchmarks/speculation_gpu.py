"""What speculation is worth on a GPU, and that it loses nothing: shapes of a known model with random weights.

    python -m benchmarks.speculation_gpu                                           Qwen3-14B, all parts
    python -m benchmarks.speculation_gpu --only eagle3,wrong
    python -m benchmarks.speculation_gpu --only draft_model --draft-shape qwen3-0.6b
    python -m benchmarks.speculation_gpu --only mtp --shape glm-4.7-flash          the checkpoint's own layer
    python -m benchmarks.speculation_gpu --shape tiny --only wrong ...             without a GPU, to try the program

    oracle       drafts that cost nothing, right at a given rate
    eagle3       an EAGLE-3 head of the published shape, really run; which of its drafts are right is drawn
    wrong        every draft is wrong, and speculation as served: never slower than without
    streams      64 streams that all may speculate, half of the drafts right: throughput and first tokens
    answers      greedy answers with and without drafts, some of them right: where they differ first, and how many do
    offline      requests that come at once, every draft wrong
    draft_model, mtp    as eagle3, by other proposers; only where they are asked for

One JSON line a figure, with the bar that it is held to, which is for Qwen3-14B, four drafts and one H100.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu import offline_load
from benchmarks.model_shapes import make_eagle3_folder, make_folder
from benchmarks.speculation_answers import compare
from benchmarks.speculation_engine import Decoded, DrawnControl, SteeredEngine, drawn
from minisgl_backend.speculation.control import DraftControl
from tests.proposers import EveryDraft

ORACLE = ("oracle", "wrong", "streams", "offline")  # of one engine, in which drafts cost nothing
PROPOSERS = ("eagle3", "draft_model", "mtp")  # each has an engine of its own
DEFAULT = ("eagle3", "wrong", "streams", "answers", "offline", "oracle")
PARTS = (*ORACLE, "answers", *PROPOSERS)
THREE_DELIVERED = 0.745  # of four drafts, each right at this rate: with the model's own token three a step
STREAMS_RATE = 0.5  # of the drafts of `streams`
OFFLINE_TEMPERATURE = 0.6
WARM_SEED = 9_999  # of prompts that no round has


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(f"--only has {', '.join(sorted(unknown))}; allowed: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(options, Path(folder))
        if set(parts) - {"answers"}:
            with benchmark.engine("ngram") as engine:
                # What a proposer that is really run is compared with, too: an engine without it.
                batches = options.batches if set(parts) & {"oracle", *PROPOSERS} else ()
                plain = {batch: benchmark.plain(engine, batch) for batch in batches}
                for part in sorted(set(parts) & set(ORACLE), key=parts.index):
                    getattr(benchmark, part)(engine, plain)
        for method in sorted(set(parts) & set(PROPOSERS), key=parts.index):
            with benchmark.engine(method) as engine:
                benchmark.proposer(engine, plain, method)
        if "answers" in parts:
            benchmark.answers()


class Benchmark:
    """All parts, with the options of the command line."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._most: int = options.drafts

    @contextmanager
    def engine(self, method: str) -> Iterator[SteeredEngine]:
        options = self._options
        config: dict[str, Any] = {"method": method, "num_speculative_tokens": self._most}
        if method == "eagle3":
            config["model"] = str(make_eagle3_folder(options.shape, self._folder))
        elif method == "draft_model":
            config["model"] = str(make_folder(options.draft_shape, self._folder))
        engine = SteeredEngine(
            make_folder(options.shape, self._folder),
            config,
            options.context,
            attention_backend=options.backend,
            max_running_requests=max(
                options.streams, options.offline_requests, *options.batches, *options.wrong_batches
            ),
            **({} if options.num_pages is None else {"num_pages": options.num_pages}),
        )
        try:
            yield engine
        finally:
            engine.close()

    def plain(self, engine: SteeredEngine, batch: int) -> Decoded:
        """Without speculation, the better of two runs."""
        return self._best(engine, batch, speculative=False)

    def oracle(self, engine: SteeredEngine, plain: dict[int, Decoded]) -> None:
        for batch, without in plain.items():
            for name, rate, control in (
                ("all right", 1.0, EveryDraft(self._most)),
                ("about three delivered", THREE_DELIVERED, EveryDraft(self._most)),
                ("all wrong, every draft verified", 0.0, EveryDraft(self._most)),
                ("about three delivered, as served", THREE_DELIVERED, DrawnControl(self._most, THREE_DELIVERED)),
            ):
                found = self._speculating(engine, batch, rate, control)
                bar = {1: 2.2, 8: 1.9}.get(batch) if name == "about three delivered" else None
                self._tell_speedup("oracle", batch, name, found, without, bar)

    def proposer(self, engine: SteeredEngine, plain: dict[int, Decoded], method: str) -> None:
        """One that is really run, against an engine that does not have it."""
        for batch, without in plain.items():
            every = EveryDraft(self._most)
            for name, rate, control in (
                ("about three delivered", THREE_DELIVERED, every),
                ("about three delivered, as served", THREE_DELIVERED, DrawnControl(self._most, THREE_DELIVERED)),
            ):
                found = self._speculating(engine, batch, rate, control)
                bar = 1.8 if method == "eagle3" and batch == 1 and control is every else None
                self._tell_speedup(method, batch, name, found, without, bar)
            (seconds,) = every._proposing.of([self._most]).tolist()
            tell(
                f"{method}_cost",
                {"batch": batch, "drafts": self._most, "ms": seconds * 1e3, "share": seconds * 1e3 / without.ms},
                {"share": ("at most", 0.25)} if method == "eagle3" and batch == 1 else {},
            )
            idle = self._best(engine, batch, speculative=False)
            served = self._speculating(engine, batch, 0.0, DrawnControl(self._most, 0.0))
            for name, slower in (("no request speculates", idle), ("all wrong, as served", served)):
                self._tell_speedup(method, batch, name, slower, without, 0.97)

    def wrong(self, engine: SteeredEngine, plain: dict[int, Decoded]) -> None:
        tokens = self._options.tokens
        for batch in self._options.wrong_batches:
            if not engine.fits(batch, tokens):
                print(f"wrong: batch {batch} is left out, as its pages do not fit", file=sys.stderr, flush=True)
                continue
            control = DrawnControl(self._most, 0.0)

            def run(speculative: bool, batch: int = batch, control: DraftControl = control) -> float:
                engine.steer(control)
                with drawn(0.0):
                    return engine.decode(batch, tokens, speculative=speculative).tok_s

            self._tell_in_turn("wrong", {"batch": batch}, run, {"over_plain": ("at least", 0.97)})

    def streams(self, engine: SteeredEngine, plain: dict[int, Decoded]) -> None:
        """Closed loop: of each stream the next request comes when one has ended."""
        options = self._options
        lengths = [
            (options.stream_prompt, options.stream_tokens // 2 + index * 37 % options.stream_tokens)
            for index in range(options.streams * options.stream_requests)
        ]
        self._warm(engine, lengths[: options.streams], options.streams)
        engine.steer(DrawnControl(self._most, STREAMS_RATE))
        rates: dict[bool, list[float]] = {False: [], True: []}
        first: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(options.rounds):
            for speculative in (False, True) if turn % 2 else (True, False):
                load = engine.load(lengths, 2 * turn + speculative)
                gc.collect()
                with drawn(STREAMS_RATE):
                    served = engine.serve(load, options.streams, speculative=speculative)
                rates[speculative].append(served.tok_s)
                first[speculative] += served.first_s
        quantiles = {kind: statistics.quantiles(seconds, n=100, method="inclusive") for kind, seconds in first.items()}
        figures = {
            "streams": options.streams,
            "tok_s": statistics.median(rates[True]),
            "over_plain": statistics.median(rates[True]) / statistics.median(rates[False]),
            "first_p50_ms": 1e3 * quantiles[True][49],
            "first_p50_over_plain": quantiles[True][49] / quantiles[False][49],
            "first_p99_ms": 1e3 * quantiles[True][98],
            "first_p99_over_plain": quantiles[True][98] / quantiles[False][98],
            "drafts": sum(engine.driver.core.stats().speculation.drafted),
        }
        bars = {"over_plain": ("at least", 0.99), "first_p50_over_plain": ("at most", 1.03)}
        tell("streams", figures, {**bars, "first_p99_over_plain": ("at most", 1.10)})

    def offline(self, engine: SteeredEngine, plain: dict[int, Decoded]) -> None:
        options = self._options
        scale = options.context / 1024
        lengths = [(max(1, int(scale * len(prompt))), max(2, int(scale * length))) for prompt, length in offline_load()]
        lengths = lengths[: options.offline_requests]
        self._warm(engine, lengths, len(lengths), OFFLINE_TEMPERATURE)
        engine.steer(DrawnControl(self._most, 0.0))
        turns = iter(range(1_000, 2_000))

        def run(speculative: bool) -> float:
            load = engine.load(lengths, next(turns))
            with drawn(0.0):
                return engine.serve(load, len(load), speculative=speculative, temperature=OFFLINE_TEMPERATURE).tok_s

        about = {"requests": len(lengths)}
        self._tell_in_turn("offline", about, run, {"over_plain": ("at least", 0.97)}, options.offline_rounds)

    def answers(self) -> None:
        options = self._options
        found = compare(
            make_folder(options.answers_shape, self._folder),
            drafts=self._most,
            answers=options.answers,
            tokens=options.answer_tokens,
            attention_backend=options.backend,
            **({} if options.num_pages is None else {"num_pages": options.num_pages}),
        )
        bars = {
            "share_that_differs": ("at most", min(0.05, found["share_between_batches"])),
            "largest_gap": ("at most", 0.05),
        }
        tell("answers", found, bars)

    def _speculating(self, engine: SteeredEngine, batch: int, rate: float, control: DraftControl) -> Decoded:
        engine.steer(control)
        with drawn(rate):
            return self._best(engine, batch, speculative=True)

    def _warm(
        self, engine: SteeredEngine, lengths: list[tuple[int, int]], streams: int, temperature: float = 0.0
    ) -> None:
        """Prompts as in these requests, and few tokens of their answers: what is slow the first time."""
        load = engine.load([(prompt, 4) for prompt, _ in lengths], WARM_SEED)
        engine.serve(load, streams, speculative=False, temperature=temperature)

    def _best(self, engine: SteeredEngine, batch: int, *, speculative: bool) -> Decoded:
        runs = [engine.decode(batch, self._options.tokens, speculative=speculative) for _ in range(2)]
        return max(runs, key=lambda one: one.tok_s)

    def _tell_speedup(
        self, figure: str, batch: int, drafts: str, found: Decoded, plain: Decoded, bar: float | None
    ) -> None:
        figures = {
            "batch": batch,
            "drafts": drafts,
            "tok_s": found.tok_s,
            "plain_tok_s": plain.tok_s,
            "delivered": found.delivered,
            "speedup": found.tok_s / plain.tok_s,
        }
        tell(figure, figures, {} if bar is None else {"speedup": ("at least", bar)})

    def _tell_in_turn(
        self,
        figure: str,
        about: dict[str, Any],
        run: Callable[[bool], float],
        bars: dict[str, tuple[str, float]],
        rounds: int | None = None,
    ) -> None:
        """With and without speculation, which of them first changes from round to round."""
        rates: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(self._options.rounds if rounds is None else rounds):
            for speculative in (False, True) if turn % 2 else (True, False):
                rates[speculative].append(run(speculative))
        ratios = [found / plain for found, plain in zip(rates[True], rates[False], strict=True)]
        figures = {
            **about,
            "tok_s": statistics.median(rates[True]),
            "plain_tok_s": statistics.median(rates[False]),
            "over_plain": statistics.median(ratios),
            "worst_round": min(ratios),
        }
        tell(figure, figures, bars)


def tell(figure: str, figures: dict[str, Any], bars: dict[str, tuple[str, float]]) -> None:
    """One line; bars: of some of the figures, "at least" or "at most" and the number."""
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()}
    held = {
        key: {kind: round(bar, 4), "met": figures[key] >= bar if kind == "at least" else figures[key] <= bar}
        for key, (kind, bar) in bars.items()
    }
    print(json.dumps({"figure": figure, **rounded, "bars": held}), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"parts to run, in this order, of {', '.join(PARTS)}")
    parser.add_argument("--shape", default="qwen3-14b", help="of benchmarks.model_shapes")
    parser.add_argument("--draft-shape", default="qwen3-0.6b", help="of the model that proposes in draft_model")
    parser.add_argument("--drafts", type=int, default=4, help="of a stream in a step")
    parser.add_argument("--backend", default="auto", help="of attention")
    parser.add_argument("--num-pages", type=int, help="of the KV cache; default: as the engine says")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="of oracle and the proposers")
    parser.add_argument("--wrong-batches", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--context", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of a stream in one run")
    parser.add_argument("--rounds", type=int, default=3, help="with and without in turn")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--stream-requests", type=int, default=4, help="of each stream, one after the other")
    parser.add_argument("--stream-prompt", type=int, default=256, help="tokens of each of their prompts")
    parser.add_argument("--stream-tokens", type=int, default=64, help="of each of their answers, in the mean")
    parser.add_argument("--offline-requests", type=int, default=256)
    parser.add_argument("--offline-rounds", type=int, default=2)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=200)
    parser.add_argument("--answers-shape", default="qwen3-answers", help="see benchmarks.speculation_answers")
    return parser


if __name__ == "__main__":
    main()
