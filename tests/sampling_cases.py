"""Rows of every sampling option side by side, and what the torch sampler and the kernels make of them."""

from __future__ import annotations

import msgspec
import torch

from minisgl_backend.kernels.sampling import layout
from minisgl_backend.request import Grammar, SamplingParams
from minisgl_backend.sampling.logits_processors import TokenRules
from minisgl_backend.sampling.metadata import SamplingInputs
from minisgl_backend.sampling.params import encode_params, flags_of
from minisgl_backend.sampling.penalties import PenaltyCounts
from minisgl_backend.sampling.sampler import Sampler

JSON = Grammar(kind="json")
OPTIONS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.7),
    "top-k": SamplingParams(temperature=1.3, top_k=5),
    "top-k beyond the small ones": SamplingParams(temperature=1.3, top_k=200),
    "top-p": SamplingParams(temperature=1.0, top_p=0.6),
    "top-p of a flat distribution": SamplingParams(temperature=3.0, top_p=0.95),
    "top-p of the best alone": SamplingParams(temperature=2.0, top_p=1e-6),
    "top-p of nearly all": SamplingParams(temperature=1.0, top_p=0.99999),
    "top-k and top-p": SamplingParams(temperature=1.5, top_k=20, top_p=0.9),
    "large top-k and top-p": SamplingParams(temperature=3.0, top_k=300, top_p=0.9),
    "min-p": SamplingParams(temperature=1.5, min_p=0.1),
    "min-p and top-p": SamplingParams(temperature=1.5, min_p=0.01, top_p=0.95),
    "all three": SamplingParams(temperature=1.5, top_k=50, top_p=0.95, min_p=0.01),
    "repetition": SamplingParams(temperature=0.0, repetition_penalty=1.5),
    "presence, frequency and top-p": SamplingParams(
        temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, top_p=0.8
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 2.0, 9: -100.0, 5: 4.0}),
    "bad words": SamplingParams(temperature=1.0, bad_words_token_ids=((7,), (1, 2, 8), (2, 8), (*(4,) * 40, 5))),
    "min tokens": SamplingParams(temperature=1.0, min_tokens=2**31 - 1, stop_token_ids=(4,), top_k=7),
    "grammar": SamplingParams(temperature=1.0, grammar=JSON, top_p=0.9),
    "grammar against a bad word": SamplingParams(temperature=0.0, grammar=JSON, bad_words_token_ids=((40,),)),
}
EOS = (0, 1)
PROMPT = 6
KNOWN = 60  # tokens of each row


class SamplingCase:
    """One row for each of some options, in shuffled rows of the tables."""

    def __init__(self, vocab_size: int, device: torch.device, seed: int, names: list[str] | None = None) -> None:
        self.names = names or list(OPTIONS)
        self.vocab_size, self.device = vocab_size, device
        generator = torch.Generator().manual_seed(seed)
        n = len(self.names)
        rows = torch.randperm(n, generator=generator).int()
        self.rows = rows.to(device)
        self.positions = torch.randint(50, KNOWN, (n,), generator=generator).int().to(device)
        self.tokens = torch.randint(0, 12, (n, KNOWN + 1), generator=generator).int()
        self.tokens[:, 10:50] = 4
        self.tokens = self.tokens.to(device)
        self.options = {
            name: msgspec.structs.replace(OPTIONS[name], seed=1000 * seed + list(OPTIONS).index(name))
            for name in self.names
        }
        lines = [torch.from_numpy(encode_params(params, vocab_size).copy()) for params in self.options.values()]
        params = torch.zeros(n, layout.NUM_PARAMS, dtype=torch.int32)
        params[rows.long()] = torch.stack(lines)
        self.params = params.to(device)
        # What the two grammars allow: the first 96 tokens; token 40 alone.
        bits = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
        bits[0, :3] = -1
        bits[1, 1] = 1 << 8
        index = torch.full((n,), -1, dtype=torch.int32)
        for line, name in enumerate(self.names):
            if "grammar" in name:
                index[line] = int("against" in name)
        flags = 0
        for one in self.options.values():
            flags |= flags_of(one, vocab_size)
        masked = bool((index >= 0).any())
        self.inputs = SamplingInputs(
            rows=self.rows, positions=self.positions, flags=flags, searches=True,
            mask_index=index.to(device) if masked else None, mask_bits=bits.to(device) if masked else None,
        )  # fmt: skip

    def sampler(self, kernels: object = None) -> Sampler:
        """With counts and rules of its own; by `kernels`, or the torch sampler."""
        n = len(self.names)
        counts = PenaltyCounts(n, self.vocab_size, self.device)
        rules = TokenRules(n, EOS, 64, self.device)
        for params, row in zip(self.options.values(), self.rows.tolist(), strict=True):
            counts.reset(row, self.tokens[row, :KNOWN], PROMPT)
            if flags_of(params, self.vocab_size) & layout.RULES:
                rules.admit(row, params, PROMPT)
        rules.upload()
        sampler = Sampler(self.params, self.tokens, counts, rules, kernels)  # type: ignore[arg-type]
        sampler.counts = counts.counts  # type: ignore[attr-defined]  for the tests to look at
        return sampler


def logits_of(kind: str, n: int, vocab_size: int, seed: int) -> torch.Tensor:
    """[n, vocab_size] on the CPU: "normal" float32, "bf16" with the ties that rounding makes, or all "equal"."""
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    return {"normal": logits, "bf16": logits.bfloat16(), "equal": torch.zeros_like(logits)}[kind]
