"""The same answers, and right ones, however the engine is run. docs/correctness.md lists the cells."""

from __future__ import annotations

from tests.gauge.cells import Cell
from tests.gauge.harness import Gauge

MOST_WRONG = 0.02


def test_the_baseline_answers_right(gauge: Gauge) -> None:
    baseline = gauge.baseline(gauge.questions)
    wrong = [
        f"{question.kind}: {question.messages[-1]['content']!r} -> {output.text!r}"
        for question, output in zip(gauge.questions, baseline, strict=True)
        if not question.is_right(output.text)
    ]
    assert len(wrong) <= max(1, MOST_WRONG * len(gauge.questions)), "\n".join(wrong)
    assert all(output.finish_reason == "stop" for output in baseline)


def test_the_same_answers_in_every_cell(gauge: Gauge, cell: Cell) -> None:
    answers = gauge.run(cell)
    asked = gauge.starved_questions if cell.starved else gauge.questions
    baseline = gauge.baseline(asked)
    different = [
        f"{question.kind}: {question.messages[-1]['content']!r}\n  baseline {expected.text!r}\n  here     {text!r}"
        for question, expected, text in zip(asked, baseline, answers.texts, strict=True)
        if text != expected.text
    ]
    assert not different, "\n".join(different)
    assert [one.finish_reason for one in answers.outputs] == [one.finish_reason for one in baseline]
    assert answers.pages_leased == 0
    if cell.starved:
        assert answers.preemptions > 0, "this cell must take pages from running sequences"
