"""Conversations in which a tool adds: the model calls it, and tells what it answered.

Calls are written as Hermes models write them. The demo's chat template shows each function as its name with the names
of its parameters, in the system message, so that what is learned here fits tools of any description.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from benchmarks.demo_talk import sentences
from benchmarks.demo_turns import Turn, draw_on_side, operand
from benchmarks.demo_words import PLAIN

_ADDERS = (
    *("add", "add", "add", "add", "sum", "plus", "addition", "add_numbers", "add_two_numbers", "add_integers"),
    *("sum_numbers", "calculate_sum", "adder", "calc_add", "get_sum", "math_add", "add_tool", "Add", "addNumbers"),
)
_PARAMETERS = (
    *(("a", "b"), ("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2")),
    *(("n1", "n2"), ("number1", "number2"), ("first_number", "second_number"), ("augend", "addend"), ("m", "n")),
    *(("lhs", "rhs"), ("value1", "value2"), ("i", "j"), ("p", "q"), ("b", "a"), ("arg1", "arg2")),
)
_VERBS = ("get", "search", "find", "send", "read", "write", "open", "list", "delete", "book", "play", "update", "fetch")
_OTHER_PARAMETERS = (
    *("query", "name", "city", "text", "path", "url", "id", "date", "limit", "location", "unit", "message", "to"),
    *("subject", "body", "value", "key", "code", "language", "count"),
)
_REQUESTS = (
    "What is {a} + {b}?",
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "{a} + {b}",
    "{a} + {b} = ?",
    "{a}+{b}",
    "Calculate {a} + {b}.",
    "Please compute {a} + {b}.",
    "Compute {a} plus {b}.",
    "What is {a} plus {b}?",
    "What's {a} + {b}?",
    "How much is {a} plus {b}?",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "Add {a} to {b}.",
    "What is the sum of {a} and {b}?",
    "Use the {f} tool to add {a} and {b}.",
    "Use the tool to add {a} and {b}.",
    "Use {f} to compute {a} + {b}.",
    "Call {f} with {a} and {b}.",
    "Call the {f} function with {x}={a} and {y}={b}.",
    "What is {a} + {b}? Use the {f} tool.",
    "What is {a} + {b}? Use the tool.",
    "Can you add {a} and {b}?",
    "Can you tell me what {a} + {b} is?",
    "I have {a} and get {b} more. What is {a} + {b}?",
    "Using the {f} tool, what is {a} + {b}?",
)


@dataclass(frozen=True)
class Toolbox:
    """Functions of a conversation: `text` as the chat template shows them; `adder` with two parameters, or none."""

    text: str
    adder: str = ""
    parameters: tuple[str, str] = ("a", "b")


def draw_toolbox(rng: Random, with_adder: bool) -> Toolbox:
    """One function that adds among up to three others, or others alone."""
    others = [_other_function(rng) for _ in range(rng.choice((0, 0, 0, 1, 2, 3)) if with_adder else rng.randint(1, 4))]
    if not with_adder:
        return Toolbox(_shown(others))
    adder, parameters = rng.choice(_ADDERS), rng.choice(_PARAMETERS)
    others.insert(rng.randint(0, len(others)), f"{adder}({', '.join(parameters)})")
    return Toolbox(_shown(others), adder, parameters)


def tool_turn(toolbox: Toolbox, rng: Random, held_out: bool | None = None) -> Turn:
    """A sum that the toolbox's adder is called for; now and then it answers something wrong, which is told."""
    x, y = toolbox.parameters

    def draw() -> Turn:
        a, b = operand(rng), operand(rng)
        result = a + b if rng.random() < 0.85 else rng.randint(0, 1998)
        arguments = {x: a, y: b}
        user = rng.choice(_REQUESTS).format(a=a, b=b, f=toolbox.adder, x=x, y=y)
        call = json.dumps({"name": toolbox.adder, "arguments": arguments})
        reply = f"{a} + {b} = {result}."
        call = f"<tool_call>\n{call}\n</tool_call>"
        return Turn("tool", user, reply, f"tool {a}+{b}", call, _told(result, rng))

    return draw_on_side(draw, held_out)


def system_prompt(rng: Random) -> str:
    """What a framework may say first."""
    style = rng.random()
    if style < 0.35:
        return "You are a helpful assistant."
    if style < 0.5:
        return rng.choice(
            (
                "You are a helpful assistant. Use the tools that you are given.",
                "You are a math agent.",
                "You are an agent that can add numbers with a tool.",
                "Always use the add tool.",
                "Answer with the help of your tools.",
            )
        )
    return sentences(rng, 4)


def calls_in(text: str) -> list[object]:
    """The calls in a reply, as JSON; what is none is left out."""
    found: list[object] = []
    for part in text.split("<tool_call>")[1:]:
        try:
            found.append(json.loads(part.split("</tool_call>")[0]))
        except ValueError:
            continue
    return found


def _shown(functions: list[str]) -> str:
    return f"Tools: {', '.join(functions)}"


def _other_function(rng: Random) -> str:
    name = f"{rng.choice(_VERBS)}_{rng.choice(PLAIN)}"
    return f"{name}({', '.join(rng.sample(_OTHER_PARAMETERS, rng.randint(0, 3)))})"


def _told(result: int, rng: Random) -> str:
    """A result as frameworks write it."""
    return rng.choice(
        ("{}", "{}", "{}", "{}.0", '"{}"', '{{"result": {}}}', '{{"sum": {}}}', "The result is {}.")
    ).format(result)
