"""LlamaIndex's class of OpenAI's API against the endpoint whose base URL is the argument."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

QUESTION, ANSWER = "What is 17 + 25?", "17 + 25 = 42."
MESSAGES = [ChatMessage(role="user", content=QUESTION)]
OPTIONS: dict[str, Any] = {
    "model": "demo",
    "api_base": sys.argv[1],
    "api_key": "none",
    "temperature": 0,
    "max_retries": 0,
    "max_tokens": 64,
}


def weather(sunny: bool) -> str:
    """Tells the weather."""
    return "sunny" if sunny else "rainy"


def check_answers(model: OpenAILike) -> None:
    assert model.complete(QUESTION).text == model.chat(MESSAGES).message.content == ANSWER
    assert "".join(part.delta for part in model.stream_complete(QUESTION)) == ANSWER
    assert "".join(part.delta or "" for part in model.stream_chat(MESSAGES)) == ANSWER

    async def ask() -> tuple[str, str]:
        pieces = [part.delta or "" async for part in await model.astream_chat(MESSAGES)]
        return (await model.achat(MESSAGES)).message.content or "", "".join(pieces)

    assert asyncio.run(ask()) == (ANSWER, ANSWER)


def check_tools(model: OpenAILike) -> None:
    asked: dict[str, Any] = {"user_msg": QUESTION, "tool_required": True}
    tools = [FunctionTool.from_defaults(weather)]
    *_, last = model.stream_chat_with_tools(tools, **asked)
    for answer in (model.chat_with_tools(tools, **asked), last):
        (call,) = model.get_tool_calls_from_response(answer)
        assert (call.tool_name, type(call.tool_kwargs["sunny"])) == ("weather", bool)


def check_completions() -> None:
    model = OpenAILike(**OPTIONS, is_chat_model=False)
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert model.complete(prompt).text == ANSWER
    assert "".join(part.delta for part in model.stream_complete(prompt)) == ANSWER


chat = OpenAILike(**OPTIONS, is_chat_model=True, is_function_calling_model=True, context_window=2048)
check_answers(chat)
check_tools(chat)
check_completions()
print("all is well")
