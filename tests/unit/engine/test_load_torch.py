"""What an engine's start does to the garbage collector of its process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

CODE = """
import gc, sys, weakref
{before}
from minisgl_backend import LLM
class Cycle:
    def __init__(self): self.me = self
garbage = weakref.ref(Cycle())
LLM("demo", num_pages=64, dtype="float32").generate([[1, 2, 3]], max_tokens=1)
gc.collect()
print(gc.isenabled(), gc.get_freeze_count() > 100_000, garbage() is None)
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [("", "True True True"), ("import torch", "True False True"), ("gc.disable()", "False False True")],
    ids=["usual", "torch is there", "no collector"],
)
def test_a_start_leaves_torch_alone_to_no_collection(before: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(before=before)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == said
