"""Codex CLI, LiteLLM and agents of three frameworks, unmodified, each in an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.openai_stack import Endpoint, running_endpoint, scripted_server
from tests.e2e.test_openai_scripted import thinking_model
from tests.e2e.wire import PATIENCE_SECONDS
from tests.environments import npm_folder, output_of, python_with

# Each installs what it tries first.
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

LONGEST = 131_072  # tokens
SAID = "The file says hello."

LITELLM = """
import sys
import litellm

options = {"model": "openai/demo", "api_base": sys.argv[1], "api_key": "none", "num_retries": 0}
messages = [{"role": "user", "content": "hello"}]
assert litellm.completion(messages=messages, **options).choices[0].message.content
try:
    litellm.completion(messages=[{"role": "user", "content": "w " * 90000}], **options)
except litellm.ContextWindowExceededError as error:
    assert "maximum context length" in str(error)
else:
    raise SystemExit("no error")
try:
    litellm.completion(messages=messages, temperature=101, **options)
except litellm.ContextWindowExceededError:
    raise SystemExit("every error is an overflow")
except litellm.BadRequestError:
    pass
print("all is well")
"""

# Microsoft's client keeps no conversation: it continues by `previous_response_id`.
AGENT_FRAMEWORK = """
import asyncio
import sys

from agent_framework.openai import OpenAIChatClient

asked = []


def add(a: int, b: int) -> int:
    "Adds two numbers."
    asked.append((a, b))
    return a + b


async def run():
    client = OpenAIChatClient(model="demo", base_url=sys.argv[1], api_key="none")
    answer = await client.as_agent(tools=[add]).run("What is 17 + 25?")
    assert asked == [(17, 25)], asked
    assert "42" in answer.text, answer.text


asyncio.run(run())
print("all is well")
"""

LANGCHAIN = """
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

asked = []


def add(a: int, b: int) -> int:
    "Adds two numbers."
    asked.append((a, b))
    return a + b


model = ChatOpenAI(model="demo", base_url=sys.argv[1], api_key="none", temperature=0)
answer = create_agent(model, tools=[add]).invoke({"messages": [{"role": "user", "content": "What is 17 + 25?"}]})
assert asked == [(17, 25)], asked
assert "42" in answer["messages"][-1].content, answer
print("all is well")
"""

OPENAI_AGENTS = """
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
asked = []


@function_tool
def add(a: int, b: int) -> int:
    "Adds two numbers."
    asked.append((a, b))
    return a + b


client = AsyncOpenAI(base_url=sys.argv[1], api_key="none")
for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    agent = Agent(
        name="adder", instructions="Use the tool.", tools=[add], model=model(model="demo", openai_client=client)
    )
    answer = Runner.run_sync(agent, "What is 17 + 25?").final_output
    assert "42" in answer, answer
assert asked == [(17, 25)] * 2, asked
print("all is well")
"""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("tools")
    model = Path(thinking_model(folder))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # Codex says some 10,000 words before the first question.
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONGEST}), encoding="utf-8")
    options = {"model": str(model), "null_runner_rate": "2000"}
    with (
        scripted_server(folder, [f"{SAID}<|im_end|>"], options) as server,
        running_endpoint(server, served_model_names=("demo",), tool_call_parser="hermes") as found,
    ):
        yield found


def check(python: Path, program: str, url: str) -> None:
    assert output_of([python, "-c", program, url], PATIENCE_SECONDS).endswith("all is well\n")


def test_litellm_knows_a_prompt_that_is_too_long(scripted: Endpoint) -> None:
    check(python_with("litellm"), LITELLM, f"{scripted.url}/v1")


@pytest.mark.parametrize(
    ("packages", "program"),
    [(("langchain", "langchain-openai"), LANGCHAIN), (("openai-agents",), OPENAI_AGENTS)],
    ids=["langchain", "openai-agents"],
)
def test_an_agent_has_the_demo_model_call_its_tool(endpoint: Endpoint, packages: Sequence[str], program: str) -> None:
    check(python_with(*packages), program, f"{endpoint.url}/v1")


def test_agent_framework_continues_by_the_id_of_a_response(endpoint: Endpoint) -> None:
    check(python_with("agent-framework-openai"), AGENT_FRAMEWORK, f"{endpoint.url}/v1")


def test_codex_has_its_answer(scripted: Endpoint, tmp_path: Path) -> None:
    """With all of its tools: functions, namespaces and hosted ones."""
    codex = npm_folder("codex", "@openai/codex") / "node_modules" / ".bin" / "codex"
    config = {"name": "minisgl", "base_url": f"{scripted.url}/v1", "wire_api": "responses"}
    lines = ['model = "demo"', 'model_provider = "minisgl"', "[model_providers.minisgl]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in config.items()]
    (tmp_path / "config.toml").write_text("\n".join(lines), encoding="utf-8")
    command = [codex, "exec", "--skip-git-repo-check", "What does the file say?"]
    said = output_of(command, PATIENCE_SECONDS, CODEX_HOME=str(tmp_path))
    assert SAID in said
