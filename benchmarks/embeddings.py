"""Embeddings on a CPU beside sentence-transformers: 64 texts of 64 to 512 tokens, float32, last token, normalized.

`python -m benchmarks.embeddings MODEL --json` finds sentence-transformers' best batch size on some texts, then measures
both in turn, eight texts at a time, so that what disturbs the machine disturbs both. Texts are new in each round:
neither has anything of them in a cache. Each system is a process of its own, whose threads the other does not share.
On a machine with other work on it take `--threads 1` and `processor_ratio`, which compares processor time: threads
that wait for each other spin. `--peer-python` names a Python that has sentence-transformers. It takes texts as they
are: left to itself, it renders them with the model's chat template.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_TEXTS, SHORTEST, LONGEST = 64, 64, 512
BATCH_SIZES = (1, 4, 8)  # larger ones pad more: 64 took three times as long as 4
GROUP = 8  # texts that one system computes before the other does
WORDS = "the of and to in is that it was for on are as with his they at be this from have or by one had not but".split()


def texts_of(round_number: int, count: int = NUM_TEXTS, longest: int = LONGEST) -> list[str]:
    """Of common words, which are a token each in most vocabularies."""
    chance = random.Random(round_number)
    lengths = [SHORTEST + (longest - SHORTEST) * index // max(1, count - 1) for index in range(count)]
    chance.shuffle(lengths)
    return [" ".join(chance.choices(WORDS, k=length - 1)) for length in lengths]


def groups_of(round_number: int, count: int) -> list[list[str]]:
    """The texts of a round in groups of neighbours in length, as the peer sorts them: its batches pad little."""
    texts = sorted(texts_of(round_number, count), key=lambda text: text.count(" "))
    return [texts[start : start + GROUP] for start in range(0, count, GROUP)]


def own(model: str, threads: int) -> Callable[[Sequence[str], int], Any]:
    from minisgl_backend import LLM

    llm = LLM(model, dtype="float32", max_seq_len_override=1024, max_running_requests=64, num_pages=4096, page_size=16)
    return lambda texts, batch_size: [output.embedding for output in llm.embed(texts)]


def peer(model: str, threads: int) -> Callable[[Sequence[str], int], Any]:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    torch.set_num_threads(threads)
    body = modules.Transformer(
        model,
        model_kwargs={"dtype": torch.float32},
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    body.tokenizer.pad_token = body.tokenizer.pad_token or body.tokenizer.eos_token
    pooling = modules.Pooling(body.get_embedding_dimension(), pooling_mode="lasttoken")
    encoder = SentenceTransformer(modules=[body, pooling, modules.Normalize()], device="cpu")
    return lambda texts, batch_size: encoder.encode(list(texts), batch_size=batch_size, show_progress_bar=False)


def serve(system: str, model: str, threads: int) -> None:
    """Answers lines of JSON: texts and a batch size in, seconds and the first vector out."""
    encode = {"own": own, "peer": peer}[system](model, threads)
    encode(texts_of(-1, 4, 128), 4)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        begin, processor = time.perf_counter(), time.process_time()
        vectors = encode(asked["texts"], asked["batch_size"])
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        said = {"seconds": seconds, "processor": processor, "vector": [float(one) for one in vectors[0]]}
        print(json.dumps(said), flush=True)


@dataclass(frozen=True)
class Measured:
    """What one system took for some texts."""

    seconds: float
    processor: float  # seconds of all its threads
    vector: list[float]  # of the first text

    def cost(self, threads: int) -> float:
        """What is compared: processor time of one thread is the same on a busy machine."""
        return self.processor if threads == 1 else self.seconds


class System:
    """One of both, in its own process."""

    def __init__(self, python: str, system: str, model: str, threads: int) -> None:
        command = [python, "-m", "benchmarks.embeddings", model, "--serve", system, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self._read()

    def measure(self, texts: Sequence[str], batch_size: int) -> Measured:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"texts": list(texts), "batch_size": batch_size}) + "\n")
        self._process.stdin.flush()
        said = self._read()
        return Measured(**said)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise RuntimeError("a system ended; see its errors above")


def compare(
    model: str, *, rounds: int, threads: int, peer_python: str, batch_sizes: Sequence[int], count: int = NUM_TEXTS
) -> dict[str, Any]:
    """Seconds of each for all texts, and how many times as fast as the peer at its best this project is, group by
    group."""
    own, other = System(sys.executable, "own", model, threads), System(peer_python, "peer", model, threads)
    totals = {name: {"seconds": 0.0, "processor": 0.0} for name in ("own", "peer")}
    ratios: dict[str, list[float]] = {"seconds": [], "processor": []}
    difference = 0.0
    try:
        middle = groups_of(rounds, count)[-(-count // GROUP) // 2]
        trials = {size: other.measure(middle, size).cost(threads) for size in batch_sizes[1:] and batch_sizes}
        best = min(trials, key=trials.__getitem__, default=batch_sizes[0])
        for group in (group for number in range(rounds) for group in groups_of(number, count)):
            ours, theirs = own.measure(group, best), other.measure(group, best)
            for kind, found in ratios.items():
                found.append(getattr(theirs, kind) / getattr(ours, kind))
                totals["own"][kind] += getattr(ours, kind) / rounds
                totals["peer"][kind] += getattr(theirs, kind) / rounds
            pairs = zip(ours.vector, theirs.vector, strict=True)
            difference = max(difference, *(abs(one - another) for one, another in pairs))
            print(f"{len(ratios['seconds'])} of {rounds * -(-count // GROUP)}: {totals}", file=sys.stderr, flush=True)
    finally:
        own.close()
        other.close()
    return {
        **totals,
        "ratio": totals["peer"]["seconds"] / totals["own"]["seconds"],
        "median_ratio": statistics.median(ratios["seconds"]),
        "processor_ratio": totals["peer"]["processor"] / totals["own"]["processor"],
        "ratios": ratios,
        "difference": difference,
        "batch_size": best,
        "trials": trials,
        "threads": threads,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--texts", type=int, default=NUM_TEXTS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=list(BATCH_SIZES))
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=("own", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve, options.model, options.threads)
        return 0
    found = compare(
        options.model,
        rounds=options.rounds,
        threads=options.threads,
        peer_python=options.peer_python,
        batch_sizes=options.batch_sizes,
        count=options.texts,
    )
    print(json.dumps(found) if options.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
