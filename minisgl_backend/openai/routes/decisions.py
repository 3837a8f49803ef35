"""/v1/decisions."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from starlette.responses import Response

from minisgl_backend.openai.context import context_of
from minisgl_backend.openai.decisions import LetteredQuestion, answers_of, to_fields, usage_of
from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.requests.decisions import DecisionRequest

_NAMES = {"messages": "input", "choices": "questions", "template": "chat_template_kwargs", "suffixes": "questions"}


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/decisions")
    async def decisions(request: Request, body: DecisionRequest) -> Response:
        body.check()
        name = await endpoint.admit(body.model)
        context = context_of(request, body)
        questions = [LetteredQuestion(question) for question in body.questions]
        fields = {**to_fields(body, questions), **await endpoint.model.adapter_fields(body)}
        found = await endpoint.vectors(request, fields, context, _NAMES)
        answer = {
            "id": f"decision-{context.request_id}",
            "object": "decision",
            "created_at": int(time.time()),
            "model": name,
            "answers": answers_of(questions, found.rows),
            "usage": usage_of(found),
        }
        return json_response(answer, headers={"x-request-id": context.request_id})
