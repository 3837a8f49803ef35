"""The least time that memory bandwidth and matrix units allow: decode steps, prompts, whole workloads, by arithmetic.

    python -m benchmarks.floors [--model qwen3-30b-a3b] [--weights fp8] [--experts mxfp4] [--device h100 | --measure]

Counts what must be read (weights once a step in their number format, the LM head in bfloat16, the keys and values of
the context, and what moves of states) and the GEMMs that must be computed, layer by layer (layer_costs.py);
activations, launches and sampling are free. With --measure the rates are those of this machine's GPU, measured now.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

import torch

from benchmarks.gpu import DECODE_CONTEXT, offline_load
from benchmarks.layer_costs import FORMATS, PLAIN_BYTES, LayerCosts, layer_costs
from benchmarks.limits import Limits
from benchmarks.model_shapes import SHAPES
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.device_facts import NAMED
from minisgl_backend.models.config import ModelConfig

BATCHES = (1, 8, 64, 256)
PROMPTS = (1000, 4000, 8000, 32000)


class Floors:
    """The floors of one model on one device."""

    def __init__(
        self,
        config: ModelConfig,
        limits: Limits,
        *,
        weights: str = "plain",
        experts: str | None = None,
        kv_number_bytes: float = PLAIN_BYTES,
        drawn: Mapping[int, float] | None = None,
    ) -> None:
        """weights, experts: of `layer_costs.FORMATS`; None: experts have that of the other weights. drawn: the distinct
        experts of a layer that so many tokens were seen to reach."""
        self._drawn = drawn or {}
        self._config, self._limits = config, limits
        formats = FORMATS[weights], FORMATS[experts or weights]
        costs = [
            layer_costs(
                layer, config.hidden_size, weights=formats[0], experts=formats[1], kv_number_bytes=kv_number_bytes
            )
            for layer in config.layers
        ]
        self._layers: list[tuple[LayerCosts, int]] = [(one, costs.count(one)) for one in dict.fromkeys(costs)]
        self._head = config.vocab_size * config.hidden_size

    def distinct_experts(self, tokens: int) -> float:
        """How many experts of a layer `tokens` tokens reach together: as was seen, or with uniform picks; 0: no MoE."""
        moe = self._config.mixture
        if moe is None:
            return 0.0
        if tokens in self._drawn:
            return self._drawn[tokens]
        return float(moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens))

    def decode_bytes(self, contexts: Sequence[float]) -> float:
        """What one step moves: a token for each sequence, of these lengths."""
        return self._weight_bytes(len(contexts)) + self._cache_bytes(contexts)

    def decode_s(self, contexts: Sequence[float]) -> float:
        """Seconds of one step: weights read or multiplied, whichever is longer, then attention likewise."""
        weights = self._weight_bytes(len(contexts)) / self._limits.bytes_per_s
        gemms = len(contexts) * self._flop_per_token(head=True) / self._limits.flop_per_s
        flop = sum(count * layer.decode_flop * sum(map(layer.seen, contexts)) for layer, count in self._layers)
        attention = max(self._cache_bytes(contexts) / self._limits.bytes_per_s, flop / self._limits.flop_per_s)
        return max(weights, gemms) + attention

    def decode_ms(self, batch: int, context: int = DECODE_CONTEXT) -> float:
        """Milliseconds of one step of sequences that all have this length."""
        return _digits(1000 * self.decode_s([context] * batch))

    def prefill_tok_s(self, length: int) -> float:
        """Tokens a second of prompts of this length."""
        return _digits(length / self.prefill_s([length]))

    def prefill_s(self, prompts: Sequence[int]) -> float:
        """Seconds for prompts of these lengths, GEMMs and causal attention alone; one row of logits each."""
        flop = 0.0
        for length in prompts:
            flop += length * self._flop_per_token(head=False) + 2 * self._head
            flop += sum(count * layer.prefill_flop * layer.pairs(length) for layer, count in self._layers)
        return flop / self._limits.flop_per_s

    def encoder_s(self, patches: int) -> float:
        """Seconds for an image of one tile with so many patches: GEMMs and attention of the encoder's layers alone."""
        encoder = self._config.encoder
        if encoder is None:
            raise ConfigError("the model has no encoder of images; allowed: one that sees")
        return encoder.whole_operations(patches) / self._limits.flop_per_s

    def image_ms(self, patches: int, text_tokens: int) -> float:
        """Milliseconds from such an image and text to a first token."""
        encoder = self._config.encoder
        merged = 1 if encoder is None else encoder.merge**2
        return _digits(1000 * (self.encoder_s(patches) + self.prefill_s([patches // merged + text_tokens])))

    def offline_tok_s(self, load: Sequence[tuple[list[int], int]]) -> float:
        """Tokens a second of answers for (prompt, answer length) pairs that all start at once and fit the cache."""
        seconds = self.prefill_s([len(prompt) for prompt, _ in load])
        for step in range(1, max(length for _, length in load)):
            seconds += self.decode_s([len(prompt) + step for prompt, length in load if length > step])
        return _digits(sum(length for _, length in load) / seconds)

    def figures(self, prefix: str) -> dict[str, float]:
        """All of texts, under the names that benchmarks.gpu gives to what it measures."""
        single = self.prefill_s([128]) + sum(self.decode_s([128 + step]) for step in range(1, 512))
        results = {"offline_tok_s": self.offline_tok_s(offline_load()), "single_tok_s": _digits(512 / single)}
        for batch in BATCHES:
            results[f"bs{batch}_ms"] = self.decode_ms(batch)
        for length in PROMPTS:
            name = "prefill_tok_s" if length == 4000 else f"prefill_{length}_tok_s"
            results[name] = self.prefill_tok_s(length)
        return {f"{prefix}_{name}": value for name, value in results.items()}

    def _weight_bytes(self, tokens: int) -> float:
        experts = self.distinct_experts(tokens)
        layers = sum(count * (layer.weight_bytes + experts * layer.expert_bytes) for layer, count in self._layers)
        return layers + PLAIN_BYTES * self._head

    def _cache_bytes(self, contexts: Sequence[float]) -> float:
        """Keys and values or latents read, and what moves of states."""
        return sum(
            count * (layer.kv_bytes * sum(map(layer.seen, contexts)) + layer.state_bytes * len(contexts))
            for layer, count in self._layers
        )

    def _flop_per_token(self, head: bool) -> float:
        experts = self._config.mixture.experts_per_token if self._config.mixture is not None else 0
        layers = sum(count * (layer.flop + experts * layer.expert_flop) for layer, count in self._layers)
        return layers + (2.0 * self._head if head else 0.0)


def _digits(value: float) -> float:
    """Three digits that count: the limits are not known better."""
    return float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--prefix", default="floor", help="of the names, as in benchmarks.gpu: q06, q14, q30")
    parser.add_argument("--weights", choices=FORMATS, default="plain", help="format of linear layers")
    parser.add_argument("--experts", choices=FORMATS, help="format of routed experts; unset: of linear layers")
    parser.add_argument("--kv-bytes", type=float, default=PLAIN_BYTES, help="of a number in the KV cache; 1: FP8")
    parser.add_argument("--device", choices=NAMED, help="take the rates of its data sheet")
    parser.add_argument("--measure", action="store_true", help="measure the rates of this machine's GPU")
    parser.add_argument("--bandwidth", type=float, default=Limits.bytes_per_s / 1e12, help="TB/s")
    parser.add_argument("--matrix", type=float, default=Limits.flop_per_s / 1e12, help="TFLOP/s of bfloat16 GEMMs")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    limits = Limits(arguments.bandwidth * 1e12, arguments.matrix * 1e12)
    if arguments.measure:
        limits = Limits.measured(torch.device("cuda"))
    elif arguments.device:
        limits = Limits.nominal(NAMED[arguments.device])
    floors = Floors(
        ModelConfig.from_dicts(SHAPES[arguments.model], {}), limits, weights=arguments.weights,
        experts=arguments.experts, kv_number_bytes=arguments.kv_bytes,
    )  # fmt: skip
    figures = floors.figures(arguments.prefix)
    if arguments.json:
        print(json.dumps(figures))
        return
    print(f"at {limits.bytes_per_s / 1e12:.2f} TB/s and {limits.flop_per_s / 1e12:.0f} TFLOP/s")
    for batch in BATCHES:
        gigabytes = floors.decode_bytes([DECODE_CONTEXT] * batch) / 1e9
        experts = floors.distinct_experts(batch)
        print(f"a step at batch {batch:3} reads {gigabytes:6.2f} GB" + (f", {experts:5.1f} experts" if experts else ""))
    for name, value in figures.items():
        print(f"{name:28} {value:g}")


if __name__ == "__main__":
    main()
