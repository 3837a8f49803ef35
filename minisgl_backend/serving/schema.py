"""The entries to the three models, and every config.pbtxt, which is generated from them and the tables of tensors.

`python -m minisgl_backend.serving.schema --write` writes the config.pbtxt files of model_repository/ and keeps
parameters that a user has set there; `--check` says whether the files are up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from minisgl_backend.installation import model_repository
from minisgl_backend.serving.tensors import (
    CHUNK,
    COMMON_INPUTS,
    DETAIL_OUTPUTS,
    EMBEDDING_INPUTS,
    ENDPOINT_INPUTS,
    ENGINE_INPUTS,
    IMAGE_INPUTS,
    INPUTS,
    LLMAPI_INPUTS,
    LLMAPI_OUTPUTS,
    PROMPT_OUTPUTS,
    SEQUENCE_LENGTH,
    TENSORRT_LLM_INPUTS,
    TENSORS,
    TEXT_OUTPUTS,
    TOKEN_OUTPUTS,
    VECTOR_OUTPUTS,
    Tensor,
)


@dataclass(frozen=True)
class Ensemble:
    """One entry to the three models: a client's request passes through tokenizer, engine and detokenizer once."""

    name: str
    inputs: tuple[Tensor, ...]
    text: tuple[Tensor, ...] = TEXT_OUTPUTS  # outputs of the detokenizer
    details: tuple[Tensor, ...] = DETAIL_OUTPUTS  # outputs of the engine
    max_batch_size: int = 1
    renamed: Mapping[str, str] = field(default_factory=dict)  # input of the tokenizer -> input of the ensemble

    @property
    def tokenizer_map(self) -> dict[str, str]:
        """All inputs of the tokenizer -> inputs of the ensemble."""
        own = [tensor.name for tensor in self.inputs if tensor.name in TENSORS]
        moved = {*self.renamed.values()} - {"num_return_sequences"}
        return {**{name: name for name in own if name not in moved}, **self.renamed}


_APART = {"num_responses": "num_return_sequences"}  # with TensorRT-LLM each sequence is a response of its own
_OF_TEXT = {
    "text_input",
    "prompt_token_ids",
    "stream",
    "messages",
    "apply_chat_template",
    "chat_template_kwargs",
    "add_special_tokens",
}
_OF_TEXT |= {"image", "embedding_request", "skip_special_tokens", "top_k", "top_p", "length_penalty", "max_tokens"}
_OF_TEXT |= {"decoder_text_input", "embedding_bias_words", "embedding_bias_weights"}

# Those of DETAIL_OUTPUTS that the LLM API's model has.
_LLMAPI_DETAILS = (
    *("finish_reason", "cumulative_logprob", "kv_cache_alloc_new_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens", "stop_reason"),
)
ENSEMBLES = (
    Ensemble("ensemble", INPUTS + IMAGE_INPUTS + ENDPOINT_INPUTS),
    # TensorRT-LLM's BLS model: like its ensemble.
    Ensemble("tensorrt_llm_bls", INPUTS + IMAGE_INPUTS, renamed=_APART),
    # TensorRT-LLM's engine: token ids in, token ids out.
    Ensemble(
        "tensorrt_llm",
        (
            Tensor("input_ids", "INT32", (-1,)),
            *TENSORRT_LLM_INPUTS,
            Tensor("stop", "BOOL"),
            *(tensor for tensor in INPUTS if tensor.name not in _OF_TEXT),
        ),
        text=TOKEN_OUTPUTS,
        details=DETAIL_OUTPUTS + SEQUENCE_LENGTH,
        renamed={"trtllm_input_ids": "input_ids", "stop_request": "stop", **_APART},
    ),
    # TensorRT-LLM's model of the LLM API, whose tensors have no batch dimension.
    Ensemble(
        "llmapi",
        (
            Tensor("text_input", "STRING"),
            Tensor("streaming", "BOOL"),
            Tensor("stop", "BOOL"),
            Tensor("return_finish_reason", "BOOL"),
            Tensor("return_cumulative_logprob", "BOOL"),
            *LLMAPI_INPUTS,
        ),
        details=tuple(one for one in DETAIL_OUTPUTS if one.name in _LLMAPI_DETAILS) + LLMAPI_OUTPUTS,
        max_batch_size=0,
        renamed={"llmapi_text_input": "text_input", "stop_request": "stop"},
    ),
    # vllm_backend's model, whose tensors have no batch dimension either.
    Ensemble("vllm_model", COMMON_INPUTS, max_batch_size=0, renamed={"vllm_text_input": "text_input"}),
)

_ENSEMBLE_NAMES = tuple(ensemble.name for ensemble in ENSEMBLES)
MODELS = ("tokenizer", "engine", "detokenizer", "embedding", *_ENSEMBLE_NAMES)

_WRITTEN = "# Written by `python -m minisgl_backend.serving.schema --write`"
_EDITED = _WRITTEN + ", but for the part from instance_group on, which is yours to edit.\n"
_CPU = "instance_group [ { count: 1 kind: KIND_CPU } ]\n"

_TOKENIZER_PARAMETERS = (
    ("apply_chat_template", "auto", "text_input through the chat template; auto: yes for the demo models only"),
    ("exclude_input_in_output", "true", "false: answers with stream=false begin with the prompt, unless asked not to"),
)

_DETOKENIZER_NOTE = """\
# One instance, never more: a second one would reorder streams. Not decoupled: one answer a chunk costs half.
# No dynamic_batching: Triton 2.51 drops a cancelled stream's chunk from that queue as an error, and never finishes an
# ensemble request that had an error while its engine step was running. Larger chunks make up for it.
"""


def config_text(model: str, tail: str | None = None) -> str:
    """The config.pbtxt of one of MODELS. `tail` replaces the part that users edit: instance group and parameters."""
    for ensemble in ENSEMBLES:
        if ensemble.name == model:
            return _ensemble(ensemble)
    if model == "tokenizer":
        head = (
            _head(model, 1)
            + _tensors("input", list(TENSORS.values()), optional=True)
            + _tensors("output", ENGINE_INPUTS + PROMPT_OUTPUTS)
        )
        default = _CPU + "".join(f"# {help}\n{_parameter(key, value)}" for key, value, help in _TOKENIZER_PARAMETERS)
    elif model == "engine":
        head = _head(model, 1) + "model_transaction_policy { decoupled: true }\n"
        head += _tensors("input", ENGINE_INPUTS, optional=True) + _tensors(
            "output", CHUNK + DETAIL_OUTPUTS + SEQUENCE_LENGTH + VECTOR_OUTPUTS + LLMAPI_OUTPUTS
        )
        default = _CPU + "# every engine option is a parameter here\n" + _parameter("model", "demo")
    elif model == "embedding":
        head = _head(model, 0) + _tensors("input", EMBEDDING_INPUTS, optional=True)
        head += _tensors("output", (*VECTOR_OUTPUTS, Tensor("num_cached_tokens", "INT32")))
        return _WRITTEN + ".\n" + head + _CPU
    else:
        head = _head(model, 1) + _tensors("input", CHUNK) + _tensors("output", TEXT_OUTPUTS + TOKEN_OUTPUTS)
        default = _DETOKENIZER_NOTE + _CPU
        return _WRITTEN + ".\n" + head + default
    return _EDITED + head + (default if tail is None else tail)


def write_configs(repository: Path) -> list[Path]:
    """Writes the files that differ from the tables, and returns their paths."""
    changed = []
    for model in MODELS:
        path = repository / model / "config.pbtxt"
        text = config_text(model, _user_part(path))
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            version = path.parent / "1"
            version.mkdir(parents=True, exist_ok=True)
            if model in _ENSEMBLE_NAMES:  # git stores no empty folder, but Triton needs one
                (version / ".gitkeep").touch()
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def outdated_configs(repository: Path) -> list[Path]:
    """The files that `write_configs` would change."""
    paths = [(model, repository / model / "config.pbtxt") for model in MODELS]
    return [
        path
        for model, path in paths
        if not path.is_file() or path.read_text(encoding="utf-8") != config_text(model, _user_part(path))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write or check the config.pbtxt files of the model repository.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    parser.add_argument("--model-repository", type=Path, default=model_repository())
    options = parser.parse_args(arguments)
    if options.write:
        for path in write_configs(options.model_repository):
            print(f"wrote {path}")
        return 0
    outdated = outdated_configs(options.model_repository)
    for path in outdated:
        print(f"outdated: {path}")
    return 1 if outdated else 0


def _ensemble(ensemble: Ensemble) -> str:
    # An ensemble's inputs and the tensors between its models share one name space.
    taken = {tensor.name for tensor in ensemble.inputs}
    handed_on = {
        tensor.name: f"checked_{tensor.name}" if tensor.name in taken else tensor.name for tensor in ENGINE_INPUTS
    }
    chunk = _same(CHUNK)
    return (
        f"{_WRITTEN}.\n"
        + f'name: "{ensemble.name}"\nplatform: "ensemble"\nmax_batch_size: {ensemble.max_batch_size}\n'
        + _tensors("input", ensemble.inputs, True)
        + _tensors("output", ensemble.text + ensemble.details)
        + "ensemble_scheduling {\n  step [\n"
        + ",\n".join(
            (
                _step("tokenizer", ensemble.tokenizer_map, handed_on),
                _step("engine", handed_on, {**chunk, **_same(ensemble.details)}),
                _step("detokenizer", chunk, _same(ensemble.text)),
            )
        )
        + "\n  ]\n}\n"
    )


def _same(tensors: Sequence[Tensor]) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """`inputs` and `outputs`: the model's name -> the ensemble's."""
    lines = [f'      model_name: "{model}"', "      model_version: -1"]
    for kind, names in (("input", inputs), ("output", outputs)):
        lines += [f'      {kind}_map {{ key: "{key}" value: "{value}" }}' for key, value in names.items()]
    return "    {\n" + "\n".join(lines) + "\n    }"


def _head(model: str, max_batch_size: int) -> str:
    return f'name: "{model}"\nbackend: "python"\nmax_batch_size: {max_batch_size}\n'


def _tensors(kind: str, tensors: Sequence[Tensor], optional: bool = False) -> str:
    extra = " optional: true" if optional else ""
    lines = [
        f'  {{ name: "{tensor.name}" data_type: TYPE_{tensor.dtype} '
        f"dims: [ {', '.join(map(str, tensor.dims))} ]{extra} }}"
        for tensor in tensors
    ]
    return f"{kind} [\n" + ",\n".join(lines) + "\n]\n"


def _parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'


def _user_part(path: Path) -> str | None:
    """The part of a file from its instance group on; None if there is none."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    start = text.find("\ninstance_group")
    return text[start + 1 :] if start >= 0 else None


if __name__ == "__main__":
    sys.exit(main())
