"""All formats of reasoning and tool calls: their names, parsers, and how a model is recognized to use one.

Names are vLLM's where it has the format. A new format is a file and a row here; the options, the endpoint and the table
in docs/openai.md follow from it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from minisgl_backend.lazy_import import load_attribute
from minisgl_backend.parsers.parts import ReasoningParser, ToolParser
from minisgl_backend.parsers.reasoning import TagReasoningParser
from minisgl_backend.parsers.strict import StrictCall

Functions = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the arguments


@dataclass(frozen=True)
class Marks:
    """What identifies a format beyond doubt: texts of the chat template and of the added tokens."""

    template: tuple[str, ...] = ()  # regular expressions that all match
    tokens: tuple[str, ...] = ()  # all present
    never: tuple[str, ...] = ()  # none matches the template
    anywhere: tuple[str, ...] = ()  # each in the template or among the tokens

    def fit(self, template: str, tokens: Collection[str]) -> bool:
        return (
            all(re.search(one, template) for one in self.template)
            and not any(re.search(one, template) for one in self.never)
            and all(one in tokens for one in self.tokens)
            and all(one in template or one in tokens for one in self.anywhere)
        )


@dataclass(frozen=True)
class Format:
    """One row. `special`: its tags are special tokens, which the parsed text must then include."""

    name: str
    models: str  # for readers
    form: str  # the syntax, for readers
    marks: Marks | None  # None: selected by name only
    calls: str | None = None  # MODULE:CLASS of the parser of calls, imported at first use
    tags: tuple[str, str] | None = None  # around the reasoning
    always_thinks: bool = False  # an answer begins within the reasoning, whatever the prompt ends with
    both: str | None = None  # MODULE:CLASS of one parser for reasoning, content and calls
    channels: tuple[str, str, str] | None = None  # with `both`: see `reasoning`
    special: bool = False
    strict: StrictCall | None = None  # how a grammar writes calls; None: no such grammar
    strict_with: tuple[str, StrictCall] | None = None  # used instead if the model's tokens or template contain this

    @property
    def doc_row(self) -> str:
        """The format's row in the table of docs/openai.md."""
        does = [word for word, has in (("calls", self.has_calls), ("thoughts", self.has_reasoning)) if has]
        form = self.form.replace("|", "\\|")
        return f"| `{self.name}` | {' and '.join(does)} | {self.models} | {form} |"

    def strict_form(self, template: str, tokens: Collection[str]) -> StrictCall | None:
        """The variant of `strict` for a model."""
        if self.strict_with is not None and (self.strict_with[0] in tokens or self.strict_with[0] in template):
            return self.strict_with[1]
        return self.strict

    @property
    def has_calls(self) -> bool:
        return bool(self.calls or self.both)

    @property
    def has_reasoning(self) -> bool:
        return bool(self.tags or self.both)

    @property
    def reasoning(self) -> tuple[str, str, str] | None:
        """The text that opens the reasoning, the one that closes it, and the one between it and the answer."""
        return self.channels if self.tags is None else (*self.tags, "")

    def opens(self, prompt_tail: str) -> bool:
        """Whether an answer to a prompt that ends like this begins within the reasoning."""
        return self.always_thinks or self.is_opened_by(prompt_tail)

    def is_opened_by(self, prompt_tail: str) -> bool:
        """Whether the prompt's end opens the reasoning."""
        return self.tags is not None and prompt_tail.rstrip().endswith(self.tags[0])

    def new_reasoning(self, *, inside: bool, apart: bool = True) -> ReasoningParser:
        """`inside`: the prompt has opened the reasoning. `apart`: see TagReasoningParser."""
        if self.tags is None:
            raise ValueError(f"{self.name} has no reasoning of its own")
        return TagReasoningParser(inside=inside, tags=self.tags, apart=apart)

    def new_calls(self, functions: Functions) -> ToolParser:
        """The parser of calls, or the one that parses `both`."""
        reference = self.calls or self.both
        if reference is None:
            raise ValueError(f"{self.name} has no calls")
        parser: ToolParser = load_attribute(reference)(functions)
        return parser

    def new_both(self, functions: Functions) -> ReasoningParser:
        """The parser of reasoning, content and calls together."""
        if self.both is None:
            raise ValueError(f"{self.name} has no parser of both")
        parser: ReasoningParser = load_attribute(self.both)(functions)
        return parser


def _json_list(trigger: str, begin: str, separator: str, end: str) -> StrictCall:
    """A list of calls that are JSON objects, between `begin` and `end`."""
    return StrictCall(trigger, '{"name": {json}, "arguments": ', "}", around=(begin, separator, end))


_THINK = ("<think>", "</think>")
# The first format whose marks match is used.
FORMATS = (
    Format(
        "harmony",
        "gpt-oss",
        "`<|channel|>analysis<|message|>...`, `<|channel|>commentary to=functions.NAME ...<|message|>{...}<|call|>`",
        Marks(anywhere=("<|start|>", "<|channel|>", "<|message|>")),
        both="minisgl_backend.parsers.harmony:HarmonyParser",
        channels=(
            "<|channel|>analysis<|message|>",
            "<|end|>",
            "<|start|>assistant<|channel|>final<|message|>",
        ),
        strict=StrictCall(
            "<|channel|>commentary to=functions.",
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "<|call|>",
        ),
        special=True,
    ),
    Format(
        "deepseek_v3",
        "DeepSeek V3, R1, R1-0528, R1-Distill",
        "`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` and a block of JSON",
        Marks(template=("<｜tool▁sep｜>", "```json")),
        calls="minisgl_backend.parsers.deepseek:DeepSeekV3Parser",
        strict=StrictCall(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ),
        special=True,
    ),
    Format(
        "deepseek_v31",
        "DeepSeek V3.1",
        "`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}`",
        Marks(template=("<｜tool▁sep｜>",), never=("```json",)),
        calls="minisgl_backend.parsers.deepseek:DeepSeekV31Parser",
        strict=StrictCall("<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        special=True,
    ),
    Format(
        "deepseek_v32",
        "DeepSeek V3.2, V4",
        '`<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">...`',
        Marks(template=("｜DSML｜", 'invoke name="')),
        calls="minisgl_backend.parsers.deepseek:DeepSeekV32Parser",
        strict=StrictCall(
            "<｜DSML｜invoke name=", '<｜DSML｜invoke name="{name}">\n', "\n</｜DSML｜invoke>", "deepseek_xml"
        ),
        special=True,
    ),
    Format(
        "kimi_k2",
        "Kimi-K2",
        "`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}`",
        Marks(template=(r"<\|tool_call_argument_begin\|>",)),
        calls="minisgl_backend.parsers.kimi:KimiK2Parser",
        strict=StrictCall(
            "<|tool_call_begin|>",
            "<|tool_call_begin|>functions.{name}:",
            "<|tool_call_end|>",
            number="<|tool_call_argument_begin|>",
        ),
        special=True,
    ),
    Format(
        "minimax_m2",
        "MiniMax-M2",
        '`<minimax:tool_call><invoke name="NAME"><parameter name="KEY">...`',
        Marks(template=("<minimax:tool_call>", "<invoke name=")),
        calls="minisgl_backend.parsers.minimax:MiniMaxM2Parser",
        strict=StrictCall("<invoke name=", '<invoke name="{name}">\n', "</invoke>", "minimax_xml"),
        special=True,
    ),
    Format(
        "glm45",
        "GLM-4.5 to 4.7, Ling 3",
        "`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>...`",
        Marks(template=("<tool_call>", "<arg_key>", "<arg_value>")),
        calls="minisgl_backend.parsers.glm:GlmParser",
        strict=StrictCall("<tool_call>", "<tool_call>{name}\n", "</tool_call>", "glm_xml"),
    ),
    Format(
        "qwen3_coder",
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
        "`<tool_call><function=NAME><parameter=KEY>...`",
        Marks(template=("<tool_call>", "<function=", "<parameter=")),
        calls="minisgl_backend.parsers.qwen_coder:QwenCoderParser",
        strict=StrictCall("<tool_call>", "<tool_call>\n<function={name}>\n", "\n</function>\n</tool_call>", "qwen_xml"),
    ),
    Format(
        "gemma4",
        "Gemma 4",
        '`<|tool_call>call:NAME{key:<|"|>text<|"|>}<tool_call|>`; thoughts `<|channel>thought ... <channel|>`',
        Marks(anywhere=("<|tool_call>", "<|channel>")),
        calls="minisgl_backend.parsers.gemma:Gemma4Parser",
        strict=StrictCall("<|tool_call>", "<|tool_call>call:{name}", "<tool_call|>", "gemma"),
        tags=("<|channel>thought", "<channel|>"),
        special=True,
    ),
    Format(
        "mistral",
        "Mistral 7B v3 and later, Nemo, Small, Devstral; Magistral, Ministral 3",
        "`[TOOL_CALLS][{...}]` or `[TOOL_CALLS]NAME[ARGS]{...}`; thoughts `[THINK]...[/THINK]`",
        Marks(template=(r"\[TOOL_CALLS\]",)),
        calls="minisgl_backend.parsers.mistral:MistralParser",
        strict=_json_list("[TOOL_CALLS]", "[TOOL_CALLS][", ", ", "]"),
        strict_with=("[ARGS]", StrictCall("[TOOL_CALLS]", "[TOOL_CALLS]{name}[ARGS]", "")),
        tags=("[THINK]", "[/THINK]"),
        special=True,
    ),
    Format(
        "granite",
        "Granite 3",
        '`<|tool_call|>[{"name": ..., "arguments": ...}]`',
        Marks(template=(r"<\|tool_call\|>",)),
        calls="minisgl_backend.parsers.json_lists:GraniteParser",
        strict=_json_list("<|tool_call|>", "<|tool_call|>[", ", ", "]"),
        special=True,
    ),
    Format(
        "lfm2",
        "LFM2",
        '`<|tool_call_start|>[NAME(key="text")]<|tool_call_end|>`',
        Marks(anywhere=("<|tool_call_start|>", "<|tool_call_end|>")),
        calls="minisgl_backend.parsers.pythonic:Lfm2Parser",
        strict=StrictCall(
            "<|tool_call_start|>",
            "{name}(",
            ")",
            "python",
            around=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
        ),
        special=True,
    ),
    Format(
        "minimax",
        "MiniMax-M1, Apriel 1.5 and 1.6",
        '`<tool_calls>[{"name": ..., "arguments": ...}]</tool_calls>`',
        Marks(template=("<tool_calls>", r"\barguments\b")),
        calls="minisgl_backend.parsers.json_lists:ToolCallsParser",
        strict=_json_list("<tool_calls>", "<tool_calls>\n", "\n", "\n</tool_calls>"),  # MiniMax-M1's
        strict_with=("<tool_calls>[", _json_list("<tool_calls>", "<tool_calls>[", ", ", "]</tool_calls>")),  # Apriel's
    ),
    Format(
        "hermes",
        "Hermes, Qwen2.5, Qwen3, Granite 4",
        '`<tool_call>{"name": ..., "arguments": ...}</tool_call>`',
        Marks(template=("<tool_call>", r"\barguments\b"), never=("<function=", "<arg_key>", "<invoke")),
        calls="minisgl_backend.parsers.tool_calls:HermesParser",
        strict=StrictCall("<tool_call>", '<tool_call>\n{"name": {json}, "arguments": ', "}\n</tool_call>"),
    ),
    Format(
        "llama3_json",
        "Llama 3.1 to 3.3",
        '`{"name": ..., "parameters": ...}` as the whole answer',
        Marks(template=('"parameters"',), tokens=("<|python_tag|>",)),
        calls="minisgl_backend.parsers.tool_calls:LlamaParser",
        strict=StrictCall('{"name": ', '{"name": {json}, "parameters": ', "}"),
        special=True,
    ),
    Format(
        "pythonic",
        "Llama 4",
        '`[NAME(key="text"), ...]` as the whole answer',
        Marks(tokens=("<|python_start|>", "<|python_end|>")),
        calls="minisgl_backend.parsers.pythonic:PythonicParser",
        strict=StrictCall("[", "{name}(", ")", "python", around=("[", ", ", "]"), is_whole_answer=True),
        special=True,
    ),
    Format(
        "seed_oss",
        "Seed-OSS",
        "thoughts `<seed:think>...</seed:think>`",
        Marks(template=("<seed:think>",)),
        tags=("<seed:think>", "</seed:think>"),
    ),
    Format(
        "qwen3",
        "Qwen3, GLM, Kimi-K2-Thinking, MiniMax-M2, Granite 3.2 and later, DeepSeek V3.1, R1",
        "thoughts `<think>...</think>`",
        Marks(anywhere=("</think>",)),
        tags=_THINK,
    ),
    Format(
        "deepseek_r1",
        "models whose every answer begins with thoughts",
        "the same, `<think>` left out",
        None,
        tags=_THINK,
        always_thinks=True,
    ),
)
CALLS = {row.name: row for row in FORMATS if row.has_calls}
REASONING = {row.name: row for row in FORMATS if row.has_reasoning}
TOOL_PARSERS = ("auto", "none", *CALLS)  # what options may name
REASONING_PARSERS = ("auto", "none", *REASONING)


def find_calls(template: str, tokens: Collection[str]) -> Format | None:
    """The format of calls that template and added tokens identify beyond doubt."""
    return next((row for row in CALLS.values() if row.marks is not None and row.marks.fit(template, tokens)), None)


def find_reasoning(template: str, tokens: Collection[str]) -> Format | None:
    """The format of reasoning whose tags are in the template or the vocabulary."""
    for row in REASONING.values():
        shows = row.both or (row.tags is not None and (row.tags[1] in template or row.tags[1] in tokens))
        if shows and row.marks is not None and row.marks.fit(template, tokens):
            return row
    return None
