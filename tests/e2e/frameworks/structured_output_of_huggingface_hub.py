"""huggingface_hub: answers by a schema, in OpenAI's form and that of text-generation-inference. Argument: the URL."""

from __future__ import annotations

import json
import sys
from typing import Any

from huggingface_hub import InferenceClient

CITIES = ["Rome", "Oslo"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}},
    {"type": "json_object", "value": SCHEMA},
    {"type": "json", "value": SCHEMA},
]


def said(client: InferenceClient, form: dict[str, Any], *, stream: bool) -> str:
    messages = [{"role": "user", "content": "How is the weather?"}]
    answer = client.chat_completion(messages, model="demo", response_format=form, max_tokens=200, stream=stream)
    if not stream:
        return answer.choices[0].message.content
    return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)


if __name__ == "__main__":
    client = InferenceClient(base_url=f"{sys.argv[1]}/v1", api_key="none")
    for form in FORMATS:
        for stream in (False, True):
            text = said(client, form, stream=stream)
            found = json.loads(text)
            assert (set(found), found["city"] in CITIES) == ({"city", "days"}, True), (form, text)
            assert found["days"] in range(1, 8), (form, text)
    assert said(client, {"type": "regex", "value": "[ab]{3}"}, stream=False).strip("ab") == ""
    print("all is well")
