"""The attention calls of a transformers model, recorded in a forward pass on the meta device, which computes nothing.

Config keys are not enough: each modeling file reads its own, and decides how to pass scale, window, soft cap and sinks.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.fallback.source import UnservedError

IMPLEMENTATION = "minisgl_probe"
NUM_TOKENS = 5
OWN_ATTENTION = "computes attention itself, outside of transformers' attention interface"
_OWN_MASK = "masks attention in a way of its own"
_SEEN = 1 << 17  # positions over which a mask is evaluated: longer windows count as none
_PATTERN, _KEY = "_minisgl_pattern", "_minisgl_recorder"  # attributes of masks and modules

# Options of attention functions that have no effect here.
_WITHOUT_EFFECT = frozenset(
    "position_ids use_cache output_attentions output_hidden_states output_router_logits is_causal cache_position "
    "deterministic target_dtype token_type_ids return_dict".split()
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of attention in a forward pass."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    window: int | None
    scale: float
    soft_cap: float | None
    sinks: str | None  # name of their parameter in the model


@dataclass(frozen=True)
class _Pattern:
    """The tokens that a mask lets a token see."""

    window: int | None


class _Recorder:
    def __init__(self, model: nn.Module) -> None:
        self.calls: list[Call] = []
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            setattr(module, _KEY, self)

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        others = sorted(name for name, given in options.items() if given is not None and name not in _WITHOUT_EFFECT)
        if others:
            raise UnservedError(f"passes {', '.join(others)} to attention")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnservedError("attends to later tokens (it is no decoder)")
        if dropout:
            raise UnservedError("drops attention out")
        if isinstance(scaling, torch.Tensor):
            raise UnservedError("computes the scale of attention anew in each step")
        if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise UnservedError("attends to keys that are not those of its tokens")
        if value.shape[1] != key.shape[1] or value.shape[-1] > key.shape[-1] or query.shape[-1] != key.shape[-1]:
            raise UnservedError("has values of another shape than its keys")
        head_dim = query.shape[-1]
        self.calls.append(
            Call(
                num_q_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=head_dim,
                window=_window(attention_mask, sliding_window),
                scale=float(scaling if scaling is not None else head_dim**-0.5),
                soft_cap=float(softcap) if softcap else None,
                sinks=self._sinks(s_aux, query.shape[1]),
            )
        )
        _, heads, tokens, _ = query.shape
        return query.new_zeros(1, tokens, heads, value.shape[-1]), None

    def _sinks(self, sinks: torch.Tensor | None, num_q_heads: int) -> str | None:
        if sinks is None:
            return None
        name = self._parameters.get(id(sinks))
        if name is None or sinks.numel() != num_q_heads:
            raise UnservedError("computes attention sinks anew in each step")
        return name


def _window(mask: torch.Tensor | None, sliding_window: int | None) -> int | None:
    """The window of a mask, as in transformers' own attention: the option is for kernels without masks."""
    if mask is None:
        return sliding_window
    pattern: _Pattern | None = getattr(mask, _PATTERN, None)
    if pattern is None:
        raise UnservedError(_OWN_MASK)
    return pattern.window


def _mask(*, q_length: int, kv_length: int, mask_function: Any, device: torch.device, **_: Any) -> torch.Tensor:
    """Replaces a mask by a tensor that carries its `_Pattern`."""
    mask = torch.zeros(1, 1, q_length, kv_length, device=device)
    setattr(mask, _PATTERN, _Pattern(_pattern_window(mask_function)))
    return mask


def _pattern_window(mask_function: Any) -> int | None:
    zero, positions = torch.tensor(0), torch.arange(_SEEN)
    sizes = set()
    for position in (_SEEN - 1, _SEEN * 5 // 8 + 3):
        try:
            seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(position), positions)).expand(_SEEN)
        except (NotImplementedError, RuntimeError) as error:  # the mask depends on tensor values, e.g. chunk starts
            raise UnservedError(f"{_OWN_MASK}, as in chunks") from error
        size = int(seen.sum())
        if bool(seen[position + 1 :].any()):
            raise UnservedError("attends to later tokens (it is no decoder)")
        if not bool(seen[position + 1 - size : position + 1].all()):
            raise UnservedError(_OWN_MASK)
        sizes.add(None if size == position + 1 else size)
    if len(sizes) > 1:
        raise UnservedError("attends in chunks")
    return sizes.pop()


def attention_calls(model: nn.Module, base: nn.Module) -> tuple[list[Call], int]:
    """The calls in the order of a forward pass, and the size of the hidden states at its end. `model` is on the meta
    device, with IMPLEMENTATION for attention and experts.

    Raises UnservedError for what the engine cannot do for it.
    """
    recorder = _Recorder(model)
    accepted = inspect.signature(base.forward).parameters
    if "position_ids" not in accepted:
        raise UnservedError("takes no position_ids")
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="meta")
    inputs: Mapping[str, Any] = {
        "position_ids": tokens,
        "attention_mask": torch.ones_like(tokens),  # without it, transformers looks for packed sequences
        "use_cache": False,
        "logits_to_keep": None,  # Gemma 4 truncates masks to this number of tokens, even if it is all of them
    }
    with torch.inference_mode(), failures(model):
        outputs = base(input_ids=tokens, **{name: given for name, given in inputs.items() if name in accepted})
    if not recorder.calls:
        raise UnservedError(OWN_ATTENTION)
    return recorder.calls, int(outputs[0].shape[-1])


@contextlib.contextmanager
def failures(model: nn.Module) -> Iterator[None]:
    """Converts what torch says inside to an UnservedError that names the module of `model` in which it was raised."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        name, module = _failing(model, error)
        if "meta" in str(error):
            raise UnservedError(f"reads values of tensors in its forward pass, in {name}, a {module}") from error
        said = str(error).strip().splitlines()[0]
        raise UnservedError(
            f"has a module that does not run with this config.json: {name}, a {module}: {said}"
        ) from error


def _failing(model: nn.Module, error: BaseException) -> tuple[str, str]:
    """Name and class of the innermost of the model's modules that was running."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    found = ("the model", type(model).__name__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and id(module) in names:
            found = names[id(module)], type(module).__name__
    return found


def _attend(module: nn.Module, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    recorder: _Recorder = getattr(module, _KEY)
    return recorder.attend(module, *args, **options)


def _experts(module: nn.Module, hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.zeros_like(hidden)


def register() -> None:
    """Makes IMPLEMENTATION known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def refusal(architecture: str, error: UnservedError) -> ConfigError:
    """The error for a model that the engine cannot run through transformers."""
    return ConfigError(f"config.json: {architecture} is not served through transformers' code: it {error}")
