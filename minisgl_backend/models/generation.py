"""Sampling defaults of a model, from its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Defaults of sampling options, with the names of SamplingParams; None: not set in the folder."""

    temperature: float | None = None  # 0: greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # the file's max_new_tokens

    @classmethod
    def read(cls, generation: Mapping[str, Any]) -> GenerationDefaults:
        """From the content of generation_config.json. Raises ConfigError naming the value that is not allowed."""
        names = ["repetition_penalty"]
        if generation.get("do_sample") is not False:
            names += ["temperature", "top_k", "top_p", "min_p"]
        given = {name: generation[name] for name in names if generation.get(name) is not None}
        if generation.get("max_new_tokens") is not None:
            given["max_tokens"] = generation["max_new_tokens"]
        try:
            params = SamplingParams(**given)
            params.validate()
        except InvalidRequestError as error:
            raise ConfigError(f"generation_config.json: {error}") from None
        values = {name: getattr(params, name) for name in given}
        if generation.get("do_sample") is False:  # greedy; the file's other values do not apply to requests that sample
            values["temperature"] = 0.0
        return cls(**values)

    def sampling_values(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        return {name: value for name, value in asdict(self).items() if value is not None}
