"""References to kept items in /v1/responses, as AI SDK sends them for every turn of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.openai.scripted_app import Said, ScriptedApp, scripted_app

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
QUESTION = {"role": "user", "content": [{"type": "input_text", "text": "How warm is it?"}]}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedApp]:
    with pytest.MonkeyPatch.context() as patch:
        said = Said(["I look.\n</think>", "Wait.", CALL])
        values = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
        with scripted_app(tmp_path_factory.mktemp("kept"), patch, lambda prompt: said, **values) as found:
            yield found


def references(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def created(app: ScriptedApp, **values: Any) -> dict[str, Any]:
    status, response = app.ask("POST", "/v1/responses", {"input": [QUESTION], "tools": TOOLS, **values})
    assert status == 200, response
    return dict(response)


def test_thoughts_texts_and_calls_stand_where_they_are_named(app: ScriptedApp) -> None:
    first = created(app)
    thoughts, text, call = first["output"]
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "22 degrees"}
    second = created(app, input=[QUESTION, *references(thoughts, text, call), result])
    assert app.server.prompts[-1].messages is not None
    question, turn, told = app.server.prompts[-1].messages
    assert (turn["role"], turn["reasoning_content"], turn["content"]) == ("assistant", "I look.", "Wait.")
    assert [one["function"]["name"] for one in turn["tool_calls"]] == ["weather"]
    assert (question["role"], told) == ("user", {**told, "role": "tool", "content": "22 degrees"})
    # Without a type, as OpenAI's own types allow; and the conversation that is kept has the items themselves.
    created(app, input=[QUESTION, {"id": second["output"][1]["id"]}, {"type": None, "id": call["id"]}])
    assert app.ask("DELETE", f"/v1/responses/{first['id']}")[0] == 200
    created(app, input=[QUESTION, *references(call), result])
    kept = app.ask("GET", f"/v1/responses/{second['id']}/input_items?order=asc")[1]["data"]
    assert kept[1:4] == [thoughts, text, call]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_kept_is_not_found(app: ScriptedApp, stream: bool) -> None:
    lost = created(app, store=False)["output"][2]
    for reference, named in ((lost, lost["id"]), ({"id": "rs_x"}, "rs_x")):
        body = {"input": [QUESTION, *references(reference)], "stream": stream}
        status, answer = app.ask("POST", "/v1/responses", body)
        assert (status, answer["error"]["param"], answer["error"]["type"]) == (400, "input", "invalid_request_error")
        assert answer["error"]["message"].startswith(f"input[1].id is '{named}': an item that is not found here")
    status, answer = app.ask("POST", "/v1/responses", {"input": [{"type": "item_reference"}]})
    assert (status, answer["error"]["message"]) == (400, "input[0].id is None; allowed: a text")


def test_items_of_an_input_are_found_too(app: ScriptedApp) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    given = [QUESTION, call, {"type": "function_call_output", "call_id": "c", "output": "22 degrees"}]
    first = created(app, input=given)
    kept = app.ask("GET", f"/v1/responses/{first['id']}/input_items?order=asc")[1]["data"]
    assert [{name: value for name, value in item.items() if name != "id"} for item in kept] == given
    second = created(app, input=references(*kept))
    assert app.ask("GET", f"/v1/responses/{second['id']}/input_items?order=asc")[1]["data"] == kept
    assert app.server.prompts[-1].messages is not None
    assert [one["role"] for one in app.server.prompts[-1].messages] == ["user", "assistant", "tool"]


def test_thoughts_that_have_a_summary_alone_are_that(app: ScriptedApp) -> None:
    summary = [{"type": "summary_text", "text": "I look."}]
    for item, told in (({"summary": summary}, "I look."), ({"summary": summary, "content": []}, "I look.")):
        created(
            app, input=[QUESTION, {"type": "reasoning", **item}, {"role": "assistant", "content": "Hot."}, QUESTION]
        )
        assert app.server.prompts[-1].messages is not None
        assert app.server.prompts[-1].messages[1]["reasoning_content"] == told
