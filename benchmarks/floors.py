"""The least time that memory bandwidth and matrix units allow: decode steps, prompts, whole workloads, by arithmetic.

    python -m benchmarks.floors [--model qwen3-30b-a3b] [--json]

Counts what must be read (bf16 weights once a step, the keys and values of the context) and the products that must be
computed; activations, launches and sampling are free.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from benchmarks.gpu import offline_load
from benchmarks.limits import Limits
from benchmarks.model_shapes import SHAPES
from minisgl_backend.layers.config import AttentionConfig, LatentAttentionConfig, LayerConfig, MlpConfig, MoeConfig
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.description import attention_weights

BYTES_PER_VALUE = 2  # bfloat16
DECODE_CONTEXT = 1024  # tokens, the middle of what benchmarks.gpu averages over
BATCHES = (1, 8, 64, 256)
PROMPTS = (1000, 4000, 8000, 32000)


class Floors:
    """The floors of one model on one device."""

    def __init__(self, config: ModelConfig, limits: Limits) -> None:
        self._config = config
        self._limits = limits
        self._parameters = sum(_shared_parameters(layer, config.hidden_size) for layer in config.layers)
        self._expert_parameters = sum(  # of one expert, all layers together
            3 * config.hidden_size * layer.mlp.intermediate_size
            for layer in config.layers
            if isinstance(layer.mlp, MoeConfig)
        )
        self._head_parameters = config.vocab_size * config.hidden_size
        kept = config.head_dim if config.latents else 2 * config.num_kv_heads * config.head_dim  # of a token
        self._kv_bytes = config.num_layers * kept * BYTES_PER_VALUE

    def distinct_experts(self, tokens: int) -> float:
        """How many experts of a layer `tokens` tokens reach together, if each picks its own uniformly; 0: no MoE."""
        moe = self._config.mixture
        if moe is None:
            return 0.0
        return float(moe.num_experts * (1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens))

    def decode_bytes(self, batch: int, context: float) -> float:
        """What one step of `batch` sequences reads; `context`: tokens of all of them together."""
        return self._weight_bytes(batch) + context * self._kv_bytes

    def decode_s(self, batch: int, context: float) -> float:
        """Seconds of one step: weights read or multiplied, whichever is longer, then the cache."""
        weights = self._weight_bytes(batch) / self._limits.bytes_per_s
        products = batch * self._flop_per_token(head=True) / self._limits.flop_per_s
        return max(weights, products) + context * self._kv_bytes / self._limits.bytes_per_s

    def prefill_s(self, prompts: Sequence[int]) -> float:
        """Seconds for prompts of these lengths, products and causal attention alone; one row of logits each."""
        flop = 0.0
        for length in prompts:
            flop += length * self._flop_per_token(head=False) + 2 * self._head_parameters
            # Scores and their product with the values, over half of length x length.
            flop += sum(_flop_per_pair(layer.attention) for layer in self._config.layers) * length**2 / 2
        return flop / self._limits.flop_per_s

    def offline_tok_s(self, load: Sequence[tuple[list[int], int]]) -> float:
        """Tokens a second for (prompt, answer length) pairs that all start at once and fit the cache."""
        seconds = self.prefill_s([len(prompt) for prompt, _ in load])
        for step in range(1, max(length for _, length in load)):
            contexts = [len(prompt) + step for prompt, length in load if length > step]
            seconds += self.decode_s(len(contexts), sum(contexts))
        return sum(length for _, length in load) / seconds

    def figures(self, prefix: str) -> dict[str, float]:
        """All of them, under the names that benchmarks.gpu gives to what it measures."""
        single = self.prefill_s([128]) + sum(self.decode_s(1, 128 + step) for step in range(1, 512))
        results = {"offline_tok_s": _digits(self.offline_tok_s(offline_load())), "single_tok_s": _digits(512 / single)}
        for batch in BATCHES:
            results[f"bs{batch}_ms"] = _digits(1000 * self.decode_s(batch, batch * DECODE_CONTEXT))
        for length in PROMPTS:
            name = "prefill_tok_s" if length == 4000 else f"prefill_{length}_tok_s"
            results[name] = _digits(length / self.prefill_s([length]))
        return {f"{prefix}_{name}": value for name, value in results.items()}

    def _weight_bytes(self, tokens: int) -> float:
        experts = self.distinct_experts(tokens) * self._expert_parameters
        return (self._parameters + experts + self._head_parameters) * BYTES_PER_VALUE

    def _flop_per_token(self, head: bool) -> float:
        experts = self._config.mixture.experts_per_token if self._config.mixture is not None else 0
        parameters = self._parameters + experts * self._expert_parameters
        return 2.0 * (parameters + (self._head_parameters if head else 0))


def _shared_parameters(layer: LayerConfig, hidden_size: int) -> int:
    """Those of one layer that every token is multiplied with: all but the routed experts."""
    mlp, rows = layer.mlp, 0
    if isinstance(mlp, MoeConfig):
        rows += mlp.num_experts + 3 * mlp.shared_intermediate_size  # the router
    else:
        rows += (3 if isinstance(mlp, MlpConfig) else 2) * mlp.intermediate_size
    return attention_weights(layer.attention, hidden_size) + rows * hidden_size


def _flop_per_pair(attention: AttentionConfig | LatentAttentionConfig) -> int:
    """Of a query token and a token that it sees, all heads of one layer: scores, and their product with the values."""
    a = attention
    size = 2 * a.head_dim if isinstance(a, AttentionConfig) else a.qk_nope_head_dim + a.qk_rope_head_dim + a.v_head_dim
    return 2 * a.num_q_heads * size


def _digits(value: float) -> float:
    """Three digits that count: the limits are not known better."""
    return float(f"{value:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--prefix", default="floor", help="of the names, as in benchmarks.gpu: q06, q14, q30")
    parser.add_argument("--bandwidth", type=float, default=Limits.bytes_per_s / 1e12, help="TB/s")
    parser.add_argument("--matrix", type=float, default=Limits.flop_per_s / 1e12, help="TFLOP/s")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    limits = Limits(arguments.bandwidth * 1e12, arguments.matrix * 1e12)
    floors = Floors(ModelConfig.from_dicts(SHAPES[arguments.model], {}), limits)
    figures = floors.figures(arguments.prefix)
    if arguments.json:
        print(json.dumps(figures))
        return
    for batch in BATCHES:
        gigabytes = floors.decode_bytes(batch, batch * DECODE_CONTEXT) / 1e9
        experts = floors.distinct_experts(batch)
        print(f"a step at batch {batch:3} reads {gigabytes:6.2f} GB" + (f", {experts:5.1f} experts" if experts else ""))
    for name, value in figures.items():
        print(f"{name:28} {value:g}")


if __name__ == "__main__":
    main()
