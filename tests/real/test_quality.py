"""What 4 bits cost on real checkpoints: each row's numbers are printed, and bounded loosely.

Weights are rounded to the nearest by the writer of the tests, which is worse than what AWQ and GPTQ make of them. The
checkpoint comes from a file in 4 bits itself (groups of 32), so that only other groups say something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.parity.int4_files import VARIANTS, write_variant
from tests.parity.paged import PagedModel
from tests.real.models import smollm2

TEXT = """\
The harbour was quiet when the ferry came in. Two men in yellow coats caught the ropes and made them fast, and the
driver of the only taxi folded his newspaper. Nobody got off but a girl with a cello, who looked at the hill, then
at the sky, and began to walk. It had rained for most of a week, and the road to the school was more stream than
road, so she carried the case on her back like a boat turned over.

Water moves through a landscape in ways that are easy to name and hard to predict. Some of it runs off at once,
some sinks into the soil and is taken up by roots, and the rest travels slowly through sand and gravel until it
comes to light again, perhaps years later, in a spring at the foot of a slope. An engineer who wants to know how
high a river will rise must therefore ask not only how much rain has fallen, but where, how fast, and onto what
kind of ground.

A list in Python is a sequence of references to objects. Appending to it takes constant time on average, because
the list keeps some room at its end and doubles that room when it is used up; inserting at the front takes time
proportional to the length, since every reference has to move. Where both ends are needed, a deque is the better
choice.

In 1851 the committee met eleven times and agreed on almost nothing. Its chairman, a retired judge, believed that
the new railway ought to follow the valley; the owners of the mills wanted it to cross the ridge, which would have
cost twice as much and saved them a mile. In the end the decision was made by the weather: a landslip closed the
ridge in March, and the first train ran along the river in the autumn of the following year.
"""
# Checkpoint, variant, group -> at most: mean KL in nats, perplexity over that of 16 bits; at least: same best tokens.
# Behind them what was found.
ROWS = [
    (smollm2, "awq", 64, 0.40, 1.40, 0.60),  # 0.28, 1.25, 0.70
    (smollm2, "gptq", 64, 0.75, 1.90, 0.45),  # 0.56, 1.67, 0.57
]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(("checkpoint", "variant", "group", "most_kl", "most_loss", "least_same"), ROWS)
def test_quality(
    checkpoint: Callable[[], Path],
    variant: str,
    group: int,
    most_kl: float,
    most_loss: float,
    least_same: float,
    tmp_path: Path,
) -> None:
    folder, quantized, plain = checkpoint(), tmp_path / "quantized", tmp_path / "plain"
    write_variant(folder, replace(VARIANTS[variant], group=group), quantized, plain)
    ids = AutoTokenizer.from_pretrained(folder).encode(TEXT)
    found = compared(logits(folder, ids), logits(quantized, ids), ids)
    print(folder.name, variant, group, ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    assert found["kl"] <= most_kl
    assert found["perplexity"] <= most_loss * found["perplexity of 16 bits"]
    assert found["same"] >= least_same


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """Of every token, float32, by this engine's model."""
    return PagedModel(folder, page_size=16, max_seq_len=1024, max_rows=1).step({0: ids}, {})[0].float()


def compared(expected: torch.Tensor, found: torch.Tensor, ids: list[int]) -> Mapping[str, float]:
    """Mean KL divergence of the next token in nats, perplexities, and the share of tokens with the same best one."""
    p, q, targets = expected.log_softmax(-1), found.log_softmax(-1), torch.tensor(ids[1:])
    losses = [-one[:-1].gather(1, targets[:, None]).mean().item() for one in (p, q)]
    return {
        "kl": (p.exp() * (p - q)).sum(-1).mean().item(),
        "perplexity of 16 bits": torch.tensor(losses[0]).exp().item(),
        "perplexity": torch.tensor(losses[1]).exp().item(),
        "same": (p.argmax(-1) == q.argmax(-1)).float().mean().item(),
    }
