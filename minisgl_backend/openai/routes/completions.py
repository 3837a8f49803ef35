"""/v1/completions: a generation for each prompt."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response

from minisgl_backend.openai.answers import Answer, Header
from minisgl_backend.openai.completions import CompletionAnswer, Echo
from minisgl_backend.openai.context import context_of
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.requests.completions import CompletionRequest
from minisgl_backend.openai.triton import Generation, Prompt, TritonServer


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        body.check()
        context = context_of(request, body)
        prompts = [Prompt(text=one) if isinstance(one, str) else Prompt(token_ids=one) for one in body.prompts]

        async def start() -> tuple[Answer, Sequence[Generation]]:
            triton = endpoint.triton
            name = await endpoint.model.resolve(body.model)
            header = Header(f"cmpl-{context.request_id}", int(time.time()), name)
            echoes = [await _echo(triton, prompt, body) for prompt in prompts] if body.echo else None
            sampling, names = {**body.sampling(), **await endpoint.model.options(body)}, body.names()
            figures = body.wants_figures
            generations = [triton.start(prompt, sampling, context, names, figures=figures) for prompt in prompts]
            return CompletionAnswer(body, generations, header, echoes), generations

        return await endpoint.respond(request, start, CompletionAnswer, stream=bool(body.stream), context=context)


async def _echo(triton: TritonServer, prompt: Prompt, body: CompletionRequest) -> Echo:
    if prompt.text is not None and body.logprobs is None:
        return Echo(prompt.text, "")
    outputs = ["prompt_text", "token_texts"]
    found = await triton.tokenize(prompt, outputs, body.names(), body.add_special_tokens)
    text = prompt.text if prompt.text is not None else found["prompt_text"][0].decode("utf-8", "replace")
    return Echo(text, found["token_texts"][0].decode("utf-8", "replace"))
