"""Every format of calls: whole, cut anywhere, damaged, and chosen by the chat templates of real models."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.parsers.table import CALLS as FORMATS_OF_CALLS
from minisgl_backend.parsers.table import (
    FORMATS,
    REASONING,
    REASONING_PARSERS,
    TOOL_PARSERS,
    find_calls,
    find_reasoning,
)
from tests.unit.parsers.formats import ALONE, CALLS, SCHEMAS, WRITERS
from tests.unit.parsers.test_parsers import calls_of, content_of, run

TEMPLATES = Path(__file__).parents[2] / "third_party" / "llama.cpp" / "templates"


def new_parser(name: str) -> Any:
    return FORMATS_OF_CALLS[name].new_calls(SCHEMAS)


def test_every_format_has_a_name_and_a_test() -> None:
    assert set(TOOL_PARSERS) - {"auto", "none"} == {name for name, _ in WRITERS.values()} == set(FORMATS_OF_CALLS)
    assert set(REASONING_PARSERS) - {"auto", "none"} == set(REASONING)
    page = (Path(__file__).parents[3] / "docs" / "openai.md").read_text(encoding="utf-8")
    for row in FORMATS:
        assert row.doc_row in page, f"docs/openai.md lacks: {row.doc_row}"


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_calls_whole_and_cut_at_every_place(written: str) -> None:
    name, write = WRITERS[written]
    for number in (1, 2, len(CALLS)):
        text = write(CALLS[:number])
        whole = run(new_parser(name), [text])
        assert calls_of(whole) == CALLS[:number]
        assert content_of(whole) == ""
        assert [number for kind, _, number in whole if kind == "call"] == list(range(number))
        assert run(new_parser(name), list(text)) == whole
        for place in range(0, len(text), 1 if number == 2 else 7):
            assert run(new_parser(name), [text[:place], text[place:]]) == whole


@pytest.mark.parametrize("written", sorted(set(WRITERS) - ALONE - {"harmony", "harmony of the template"}))
def test_text_around_calls(written: str) -> None:
    name, write = WRITERS[written]
    text = f"I shall look.\n\n{write(CALLS[:2])}\n\nThat was it. "
    for pieces in ([text], list(text), [text[:20], text[20:]]):
        events = run(new_parser(name), pieces)
        assert calls_of(events) == CALLS[:2]
        assert content_of(events).split() == ["I", "shall", "look.", "That", "was", "it."]


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_an_answer_without_calls_is_as_it_was_written(written: str) -> None:
    name, _ = WRITERS[written]
    for text in ("", "Plain text, [1, 2] and {a: 1} <b>.", "a <tool_", "[x] is", "to be, or"):
        for pieces in ([text], list(text)):
            assert run(new_parser(name), pieces) == ([("content", text, 0)] if text else [])


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_damaged_answers_make_no_call_that_was_not_written(written: str) -> None:
    """200 answers with a stretch lost, doubled or of something else: no exception, and no call but the real ones, those
    whose values stand in the text, and those whose arguments are no JSON, which nobody can run."""
    name, write = WRITERS[written]
    generator = random.Random(written)
    known = [(called, json.dumps(arguments, sort_keys=True)) for called, arguments in CALLS]
    for _ in range(200):
        text = write(CALLS[: generator.randrange(1, len(CALLS) + 1)])
        start = generator.randrange(len(text))
        end = min(len(text), start + generator.randrange(1, 40))
        text = text[:start] + generator.choice(["", text[start:end] * 2, "<", "\n", "}", '"', "x"]) + text[end:]
        for reason in ("stop", "length"):
            whole = run(new_parser(name), [text], reason)
            assert run(new_parser(name), list(text), reason) == whole
            for called, arguments in _calls(whole):
                assert called in text
                if arguments is not None and (called, json.dumps(arguments, sort_keys=True)) not in known:
                    assert all(_is_written(value, text) for value in arguments.values()), (text, arguments)


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_an_answer_cut_at_max_tokens_has_no_call_with_arguments_missing(written: str) -> None:
    """Wherever it is cut: each call is one that was written, whole, or its arguments are no JSON."""
    name, write = WRITERS[written]
    text = write(CALLS)
    for place in range(len(text)):
        found = _calls(run(new_parser(name), [text[:place]], "length"))
        for call, real in zip(found, CALLS, strict=False):
            assert call in (real, (real[0], None)), text[:place]


@pytest.mark.parametrize("written", ["mistral, a list", "granite", "apriel", "minimax"])
def test_a_list_cut_within_a_call_leaves_no_signs_behind(written: str) -> None:
    name, write = WRITERS[written]
    for number in (1, 2):
        text = write([("time", {"hour": 7})] * number)
        events = run(new_parser(name), [text[: text.rindex("7")]], "length")
        assert (len(_calls(events)), content_of(events)) == (number, "")


def test_a_text_that_begins_like_a_header_of_harmony() -> None:
    for text in ("assistants help", "to=be"):
        assert run(new_parser("harmony"), list(text)) == [("content", text, 0)]
    assert run(new_parser("harmony"), ["<|channel|>anal"], "length") == []


def test_a_text_that_says_null_is_a_text() -> None:
    for name in ("glm45", "minimax_m2", "qwen3_coder"):
        text = WRITERS[name][1]([("weather", {"city": "null"}), ("time", {"hour": None})])
        assert calls_of(run(new_parser(name), [text])) == [("weather", {"city": "null"}), ("time", {"hour": None})]


def _calls(events: Any) -> list[tuple[str, Any]]:
    """(name, arguments; None where they are no JSON)."""
    found: list[tuple[str, Any]] = []
    for kind, text, _ in events:
        if kind == "call":
            found.append((text, None))
        elif kind == "arguments":
            try:
                found[-1] = (found[-1][0], json.loads(text))
            except ValueError:
                found[-1] = (found[-1][0], None)
    return found


def _is_written(value: Any, text: str) -> bool:
    """Whether a value that no call has stands in the damaged text as it is."""
    if isinstance(value, str):
        forms = (value, json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1])
        # Python keeps the backslash of an escape that it does not know, and drops one before the end of a line.
        return any(form.strip() in text for form in forms) or value.replace("\\", "") in re.sub(r"\\\n?", "", text)
    if isinstance(value, dict):
        return all(_is_written(one, text) for one in value.values())
    if isinstance(value, list):
        return all(_is_written(one, text) for one in value)
    return value is None or str(value).lower() in text.lower()


def test_ids_that_models_write_are_kept() -> None:
    parser = new_parser("kimi_k2")
    parts = parser.feed(WRITERS["kimi_k2"][1](CALLS[:2]))
    assert [part.id for part in parts if part.kind == "call"] == ["functions.weather:0", "functions.time:1"]
    parts = new_parser("mistral").feed(WRITERS["mistral, ids"][1](CALLS[:1]))
    assert [part.id for part in parts if part.kind == "call"] == ["abcdef123"]


def test_arguments_come_while_they_are_written() -> None:
    for name, begin in (
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>time<｜tool▁sep｜>"),
        ("kimi_k2", "<|tool_call_begin|>functions.time:0<|tool_call_argument_begin|>"),
        ("mistral", "[TOOL_CALLS]time[ARGS]"),
        ("harmony", "<|channel|>commentary to=functions.time <|constrain|>json<|message|>"),
    ):
        parser = new_parser(name)
        parser.feed(begin + '{"zone": "')
        assert [part.text for part in parser.feed("UT")] == ["UT"], name


HARMONY = (
    "<|channel|>analysis<|message|>First this.\n<|end|><|start|>assistant"
    "<|channel|>analysis<|message|>Then that.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I shall look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.time <|constrain|>json<|message|>{"hour": 7}<|call|>'
)


def test_channels_of_harmony() -> None:
    expected = [
        ("reasoning", "First this.\nThen that.", 0),
        ("content", "I shall look.", 0),
        ("call", "time", 0),
        ("arguments", '{"hour": 7}', 0),
    ]
    for pieces in ([HARMONY], list(HARMONY)):
        assert run(new_parser("harmony"), pieces) == expected
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>42 < 43\n\nYes."
    for pieces in ([final], list(final)):
        assert run(new_parser("harmony"), pieces) == [("reasoning", "Hm.", 0), ("content", "42 < 43\n\nYes.", 0)]
    guided = '{"a": 1} '
    assert run(new_parser("harmony"), list(guided)) == [("content", '{"a": 1}', 0)]
    unknown = "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}<|call|>"
    assert run(new_parser("harmony"), [unknown]) == [("content", "{}", 0)]


@pytest.mark.parametrize("name", sorted(REASONING))
def test_thoughts_of_every_format(name: str) -> None:
    row = REASONING[name]
    if row.tags is None:
        return
    for inside in (False, True):
        text = ("" if inside else row.tags[0]) + f"\nfirst this\n{row.tags[1]}\n\nThe answer."
        for pieces in ([text], list(text)):
            found = run(row.new_reasoning(inside=inside), pieces)
            assert found == [("reasoning", "first this", 0), ("content", "The answer.", 0)]


# Which calls and thoughts the chat templates of real models choose; and tokens of theirs that the choice needs.
TOKENS = {"meta-llama-Llama-3": ("<|python_tag|>",), "LFM2": ("<|tool_call_start|>", "<|tool_call_end|>")}
CHOSEN = {
    "hermes/qwen3": "Bielik-11B-v3.0-Instruct Qwen-QwQ-32B Qwen-Qwen3-0.6B Reka-Edge",
    "hermes/": "MiMo-VL NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use "
    "Qwen-Qwen2.5-7B-Instruct ibm-granite-granite-4.0 ibm-granite-granite-4.1",
    "glm45/qwen3": "GLM-4.6 GLM-4.7-Flash Spark2.5 inclusionai-ling-3.0-flash poolside-Laguna-S-2.1 "
    "poolside-Laguna-XS-2.1 poolside-Laguna-XS.2",
    "qwen3_coder/qwen3": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 Qwen3.5-4B StepFun3.5-Flash",
    "qwen3_coder/": "Qwen3-Coder",
    "deepseek_v3/qwen3": "deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B "
    "llama-cpp-deepseek-r1",
    "deepseek_v31/qwen3": "deepseek-ai-DeepSeek-V3.1",
    "deepseek_v32/qwen3": "deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "kimi_k2/": "Kimi-K2-Instruct moonshotai-Kimi-K2",
    "kimi_k2/qwen3": "Kimi-K2-Thinking",
    "minimax_m2/qwen3": "MiniMax-M2",
    "minimax/": "Apriel-1.6-15b-Thinker-fixed MiniMax-M1 unsloth-Apriel-1.5",
    "mistral/": "Mistral-Small-3.2-24B-Instruct-2506 mistralai-Mistral-Nemo-Instruct-2407 "
    "unsloth-mistral-Devstral-Small-2507",
    "mistral/mistral": "mistralai-Ministral-3-14B-Reasoning-2512",
    "gemma4/gemma4": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
    "granite/qwen3": "ibm-granite-granite-3.3-2B-Instruct",
    "harmony/harmony": "openai-gpt-oss-120b",
    "llama3_json/": "meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct "
    "meta-llama-Llama-3.3-70B-Instruct",
    "lfm2/": "LFM2-8B-A1B",
    "lfm2/qwen3": "LFM2.5-8B-A1B LFM2.5-Instruct",
    "/seed_oss": "ByteDance-Seed-OSS",
    "/qwen3": "HuggingFaceTB-SmolLM3-3B NVIDIA-Nemotron-Nano-v2 llama-cpp-rwkv-world openbmb-MiniCPM5-1B",
    "/": "Apertus-8B-Instruct Cohere2MoE CohereForAI-c4ai-command-r-plus-tool_use "
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use GigaChat3-10B-A1.8B GigaChat3.1-10B-A1.8B Kimi-K3 MiniMax-M3 "
    "fireworks-ai-llama-3-firefunction-v2 google-gemma-2-2b-it meetkai-functionary-medium-v3.1 "
    "meetkai-functionary-medium-v3.2 microsoft-Phi-3.5-mini-instruct muse-glimmer tencent-Hy3 upstage-Solar-Open-100B",
}


def test_which_template_gets_which_parsers() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(TEMPLATES.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        tokens = [token for name, given in TOKENS.items() if path.stem.startswith(name) for token in given]
        calls, thoughts = find_calls(template, tokens), find_reasoning(template, tokens)
        key = f"{calls.name if calls else ''}/{thoughts.name if thoughts else ''}"
        found.setdefault(key, []).append(path.stem)
    assert {key: sorted(names) for key, names in found.items()} == {
        key: sorted(names.split()) for key, names in CHOSEN.items()
    }


@pytest.mark.parametrize("written", sorted(WRITERS))
def test_white_space_that_comes_in_pieces_is_kept_and_decides_nothing(written: str) -> None:
    name, write = WRITERS[written]
    call = write(CALLS[2:3])
    for before, behind in (("", "b"), ("", call), ("a", "b"), ("a", call), (call, "b"), (call, call), (call, "")):
        pieces = [before, " ", "\n", "", "\t\n", behind]
        for reason in ("stop", "length"):
            assert run(new_parser(name), pieces, reason) == run(new_parser(name), ["".join(pieces)], reason)
