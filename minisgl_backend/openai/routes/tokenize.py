"""/tokenize, /detokenize (special tokens included) and /tokenizer_info, as in vLLM."""

from __future__ import annotations

from fastapi import FastAPI, Response

from minisgl_backend.openai.encoding import json_response
from minisgl_backend.openai.endpoint import Endpoint
from minisgl_backend.openai.requests.tokenize import DetokenizeRequest, TokenizeRequest
from minisgl_backend.openai.triton import Prompt


def add_routes(app: FastAPI, endpoint: Endpoint) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        body.check()
        with endpoint.counted():
            return await _tokenized(endpoint, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        with endpoint.counted():
            await endpoint.model.resolve(body.model)
            if not body.tokens:
                return json_response({"prompt": ""})
            names = {"prompt_token_ids": "tokens"}
            found = await endpoint.triton.tokenize(Prompt(token_ids=body.tokens), ["prompt_text"], names)
            return json_response({"prompt": found["prompt_text"][0].decode("utf-8", "replace")})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        info = await endpoint.model.info()
        own = {"model_max_length": info.max_model_len, "chat_template": info.chat_template or None}
        return json_response({**info.tokenizer, **own, "max_images": info.max_images})


async def _tokenized(endpoint: Endpoint, body: TokenizeRequest) -> Response:
    await endpoint.model.resolve(body.model)
    tokens, texts = [], None
    if body.messages is not None or body.prompt:
        prompt = Prompt(text=body.prompt) if body.messages is None else await endpoint.chat_prompt(body, body.messages)
        outputs = ["input_ids", *(["token_texts"] if body.return_token_strs else [])]
        found = await endpoint.triton.tokenize(prompt, outputs, {"text_input": "prompt"}, body.add_special_tokens)
        tokens = found["input_ids"]
        if body.return_token_strs:
            texts = [text.decode("utf-8", "replace") for text in found["token_texts"]]
    length = (await endpoint.model.info()).max_model_len
    return json_response({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": texts})
