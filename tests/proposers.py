"""Proposers that are right, wrong or odd on purpose, and a control that lets a step verify all that they say."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl_backend.arrays import NO_INT32, Int32Array
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.speculation.control import DraftControl
from minisgl_backend.speculation.proposer import Proposer
from tests.random_requests import RandomAnswer, RandomRequest

if TYPE_CHECKING:
    from minisgl_backend import LLM

KINDS = ("right", "erring", "random", "too many", "none")
Answers = Callable[[int, Int32Array, int], Sequence[int]]  # uid, tokens so far, how many -> the tokens that follow


class KnowingProposer(Proposer):
    """Knows what follows, and says what its kind makes of that: erring, each token is another one once in four times;
    "too many": as many as it knows, whatever is asked for."""

    def __init__(self, kind: str, vocab_size: int, answers: Answers, seed: int = 0) -> None:
        self._kind, self._vocab_size, self._answers = kind, vocab_size, answers
        self._random = random.Random(seed)

    def propose(self, row: int, uid: int, token_ids: Int32Array, most: int) -> Int32Array:
        if self._kind == "none":
            return NO_INT32
        most = 3 * most if self._kind == "too many" else self._random.randrange(most + 1)
        tokens = list(self._answers(uid, token_ids, most))
        for at in range(len(tokens)):
            if self._kind == "random" or (self._kind == "erring" and self._random.random() < 0.25):
                tokens[at] = self._random.randrange(self._vocab_size)
        return np.array(tokens, dtype=np.int32)


def what_follows(requests: Sequence[RandomRequest], answers: Sequence[Sequence[RandomAnswer]]) -> Answers:
    """Of sequences that are asked in this order, from uid 0 on."""
    prompts = [len(one.token_ids) for one in requests for _ in range(one.params.n)]
    said = [answer.token_ids for sequences in answers for answer in sequences]

    def follow(uid: int, token_ids: Int32Array, most: int) -> list[int]:
        done = len(token_ids) - prompts[uid]
        return said[uid][done : done + most]

    return follow


class EveryDraft(DraftControl):
    """Speculation is always on, and every draft is verified that there is room for."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.is_on = True

    def decide(self, rows: Sequence[int], uids: Sequence[int], num_rows: int, room: int) -> None:
        pass

    def decide_depth(self, rows: Sequence[int], uids: Sequence[int], num_rows: int, room: int) -> None:
        pass

    def forced_pay(self, counts: Sequence[int], num_rows: int, room: int) -> bool:
        return True

    def choose(
        self,
        rows: Sequence[int],
        uids: Sequence[int],
        proposed: Sequence[Int32Array],
        num_rows: int,
        room: int,
        forced: Container[int] = (),
    ) -> list[int]:
        counts = []
        for tokens in proposed:
            counts.append(min(len(tokens), room))
            room -= counts[-1]
        return counts


def draft_model(folder: Path, num_layers: int, most: int) -> dict[str, Any]:
    """Options by which the first layers of the demo model propose; with all 6 of them it is the demo model."""
    from safetensors.torch import load_file, save_file  # imports torch, which tests of the scheduler do without

    demo = find_model_dir("demo")
    config = json.loads((demo / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(demo / "tokenizer.json", folder)
    left_out = tuple(f"model.layers.{index}." for index in range(num_layers, 6))
    tensors = load_file(demo / "model.safetensors").items()
    save_file({name: one for name, one in tensors if not name.startswith(left_out)}, folder / "model.safetensors")
    method = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": most}
    return {"speculative_config": method}


def verify_every_draft(llm: LLM, most: int) -> None:
    """That the engine's own proposer says."""
    drafting = llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
    drafting._control = EveryDraft(most)
    if drafting._steps is not None:  # a proposer on the device
        drafting._steps._control = drafting._control


def proposals_in_answers(llm: LLM, most: int) -> list[tuple[list[int], list[int]]]:
    """`proposals_of` answers to a few prompts, some of several chunks; the answers are those without drafts."""
    prompts = [[9, 9, 9], [5, 6, 7, 8] * 10, list(range(100, 155))]
    answers = llm.generate(prompts, temperature=0.0, max_tokens=12, ignore_eos=True, speculative=False)
    texts = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    found = proposals_of(llm, texts, most)
    again = llm.generate(prompts, temperature=0.0, max_tokens=12, ignore_eos=True)
    assert [one.token_ids for one in again] == [one.token_ids for one in answers]
    llm.engine.core._scheduler.check()  # type: ignore[attr-defined]
    accepted = llm.stats.speculation.accepted
    assert accepted[0] > accepted[2] > 0
    assert len(found) >= len(prompts)
    return found


def proposals_of(llm: LLM, texts: list[list[int]], most: int) -> list[tuple[list[int], list[int]]]:
    """What a proposer on the device proposes from now on: tokens known, and those behind them. Verified are the tokens
    of `texts` instead, some of them wrong, so that any number of drafts is accepted."""
    drafting = llm.engine.core._scheduler._drafting  # type: ignore[attr-defined]
    drafting._control = drafting._steps._control = EveryDraft(most)
    found = []

    def noting(row: int, uid: int, total: int, proposed: Int32Array) -> None:
        found.append((drafting._running.rows.tokens_of(row)[:total].tolist(), proposed.tolist()))

    def verified(row: int, uid: int, token_ids: Int32Array, most: int) -> Int32Array:
        total = len(token_ids)
        (text,) = (one for one in texts if one[:total] == token_ids.tolist())
        drafts = np.array(text[total : total + most], dtype=np.int32)
        drafts[total % 5 :] += 1
        return drafts

    drafting._proposer.note, drafting._proposer.propose = noting, verified
    return found
