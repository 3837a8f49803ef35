"""What one layer of a decoder reads and multiplies, by its description. Each kind of attention, MLP and number format
has its line: who adds a kind adds one.

Bytes are those of weights, of the KV cache and of states; biases, norms and activations count as nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minisgl_backend.kv.state_config import StateConfig
from minisgl_backend.layers.config import LayerConfig, MlpConfig, MoeConfig, UngatedMlpConfig
from minisgl_backend.layers.mixer_config import HeadsConfig, LatentAttentionConfig

STATE_PAGE = 32  # tokens of a page of a model with states, on a GPU
PLAIN_BYTES = 2  # of a bfloat16 number: plain weights, routers, the LM head, and the KV cache unless it is FP8


@dataclass(frozen=True, kw_only=True)
class FormatCost:
    """Bytes of a weight in one format, and how fast matrix units multiply with it."""

    number_bytes: float
    output_bytes: float = 0.0  # of the scales of one output
    group: int = 0  # inputs that share a scale, and
    group_bytes: float = 0.0  # its size, zero point included
    rate: float = 1.0  # of the matrix units, against bfloat16, for many rows

    def bytes_of(self, numbers: float, inputs: int) -> float:
        """Of a weight with `numbers` numbers, `inputs` of them for each output."""
        scales = numbers / inputs * self.output_bytes + (numbers / self.group * self.group_bytes if self.group else 0.0)
        return numbers * self.number_bytes + scales


FORMATS: Mapping[str, FormatCost] = MappingProxyType(
    {
        "plain": FormatCost(number_bytes=PLAIN_BYTES),
        "fp8": FormatCost(number_bytes=1, output_bytes=4, rate=2.0),  # float32 scales of outputs
        "fp8-blocks": FormatCost(number_bytes=1, group=128 * 128, group_bytes=4, rate=2.0),
        "int4": FormatCost(number_bytes=0.5, group=128, group_bytes=2.5),  # scale in 16 bits, zero point in 4
        "q4_k": FormatCost(number_bytes=0.5, group=256, group_bytes=16),  # GGUF's, with 6-bit scales and minima of 32
        "mxfp4": FormatCost(number_bytes=0.5, group=32, group_bytes=1),  # scale of 8 bits
    }
)


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Of one layer on one device. Operations are additions and multiplications, two for each weight."""

    weight_bytes: float  # that any step reads: around attention, the router, dense MLPs and shared experts
    expert_bytes: float  # of one routed expert
    flop: float  # of a token, but for routed experts and attention itself; at the format's rate
    expert_flop: float  # likewise of one routed expert
    kv_bytes: float  # that a decoding token reads of each token that it sees
    window: int | None  # how many it sees at most
    state_bytes: float  # of a sequence, moved by each step; of layers that keep a state instead of a cache
    decode_flop: float  # of a decoding token and a token that it sees
    prefill_flop: float  # likewise of a prompt's

    def seen(self, context: float) -> float:
        """How many of `context` tokens the last one attends to."""
        return context if self.window is None else min(context, self.window)

    def pairs(self, length: int) -> float:
        """Of tokens of a prompt and those that they see, about: half of length x length without a window."""
        outside = max(0, length - self.window) if self.window is not None else 0
        return length**2 / 2 - outside**2 / 2


def layer_costs(
    layer: LayerConfig, hidden_size: int, *, weights: FormatCost, experts: FormatCost, kv_number_bytes: float
) -> LayerCosts:
    """weights: format of linear layers; experts: of routed experts. Routers are plain. Scales of outputs are counted as
    if every weight had hidden_size inputs."""
    attention, state, mlp = layer.mixer.attention, layer.mixer.state, layer.mlp
    linear, router, expert = layer.mixer.num_weights(hidden_size), 0, 0
    if isinstance(mlp, MoeConfig):
        linear += 3 * mlp.shared_intermediate_size * hidden_size
        router, expert = mlp.num_experts * hidden_size, 3 * mlp.intermediate_size * hidden_size
    elif isinstance(mlp, MlpConfig):
        linear += 3 * mlp.intermediate_size * hidden_size
    elif isinstance(mlp, UngatedMlpConfig):
        linear += 2 * mlp.intermediate_size * hidden_size
    kept, decode, prefill = _attention(attention) if attention is not None else (0, 0, 0)
    recurrence = _recurrence(state) if state is not None else 0
    return LayerCosts(
        weight_bytes=weights.bytes_of(linear, hidden_size) + PLAIN_BYTES * router,
        expert_bytes=experts.bytes_of(expert, hidden_size) if expert else 0.0,
        flop=2.0 * (linear / weights.rate + router) + recurrence,
        expert_flop=2.0 * expert / experts.rate,
        kv_bytes=kept * kv_number_bytes,
        # Of a chunk a token sees half on average.
        window=_window(attention) if attention is not None else None,
        state_bytes=_state_bytes(state) if state is not None else 0.0,
        decode_flop=decode,
        prefill_flop=prefill,
    )


def _window(attention: HeadsConfig) -> int | None:
    return attention.window if attention.chunk is None else attention.chunk // 2


def _state_bytes(state: StateConfig) -> float:
    """What a decode step moves of a row's state (`kv.state`): the state read, half a page of tail read, a token's
    entry written, and its share of a fold, which reads a page of tail and the state, and writes the state."""
    whole = 4 * state.num_v_heads * state.k_dim * state.v_dim
    entry = PLAIN_BYTES * state.num_k_heads * state.k_dim + 4 * state.num_v_heads * (state.v_dim + 1)
    fold = (2 * whole + STATE_PAGE * entry) / STATE_PAGE
    return whole + (STATE_PAGE - 1) / 2 * entry + entry + fold


def _recurrence(state: StateConfig) -> int:
    """Operations of a token, by its definition: two products with the state, and an outer product."""
    return 2 * 3 * state.num_v_heads * state.k_dim * state.v_dim


def _attention(attention: HeadsConfig) -> tuple[int, int, int]:
    """Numbers kept of a token; operations of a query token and a token that it sees, in decode steps and in prompts:
    all heads' scores, and their product with the values."""
    heads = attention.num_q_heads
    if isinstance(attention, LatentAttentionConfig):
        # In decode steps scores are products with the latent and the rotated key, values are the latent (absorbed).
        absorbed = attention.head_dim + attention.kv_lora_rank
        expanded = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        return attention.head_dim, 2 * heads * absorbed, 2 * heads * expanded
    both = 2 * heads * 2 * attention.head_dim
    return 2 * attention.num_kv_heads * attention.head_dim, both, both
