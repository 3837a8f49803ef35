"""What compressed-tensors says of how one kind of tensor is quantized: its QuantizationArgs, with what it derives where
a key is absent.

Source: compressed_tensors.quantization.quant_args (0.20), whose words may be in any case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minisgl_backend.weights.schemes.keys import SchemeKeys

_TYPES = ("int", "float")
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
# Of GPTQ's order of inputs, which `group` and `dynamic` put into the file, as true did. The others reorder nothing that
# is stored.
_ORDERS: Mapping[object, bool] = {
    "weight": False, "static": False, "group": True, "dynamic": True, False: False, True: True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class QuantizationArgs:
    """Of weights or activations, as one of config_groups has them."""

    keys: SchemeKeys
    num_bits: int
    type: str
    symmetric: bool
    strategy: str
    group_size: int | None
    dynamic: bool | str  # "local": only some of the scales are

    @classmethod
    def read(cls, group: SchemeKeys, key: str) -> QuantizationArgs | None:
        """group: one of config_groups. Raises ConfigError for a value that compressed-tensors does not have."""
        keys = group.child(key)
        if keys is None:
            return None
        group_size = keys.integer("group_size")
        derived = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        dynamic = keys.get("dynamic", False)
        if not isinstance(dynamic, bool) and str(dynamic).lower() != "local":
            keys.refuse("dynamic", 'false, true, "local"')
        return cls(
            keys=keys,
            num_bits=keys.integer("num_bits", 8) or 0,
            type=keys.word("type", _TYPES),
            symmetric=keys.choice("symmetric", (True, False)),
            strategy=keys.word("strategy", _STRATEGIES, derived),
            group_size=group_size,
            dynamic=dynamic,
        )

    def allow(self, **allowed: Sequence[object]) -> None:
        """Raises ConfigError unless the attributes have one of these values each."""
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                self.keys.refuse(name, ", ".join(map(json.dumps, values)))

    def block_structure(self) -> tuple[int, int]:
        """Outputs and inputs of a block: a list, or text as older files have it (128x128)."""
        value = self.keys.get("block_structure")
        if isinstance(value, str) and all(part.isdigit() for part in value.split("x")):
            value = [int(part) for part in value.split("x")]
        return block(self.keys, "block_structure", value)

    def reorders(self) -> bool:
        """Whether inputs are in groups in an order that a tensor of the file has."""
        value = self.keys.get("actorder", False)
        order = value.lower() if isinstance(value, str) else value
        if not isinstance(order, (str, bool)) or order not in _ORDERS:
            self.keys.refuse("actorder", '"weight", "static", "group", "dynamic", false, true, or absent')
        return _ORDERS[order]

    def check_unread(self, *without_effect: str) -> None:
        """Raises ConfigError for a key that no reader asked for."""
        self.keys.without_effect(*without_effect)
        self.keys.check_unread()


def block(keys: SchemeKeys, key: str, value: object) -> tuple[int, int]:
    """Outputs and inputs that have a scale in common."""
    sizes = (32, 64, 128)
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(one in sizes for one in value):
        keys.refuse(key, f"[outputs, inputs], each of {', '.join(map(str, sizes))}")
    return value[0], value[1]
