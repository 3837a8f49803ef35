"""LangChain's classes of OpenAI's API against the endpoint whose base URL is the argument."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

QUESTION, ANSWER = "What is 17 + 25?", "17 + 25 = 42."
OPTIONS: dict[str, Any] = {
    "model": "demo",
    "base_url": sys.argv[1],
    "api_key": "none",
    "temperature": 0,
    "max_retries": 0,
}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


def check_answers(model: ChatOpenAI) -> None:
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert (answer.text, answer.usage_metadata["output_tokens"]) == (ANSWER, 14), answer
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER
    assert [one.text for one in model.batch([QUESTION, QUESTION])] == [ANSWER, ANSWER]


async def check_async_answers(*models: ChatOpenAI) -> None:
    """In one event loop: they share their connections."""
    for model in models:
        assert (await model.ainvoke(QUESTION)).text == ANSWER
        assert "".join([chunk.text async for chunk in model.astream(QUESTION)]) == ANSWER


def check_structured_output(model: ChatOpenAI) -> None:
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Weather, method=method).invoke("How is the weather?")
        assert isinstance(found, Weather), found


def check_tools(model: ChatOpenAI) -> None:
    caller = model.bind_tools([weather], tool_choice="any", parallel_tool_calls=False)
    called: AIMessage = caller.invoke(QUESTION)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]["city"] in ("Rome", "Oslo")) == ("weather", True)
    first, *others = caller.stream(QUESTION)
    together = sum(others, start=first)
    assert [call["name"] for call in together.tool_calls] == ["weather"]
    conversation = [HumanMessage(QUESTION), called, weather.invoke(call), HumanMessage(QUESTION)]
    answer = model.bind_tools([weather], tool_choice="none").invoke(conversation)
    assert answer.text, answer
    assert not answer.tool_calls, answer


def check_completions() -> None:
    model = OpenAI(**OPTIONS, max_tokens=16)
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert model.invoke(prompt) == "".join(model.stream(prompt)) == ANSWER


def check_log_probabilities() -> None:
    answer = ChatOpenAI(**OPTIONS, logprobs=True, top_logprobs=2).invoke(QUESTION)
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(ANSWER)
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}


def check_embeddings() -> None:
    """As texts: else it sends tokens of OpenAI's own vocabulary."""
    options = {name: OPTIONS[name] for name in ("model", "base_url", "api_key", "max_retries")}
    model = OpenAIEmbeddings(**options, check_embedding_ctx_length=False)
    one, other = model.embed_documents([QUESTION, "hello"])
    again = model.embed_query(QUESTION)
    assert all(abs(a - b) < 1e-4 for a, b in zip(one, again, strict=True))
    assert one != other


def check_errors() -> None:
    with pytest.raises(openai.BadRequestError, match="temperature is 101"):
        ChatOpenAI(**{**OPTIONS, "temperature": 101}).invoke(QUESTION)
    with pytest.raises(ContextOverflowError):
        ChatOpenAI(**OPTIONS).invoke("word " * 9000)


chats = [ChatOpenAI(**OPTIONS, use_responses_api=responses) for responses in (False, True)]
for chat in chats:
    check_answers(chat)
    check_structured_output(chat)
    check_tools(chat)
asyncio.run(check_async_answers(*chats))
check_completions()
check_log_probabilities()
check_embeddings()
check_errors()
print("all is well")
