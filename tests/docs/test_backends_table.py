"""The table of attention backends is the registry's. `python -m tests.docs.test_backends_table` writes it anew."""

from __future__ import annotations

import re

from minisgl_backend.attention.latent.kind import BACKENDS as MLA
from minisgl_backend.attention.mha import BACKENDS as MHA
from minisgl_backend.attention.mha import MHAEntry
from minisgl_backend.config import BACKENDS
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "adding_an_attention_backend.md"
BEGIN, END = "<!-- table backends -->", "<!-- /table backends -->"
HIGHEST = 200  # compute capabilities above are those of no GPU


def table() -> str:
    """Markdown."""
    head = "| | page sizes | head sizes | FP8 cache | soft caps | sinks | MLA: decode | MLA: page sizes |"
    lines = (f"| `{name}` | {_cells(name)} |" for name in BACKENDS)
    return "\n".join([head, "|" + " --- |" * 8, *lines])


def _cells(name: str) -> str:
    cells, entry = ["-"] * 5, MHA.get(name)
    if entry is not None:
        cells = [listed(entry.page_sizes), _heads(entry), capabilities(entry.fp8_capabilities), _yes(entry.soft_caps)]
        sinks = "where the installed kernels have them" if entry.sink_kernels else _yes(entry.sinks)
        cells.append(sinks)
    latents = MLA.get(name)
    if latents is None:
        return " | ".join([*cells, "no", "-"])
    sizes = "" if latents.sizes is None else ", ".join(f"{rank} + {rope}" for rank, rope in latents.sizes)
    decode = ", ".join(filter(None, (sizes, capabilities(latents.capabilities))))
    return " | ".join([*cells, decode, listed(latents.page_sizes)])


def listed(sizes: tuple[int, ...] | None) -> str:
    return "any" if sizes is None else ", ".join(map(str, sizes))


def _heads(entry: MHAEntry) -> str:
    if entry.head_sizes is not None:
        return listed(entry.head_sizes)
    if entry.largest_head is None:
        return "any"
    multiples = f"multiples of {entry.head_multiple}" if entry.head_multiple > 1 else "all"
    return f"{multiples} to {entry.largest_head}"


def capabilities(found: range) -> str:
    first, last = found[0], found[-1] + 1
    if last > HIGHEST:
        return "everywhere" if first == 0 else f"from {first / 10:.1f} on"
    return f"{first / 10:.1f} to below {last / 10:.1f}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def test_the_table_is_that_of_the_registry() -> None:
    inside = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert inside.strip() == table(), "python -m tests.docs.test_backends_table writes it anew"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n{table()}\n{END}", text, flags=re.DOTALL), encoding="utf-8")
