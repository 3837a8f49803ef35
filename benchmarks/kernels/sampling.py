"""All that a step launches to sample."""

from __future__ import annotations

import functools
import itertools

import torch

from benchmarks.kernels.timing import Timer, profile_step
from minisgl_backend.kernels.sampling import layout
from minisgl_backend.kernels.sampling.inputs import RowTables, SampledRows
from minisgl_backend.kernels.sampling.launch import SamplingKernels, SamplingTuning
from minisgl_backend.request import SamplingParams
from minisgl_backend.sampling.logits_processors import TokenRules
from minisgl_backend.sampling.params import encode_params, flags_of
from minisgl_backend.sampling.penalties import PenaltyCounts

# What is measured of sampling, at temperature 0.6 where nothing else is said; the values of benchmarks.gpu.
SAMPLING_OPTIONS: dict[str, dict] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 20},
    "top_k_200": {"top_k": 200},
    "top_p": {"top_p": 0.95},
    "qwen3": {"top_k": 20, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.1},
    "bias": {"logit_bias": {5: 1.0}},
    "logprobs": {"logprobs": 5},
}


def bench_sampling(results: dict[str, dict], timer: Timer, tune: bool, profile: bool) -> None:
    """All that a step launches to sample, by option and rows, at vocabulary 151,936.

    Logits are bf16 and nearly flat, as a model with random weights has them: top-p keeps most of the vocabulary, which
    is the hard case. With `tune`, also by how the vocabulary is cut and searched.
    """
    shapes = {"chosen": (2048, 4, 8, 3)}  # tokens of a slice, warps, pivots, rounds
    if tune:
        for cut, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8)):
            for pivots, rounds in ((4, 4), (8, 3), (16, 2), (16, 3)):
                shapes[f"{cut} w{warps} p{pivots} r{rounds}"] = (cut, warps, pivots, rounds)
    for (name, options), rows in itertools.product(SAMPLING_OPTIONS.items(), (1, 8, 64, 256)):
        params = SamplingParams(**{"temperature": 0.6, "seed": 1, **options})
        timed = {}
        for label, (cut, warps, pivots, rounds) in shapes.items():
            if label != "chosen" and (rows not in (1, 64) or ((pivots, rounds) != (8, 3) and name != "top_p")):
                continue
            case = SamplingBench(params, rows, cut, warps, pivots, rounds)
            timed[label] = round(timer([functools.partial(case.sample, x) for x in case.logits]), 1)
            if profile and label == "chosen" and rows in (1, 64):
                profile_step(functools.partial(case.sample, case.logits[0]))
            del case
        best = sorted((us, label) for label, us in timed.items())
        results[f"sampling {name} rows {rows}"] = {"us": timed["chosen"], "top": best[:3]}
        print(f"sampling {name} rows {rows}: {timed['chosen']} us {best[:6] if tune else ''}", flush=True)
        torch.cuda.empty_cache()


class SamplingBench:
    """Rows that all want the same, and what samples them."""

    def __init__(self, params: SamplingParams, rows: int, cut: int, warps: int, pivots: int, rounds: int) -> None:
        device, vocab = torch.device("cuda"), 151936
        flags = flags_of(params, vocab)
        searches = bool(flags & layout.RANKED) and not layout.is_complete(params.top_k, vocab)
        self.logits = [0.64 * torch.randn(rows, vocab, device=device).bfloat16() for _ in range(4)]
        line = torch.from_numpy(encode_params(params, vocab).copy())
        self.inputs = SampledRows(
            rows=torch.arange(rows, dtype=torch.int32, device=device),
            positions=torch.full((rows,), 20, dtype=torch.int32, device=device),
            flags=flags,
            searches=searches,
        )
        tuning = SamplingTuning(slice=cut, pivots=pivots, rounds=rounds, num_warps=warps)
        self.kernels = SamplingKernels(rows, vocab, device, tuning, pdl=False)
        rules, counts = TokenRules(rows, (), 4096, device), PenaltyCounts(rows, vocab, device)
        tokens = torch.randint(0, vocab, (rows, 512), dtype=torch.int32, device=device)
        for row in range(rows):
            rules.admit(row, params, 256)
            counts.reset(row, tokens[row], 256)
        rules.upload()
        self.tables = RowTables(
            line.repeat(rows, 1).to(device), tokens, counts.counts, rules.counts, rules.rules, rules.prefixes
        )
        self.top = params.logprobs

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        inputs, kernels = self.inputs, self.kernels
        out = kernels.sample_plain(logits, inputs.rows, inputs.positions, self.tables.params)
        if inputs.flags & layout.EXTENDED:
            kernels.sample_extended(logits, inputs, self.tables, out)
        if self.top is not None:
            return kernels.pack_logprobs(logits, inputs.rows, out[0], self.top)
        return out
