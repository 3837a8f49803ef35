"""Other people's clients with images, unmodified, before a tiny model that sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT
from tests.e2e.image_stack import GREEDY, PICTURES, URLS, Stack, messages_of, part_of, running_stack
from tests.e2e.openai_stack import running_endpoint, scripted_server
from tests.e2e.proxy import running_proxy
from tests.e2e.wire import PATIENCE_SECONDS
from tests.environments import environment_behind, npm_folder, output_of, python_with
from tests.seeing_checkpoint import seeing_checkpoint

# Each installs what it tries first.
pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(1800)]

# Each says what the model answers to the picture of the file and "which?".
LANGCHAIN = """
import base64
import sys

from langchain_openai import ChatOpenAI

url, file = sys.argv[1:]
data = base64.b64encode(open(file, "rb").read()).decode()
options = {"base_url": url, "api_key": "none", "temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
model = ChatOpenAI(model="demo", **options)
text = {"type": "text", "text": "which?"}
for image in (
    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    {"type": "image", "base64": data, "mime_type": "image/png"},
):
    print(repr(model.invoke([{"role": "user", "content": [image, text]}]).text))
"""
LITELLM = """
import base64
import sys

import litellm

url, file = sys.argv[1:]
data = base64.b64encode(open(file, "rb").read()).decode()
image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", "format": "image/png"}}
messages = [{"role": "user", "content": [image, {"type": "text", "text": "which?"}]}]
options = {"api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 6, "extra_body": {"ignore_eos": True}}
print(repr(litellm.completion("openai/demo", messages, **options).choices[0].message.content))
"""
AI_SDK = """
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText } from "ai";

const [url, file] = process.argv.slice(2);
const image = readFileSync(file);
const content = [{ type: "image", image, mediaType: "image/png" }, { type: "text", text: "which?" }];
const openai = createOpenAI({ baseURL: url, apiKey: "none" });
const others = createOpenAICompatible({ name: "x", baseURL: url });
const asked = { messages: [{ role: "user", content }], temperature: 0, maxOutputTokens: 6 };
for (const model of [openai("demo"), openai.chat("demo"), others("demo")]) {
  const answer = await generateText({ model, ...asked });
  console.log(answer.text);
}
"""
# Claude Code reads a file by a call, and gets a picture as the call's result.
TEMPLATE = """
{%- macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{% endmacro %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + shown(message.content) }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
LONGEST = 1 << 20  # tokens: of this tokenizer, one is not much more than a letter
NVIDIA = ROOT / "tests" / "third_party" / "tensorrtllm_backend" / "tools" / "multimodal" / "client.py"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory, served_model_names=("demo",)) as found:
        yield found


@pytest.fixture(scope="module")
def expected(stack: Stack) -> str:
    """The answer to the first file and "which?"."""
    answer = stack.post("/v1/chat/completions", {"messages": messages_of(part_of(URLS[0]), "which?"), **GREEDY})
    return str(answer["choices"][0]["message"]["content"])


def run(python: Path | str, program: str, stack: Stack, file: Path, folder: Path) -> list[str]:
    (folder / "program.py").write_text(program, encoding="utf-8")
    command = [python, folder / "program.py", f"{stack.endpoint.url}/v1", file]
    return output_of(command, PATIENCE_SECONDS, LANGSMITH_TRACING="false").splitlines()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two pictures, of two sizes."""
    folder = tmp_path_factory.mktemp("pictures")
    found = [folder / "large.png", folder / "small.png"]
    for file, one in zip(found, [PICTURES[0], PICTURES[1].crop((0, 0, 28, 28))], strict=True):
        one.save(file)
    return found


@pytest.fixture(scope="module")
def nvidias_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_behind(tmp_path_factory.mktemp("nvidia"), "pandas", "tabulate")


@pytest.mark.parametrize("kind", ["qwen2_vl", "mllama"])
@pytest.mark.parametrize("model", [[], ["--use_bls"]], ids=["ensemble", "bls"])
def test_nvidias_multimodal_client(
    stack: Stack, files: list[Path], nvidias_python: Path, kind: str, model: list[str]
) -> None:
    """It sends pixels, and a question without places for them."""
    command = [nvidias_python, NVIDIA, "-u", f"127.0.0.1:{stack.server.grpc}", "--model_type", kind, "--streaming"]
    options = ["--image", files[0], "--text", "which?", "--prompt_table_extra_id", 5, "--request-output-len", 6]
    said = output_of([*command, *options, *model], PATIENCE_SECONDS)
    assert "[beam 0 ]: " in said


def test_langchain(stack: Stack, files: list[Path], expected: str, frameworks_python: str, tmp_path: Path) -> None:
    """Both of its formats of an image."""
    assert run(frameworks_python, LANGCHAIN, stack, files[0], tmp_path) == [repr(expected)] * 2


def test_litellm(stack: Stack, files: list[Path], expected: str, tmp_path: Path) -> None:
    assert run(python_with("litellm"), LITELLM, stack, files[0], tmp_path)[-1] == repr(expected)


def test_the_ai_sdk(stack: Stack, files: list[Path], expected: str) -> None:
    """Over responses, chats and its provider for servers that are not OpenAI's."""
    folder = npm_folder("ai-sdk-images", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible")
    (folder / "images.mjs").write_text(AI_SDK, encoding="utf-8")
    said = output_of(["node", folder / "images.mjs", f"{stack.endpoint.url}/v1", files[0]], PATIENCE_SECONDS)
    answers = [line for line in said.splitlines() if "Warning" not in line]
    assert len(answers) >= 3, said
    assert said.count(expected.splitlines()[0]) >= 3, (said, expected)


def test_aiperf(stack: Stack, tmp_path: Path) -> None:
    """Photos of its own, scaled."""
    python = environment_behind(tmp_path / "aiperf", "aiperf==0.13.0")
    command = [python.parent / "aiperf", "profile", "-m", "demo", "--url", stack.endpoint.url, "--tokenizer"]
    command += [stack.model.path, "--artifact-dir", tmp_path / "out"]
    command += "--endpoint-type chat --streaming --use-server-token-count --ui none --concurrency 2".split()
    command += "--request-count 6 --isl 10 --osl 12 --image-width-mean 64 --image-height-mean 48".split()
    command += ["--extra-inputs", "ignore_eos:true"]
    # With this variable aiperf takes a folder for the name of a hub's model.
    output_of(["env", "-u", "HF_HUB_OFFLINE", *command], PATIENCE_SECONDS)
    figures = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    # Where all that a random model says are parts of letters, there is no text to measure.
    told = [str(one) for one in figures.get("error_summary") or ()]
    assert not [one for one in told if "content" not in one], told
    assert figures["request_count"]["avg"] >= 1


def test_claude_code_looks_at_a_picture(files: list[Path], tmp_path: Path) -> None:
    claude = npm_folder("claude-code", "@anthropic-ai/claude-code") / "node_modules" / ".bin" / "claude"
    (tmp_path / "model").mkdir()
    model = seeing_checkpoint(tmp_path / "model")
    model.plain.chat_template = TEMPLATE
    model.plain.save_pretrained(model.path)
    config = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["max_position_embeddings"] = LONGEST
    config["eos_token_id"] = config["text_config"]["eos_token_id"] = model.plain.convert_tokens_to_ids("<|im_end|>")
    (model.path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    call = json.dumps({"name": "Read", "arguments": {"file_path": str(files[0])}})
    scripts = [f"I will look.\n<tool_call>\n{call}\n</tool_call><|im_end|>", "It is noise.<|im_end|>"]
    bodies = []

    def edit(body: dict[str, Any]) -> None:
        bodies.append(dict(body))
        body["seed"] = min(sum(message["role"] == "assistant" for message in body["messages"]), 1)

    with (
        scripted_server(tmp_path, scripts, {"model": str(model.path), "null_runner_rate": "2000"}) as server,
        running_endpoint(server, served_model_names=("demo",), tool_call_parser="hermes") as endpoint,
        running_proxy(endpoint.url, edit=edit) as url,
    ):
        environment = {
            "HOME": str(tmp_path),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "demo",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        question = f"What does {files[0].name} show?"
        command = ["env", "-C", files[0].parent, claude, "-p", question, "--output-format", "json"]
        session = json.loads(output_of(command, PATIENCE_SECONDS, **environment))
    assert (session["result"], session["num_turns"]) == ("It is noise.", 2), session
    assert '"type": "image", "source"' in json.dumps(bodies[-1]["messages"][-1]["content"]), bodies[-1]["messages"][-1]
