"""A field by row goes with the residual stream: where tokens are selected, in micro-batches, over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.layers.norm import SublayerNorms
from minisgl_backend.layers.residual import Residual, join
from minisgl_backend.tensor_parallel import TensorParallel
from tests.parity.checkpoints import save_checkpoint
from tests.parity.paged import PagedModel
from tests.toys.row_offsets import adapt

PROMPTS = {0: [5, 9, 77, 3, 8], 1: [11] * 7, 2: list(range(40, 51))}


@pytest.mark.parametrize("name", ["qwen3-tied-sharded", "gemma3"])
def test_rows_in_one_pass_get_what_each_gets_alone(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    paged = PagedModel(tmp_path, page_size=4, max_rows=12)
    size = paged.model.config.hidden_size
    adapt(paged.model, torch.randn(4, size, generator=torch.Generator().manual_seed(2)))

    def with_slots(*slots: tuple[int, int]) -> object:
        by_row = torch.cat([torch.full((count,), slot) for slot, count in slots])
        return lambda tokens: tokens._replace(by_row=by_row)

    slots = {0: 3, 1: 0, 2: 2}
    change = with_slots(*((slots[row], len(prompt)) for row, prompt in PROMPTS.items()))
    together = paged.step(dict(PROMPTS), {}, last_only=True, change=change)  # type: ignore[arg-type]
    for row, prompt in PROMPTS.items():
        alone = paged.step({row + 3: prompt}, {}, change=with_slots((slots[row], len(prompt))))  # type: ignore[arg-type]
        torch.testing.assert_close(together[row][0], alone[row + 3][-1], rtol=1e-4, atol=1e-4)
        other = paged.step({row + 6: prompt}, {}, change=with_slots((1, len(prompt))))  # type: ignore[arg-type]
        assert not torch.allclose(other[row + 6][-1], together[row][0], atol=1e-2)
    decode = with_slots(*((slots[row], 1) for row in PROMPTS))
    found = paged.step({}, dict.fromkeys(PROMPTS, 7), change=decode)  # type: ignore[arg-type]
    alone = paged.step({}, {4: 7}, change=with_slots((slots[1], 1)))  # type: ignore[arg-type]
    torch.testing.assert_close(found[1], alone[4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3-tied-sharded", "cohere"])
def test_sublayers_have_that_of_the_rows_at_hand(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, then an MLP, or both in parallel; the last layer computes the last tokens alone."""
    save_checkpoint(name, tmp_path)
    paged, seen, plus = PagedModel(tmp_path, page_size=4), [], Residual.plus

    def recorded(self: Residual, *args: Any) -> Residual:
        seen.append((self.num_tokens, *fields(self)))
        return plus(self, *args)

    monkeypatch.setattr(Residual, "plus", recorded)
    by_row = torch.arange(23)
    paged.step(PROMPTS, {}, last_only=True, change=lambda tokens: tokens._replace(by_row=by_row))
    assert set(map(str, seen)) == {str((23, list(range(23)))), str((3, [4, 11, 22]))}


def test_it_is_selected_split_and_joined_as_hidden_states_are() -> None:
    hidden, field = torch.randn(6, 4), torch.arange(12).view(6, 2)
    residual = Residual(hidden, TensorParallel.single(), by_row=field)
    assert fields(residual.at(torch.tensor([4, 1]))) == [field[[4, 1]].tolist()]
    parts = residual.split([4, 2])
    assert fields(*parts) == [field[:4].tolist(), field[4:].tolist()]
    for norms in (SublayerNorms(None), SublayerNorms(None, None, 0.5)):
        after = tuple(part.plus(lambda added_to: torch.ones(1, 4), norms) for part in parts)
        assert fields(join(after), join(after).times(torch.ones(1))) == [field.tolist()] * 2
    plain = Residual(hidden, TensorParallel.single())
    assert [part.by_row for part in (*plain.split([3, 3]), join(plain.split([3, 3])))] == [None] * 3


def fields(*residuals: Residual) -> list[Any]:
    return [one.by_row.tolist() for one in residuals if one.by_row is not None]
