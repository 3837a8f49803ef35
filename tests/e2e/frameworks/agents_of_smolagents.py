"""smolagents, whose requests stop at words of its own prompts, also where tools are offered. Argument: the URL.

The model behind it writes a call whose argument holds such a word, then good calls with more behind them.
"""

from __future__ import annotations

import sys

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

written: list[str] = []
added: list[tuple[int, int]] = []


@tool
def write(text: str) -> str:
    """Writes a text.

    Args:
        text: The text.
    """
    written.append(text)
    return "written"


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    added.append((a, b))
    return a + b


if __name__ == "__main__":
    calls, code = (OpenAIModel(model_id="demo", api_base=url, api_key="none") for url in sys.argv[1:3])
    answer = ToolCallingAgent(tools=[write, add], model=calls, max_steps=4).run("What is 17 + 25?")
    assert (str(answer), written, added) == ("42", [], [(17, 25)]), (answer, written, added)
    answer = CodeAgent(tools=[add], model=code, max_steps=3).run("What is 17 + 25?")
    assert (str(answer), added) == ("42", [(17, 25)] * 2), (answer, added)
    print("all is well")
