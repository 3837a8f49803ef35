"""Claude Code, the AI SDK and smolagents, unmodified: whole tool loops before a model that says what the test wants.

Its chat template is as strict as those of today's models: one system message, at the beginning.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.openai_stack import Endpoint, running_endpoint, scripted_server
from tests.e2e.proxy import running_proxy
from tests.e2e.test_openai_scripted import thinking_model
from tests.e2e.wire import PATIENCE_SECONDS
from tests.environments import npm_folder, output_of, python_with

# Each installs what it tries first.
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

FRAMEWORKS = Path(__file__).parent / "frameworks"
LONGEST = 131_072  # tokens; Claude Code says some 50,000 before the first question
TEMPLATE = """
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}
{%- endif %}
{%- endfor %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{%- if tools %}{{- '<tool_call>{"name": ..., "arguments": ...}</tool_call>\\n' + tools | tojson }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages if message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
WORD = "marmalade"


def call(name: str, **arguments: Any) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class Scripted:
    """An endpoint whose model has a list of answers for each client."""

    endpoint: Endpoint
    scripts: dict[str, list[str]]
    work: Path  # a folder with a file that says WORD
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of the requests that came

    def before(self, client: str, step: Callable[[dict[str, Any]], int]) -> AbstractContextManager[str]:
        """The URL for a client. `step`: which of its answers a request gets."""
        names = list(self.scripts)
        first = sum(len(self.scripts[name]) for name in names[: names.index(client)])

        def edit(body: dict[str, Any]) -> None:
            self.bodies.append(dict(body))
            body["seed"] = first + min(step(body), len(self.scripts[client]) - 1)

        return running_proxy(self.endpoint.url, edit=edit)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = tmp_path_factory.mktemp("agents")
    model, work = Path(thinking_model(folder)), folder / "work"
    for name, key, value in (
        ("config.json", "max_position_embeddings", LONGEST),
        ("tokenizer_config.json", "chat_template", TEMPLATE),
    ):
        config = json.loads((model / name).read_text(encoding="utf-8"))
        (model / name).write_text(json.dumps({**config, key: value}), encoding="utf-8")
    work.mkdir()
    (work / "notes.txt").write_text(f"The word is {WORD}.", encoding="utf-8")
    scripts = {
        "claude": [f"I will look.{call('Read', file_path=str(work / 'notes.txt'))}", f"It says {WORD}."],
        "ai": [
            f"<think>\nI should add.\n</think>\n\nI add.{call('add', a=17, b=25)}",
            "<think>\nThe tool says 42.\n</think>\n\nIt is 42.",
        ],
        "calls": [
            call("write", text="Observation: it rains").strip(),
            call("add", a=17, b=25).strip(),
            call("final_answer", answer="42").strip(),
        ],
        "code": ["Thought: I add.\n<code>\nfinal_answer(add(17, 25))\n</code>\nObservation: 99"],
    }
    texts = [f"{text}<|im_end|>" for texts in scripts.values() for text in texts]
    with (
        scripted_server(folder, texts, {"model": str(model), "null_runner_rate": "2000"}) as server,
        running_endpoint(server, served_model_names=("demo",), state_folder=str(folder)) as endpoint,
    ):
        yield Scripted(endpoint, scripts, work)


def turns(body: dict[str, Any]) -> int:
    """How often the model has answered in a chat."""
    return sum(message["role"] == "assistant" for message in body["messages"])


def test_claude_code_reads_a_file_and_its_next_session_is_cached(scripted: Scripted, tmp_path: Path) -> None:
    claude = npm_folder("claude-code", "@anthropic-ai/claude-code") / "node_modules" / ".bin" / "claude"
    with scripted.before("claude", turns) as url:
        environment = {
            "HOME": str(tmp_path),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "demo",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        command = ["env", "-C", scripted.work, claude, "-p", "What does notes.txt say?", "--output-format", "json"]
        sessions = [json.loads(output_of(command, PATIENCE_SECONDS, **environment)) for _ in range(2)]
    for session in sessions:
        assert (session["result"], session["num_turns"]) == (f"It says {WORD}.", 2), session
    last = scripted.bodies[-1]["messages"]
    results = [part for part in last[-1]["content"] if part["type"] == "tool_result"]
    assert WORD in json.dumps(results), last[-1]
    assert any(message["role"] == "system" for message in last)  # not at the beginning, for which it has a field
    usage = sessions[1]["usage"]
    assert usage["cache_read_input_tokens"] >= 0.95 * (usage["cache_read_input_tokens"] + usage["input_tokens"]), usage


def test_the_ai_sdk_names_what_was_answered_by_its_id(scripted: Scripted) -> None:
    folder = npm_folder("ai-sdk", "ai", "@ai-sdk/openai", "zod")
    program = shutil.copy(FRAMEWORKS / "with_ai_sdk.mjs", folder)  # which finds its packages there
    with scripted.before("ai", lambda body: body["input"][-1].get("type") == "function_call_output") as url:
        assert output_of(["node", program, url], PATIENCE_SECONDS) == "all is well\n"
    assert "item_reference" in [item.get("type") for item in scripted.bodies[-1]["input"]]


def test_smolagents_stops_inside_a_call_and_behind_one(scripted: Scripted) -> None:
    python = python_with("smolagents", "openai")
    with scripted.before("calls", turns) as calls, scripted.before("code", turns) as code:
        command = [python, FRAMEWORKS / "agents_of_smolagents.py", f"{calls}/v1", f"{code}/v1"]
        assert output_of(command, PATIENCE_SECONDS).endswith("all is well\n")
