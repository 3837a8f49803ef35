"""Every schema of the JSON Schema Test Suite (draft 2020-12): refused by name, or all answers are valid.

Answers are drawn from the masks, and by the demo model through the engine. `pytest --full` takes all schemas with 16
answers each, else every fourth with 4, of the demo model every forty-fifth.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Context, Decimal, localcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xgrammar")
from jsonschema import Draft202012Validator

from minisgl_backend import LLM, SamplingParams
from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import Grammar
from tests.unit.grammar.schema_sampler import accepts, ebnf, samples

SUITE = Path(__file__).parents[2] / "third_party" / "json_schema_test_suite"
Case = tuple[str, Any]  # its name; what the suite says of it
CASES: list[Case] = [
    (f"{path.stem}: {group['description']}", group)
    for path in sorted(SUITE.glob("*.json"))
    for group in json.loads(path.read_text(encoding="utf-8"))
]
# What a schema may use without being refused, but for unsatisfiable ones.
PLAIN = {
    *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems"),
    *("maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern"),
    *("anyOf", "$ref", "allOf"),
}
SAYS_NOTHING = {"$schema", "$comment", "title", "description", "default", "$defs", "$id", "$anchor"}
TRIVIAL: tuple[Any, ...] = ({}, [])


def refusal(schema: Any) -> str:
    try:
        ebnf(schema)
    except InvalidRequestError as refused:
        return str(refused)
    return ""


def check(group: Any, answers: list[str | None], needed: float) -> None:
    """At least `needed` of the answers ended (None: did not), and all that did are valid. Where some are needed, they
    or what the grammar accepts are more than empty containers."""
    schema = group["schema"]
    ended = [answer for answer in answers if answer is not None]
    assert len(ended) >= needed, f"{len(ended)} of {len(answers)} ended: {answers}"
    values = [json.loads(answer, parse_float=Decimal) for answer in ended]
    validator = Draft202012Validator(json.loads(json.dumps(schema), parse_float=Decimal))
    with localcontext(Context(prec=4000)):  # numbers may have many digits
        for value in values:
            assert validator.is_valid(value), (schema, value)
    if needed and all(value in TRIVIAL for value in values):
        more = [test["data"] for test in group["tests"] if test["valid"] and test["data"] not in TRIVIAL]
        assert not more or any(accepts(schema, json.dumps(value, ensure_ascii=False)) for value in more), schema


def run(cases: list[Case], count: int) -> None:
    refused = {}
    for name, group in cases:
        reason = refusal(group["schema"])
        if reason:
            refused[name] = reason
        else:
            check(group, samples(group["schema"], count), count / 2)
    print(f"schemas: {len(cases)}, kept: {len(cases) - len(refused)}, refused: {len(refused)}")
    assert len(refused) <= 0.4 * len(cases)
    for name, reason in refused.items():
        assert "guided_decoding_guide: the schema's " in reason or "no value matches" in reason, (name, reason)


def test_a_fourth_of_the_suite() -> None:
    run(CASES[::4], 4)


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_the_whole_suite(part: int) -> None:
    run(CASES[part::4], 16)


MOST_ROWS = 128  # of a step
# The demo model need not end these by itself, as answers do that are drawn byte by byte (`test_the_whole_suite`): of
# its 1,024 tokens none has "bar" and one is a quotation mark, so it seldom ends a name that must end in bar, or that
# must hold two digits or "X_".
SELDOM_END = {
    "patternProperties: patternProperties with null valued instance properties",
    "patternProperties: regexes are not anchored by default and are case sensitive",
}


def ask_demo_model(cases: list[Case], count: int, *most_tokens: int) -> None:
    """At temperature 5, through the whole engine. Numbers and lists without a bound end late: where fewer than half of
    the answers ended, they are asked for again with the next of `most_tokens`."""
    todo = [case for case in cases if not refusal(case[1]["schema"])]
    print(f"schemas: {len(cases)}, kept: {len(todo)}")
    wrong: list[str] = []
    # In 32 bits an answer does not depend on which others are in its steps.
    with LLM("demo", max_running_requests=MOST_ROWS, dtype="float32") as llm:
        for most in most_tokens:
            asked, todo = todo, []
            for (name, group), answers in answers_of(llm, asked, count, most):
                needed = 0 if name in SELDOM_END else count / 2
                if most < most_tokens[-1] and sum(answer is not None for answer in answers) < needed:
                    todo.append((name, group))
                    continue
                try:
                    check(group, answers, needed)
                except AssertionError as error:
                    wrong.append(f"{name}: {error}")
            print(f"{len(asked)} asked with {most} tokens: {len(todo)} end too seldom, {len(wrong)} wrong", flush=True)
    assert not wrong, "\n".join(wrong)


def answers_of(llm: LLM, cases: list[Case], count: int, most_tokens: int) -> Iterator[tuple[Case, list[str | None]]]:
    """Each schema with its answers; None for one that did not end. As many schemas at a time as fill a step."""
    for start in range(0, len(cases), MOST_ROWS // count):
        some = cases[start : start + MOST_ROWS // count]
        params = [
            SamplingParams(
                temperature=5.0,
                max_tokens=most_tokens,
                seed=seed,
                grammar=Grammar(kind="json_schema", text=json.dumps(group["schema"])),
            )
            for _, group in some
            for seed in range(count)
        ]
        outputs = llm.chat([[{"role": "user", "content": "What is 17 + 25?"}]] * len(params), params)
        texts = [one.text if one.finish_reason == "stop" else None for one in outputs]
        for number, case in enumerate(some):
            yield case, texts[number * count :][:count]


def test_the_demo_model_at_a_high_temperature() -> None:
    ask_demo_model(CASES[::45], 4, 500)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_the_demo_model_and_the_whole_suite(part: int) -> None:
    ask_demo_model(CASES[part::4], 16, 250, 1500)


def keywords(schema: Any) -> set[str]:
    found = set()
    todo = [schema]
    while todo:
        one = todo.pop()
        if not isinstance(one, dict):
            continue
        found |= one.keys() - SAYS_NOTHING
        for key in ("items", "additionalProperties"):
            todo.append(one.get(key))
        for key in ("allOf", "anyOf", "prefixItems"):
            todo += one.get(key, [])
        for key in ("properties", "$defs"):
            todo += one.get(key, {}).values()
    return found


def test_what_uses_plain_keywords_only_is_kept() -> None:
    for name, group in CASES:
        schema = group["schema"]
        reason = refusal(schema) if isinstance(schema, dict) and keywords(schema) <= PLAIN else ""
        is_remote = "which this schema does not hold" in reason
        can_be = any(test["valid"] for test in group["tests"])
        assert not reason or is_remote or not can_be, (name, reason)


def test_unsatisfiable_schemas_are_refused() -> None:
    for name, group in CASES:
        reason = refusal(group["schema"])
        if "no value matches" in reason:
            assert not any(test["valid"] for test in group["tests"]), name
