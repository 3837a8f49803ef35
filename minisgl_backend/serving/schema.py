"""The tensors that clients may send and receive, once; every config.pbtxt is written from these tables.

`python -m minisgl_backend.serving.schema --write` writes the five config.pbtxt of model_repository/ (parameters that a
user has set there are kept), `--check` says whether they are up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MODELS = ("tokenizer", "engine", "detokenizer", "ensemble", "vllm_model")


@dataclass(frozen=True)
class Tensor:
    """One tensor; `dims` without the batch dimension, -1 is any length."""

    name: str
    dtype: str  # Triton's: STRING, INT32 ...
    dims: tuple[int, ...] = (1,)
    refused: str = ""  # declared so that clients may name it, but not served: the reason


# Sent by unmodified clients of tensorrtllm_backend's and vllm_backend's ensembles.
COMMON_INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("stream", "BOOL"),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("sampling_parameters", "STRING"),  # JSON
    Tensor("return_finish_reason", "BOOL"),
    Tensor("return_cumulative_logprob", "BOOL"),
    Tensor("return_logprobs", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
    Tensor("messages", "STRING"),  # JSON
    Tensor("prompt_token_ids", "INT32", (-1,)),
    Tensor("apply_chat_template", "BOOL"),
    Tensor("chat_template_kwargs", "STRING"),  # JSON
    Tensor("skip_special_tokens", "BOOL"),
    Tensor("add_special_tokens", "BOOL"),
    Tensor("priority", "INT32"),  # Triton's own field of that name does not reach a Python model
    Tensor("image", "STRING", (-1,), "this server has no multimodal models"),
    Tensor("embedding_request", "STRING", (1,), "this server has no embedding models"),
)

# vllm_model does not declare these: a client of vllm_backend sends them as request parameters, often as strings, which
# a declared tensor would refuse.
SAMPLING_INPUTS = (
    Tensor("max_tokens", "INT32"),
    Tensor("min_tokens", "INT32"),
    Tensor("min_length", "INT32"),
    Tensor("temperature", "FP32"),
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    Tensor("min_p", "FP32"),
    Tensor("seed", "UINT64"),
    Tensor("random_seed", "UINT64"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("length_penalty", "FP32"),
    Tensor("beam_width", "INT32"),
    Tensor("num_return_sequences", "INT32"),
    Tensor("stop_words", "STRING", (-1,)),
    Tensor("bad_words", "STRING", (-1,)),
    Tensor("stop_token_ids", "INT32", (-1,)),
    Tensor("logit_bias", "STRING"),  # JSON
    Tensor("ignore_eos", "BOOL"),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    # Not called like the outputs logprobs and prompt_logprobs: an ensemble has one name space for both. As request
    # parameters (a key of the JSON body of `generate`) both go by the outputs' names too.
    Tensor("num_logprobs", "INT32"),
    Tensor("num_prompt_logprobs", "INT32"),
    Tensor("guided_decoding_guide_type", "STRING"),
    Tensor("guided_decoding_guide", "STRING"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("return_perf_metrics", "BOOL"),
    Tensor("return_context_logits", "BOOL", (1,), "this server does not return logits; ask for logprobs"),
    Tensor("return_generation_logits", "BOOL", (1,), "this server does not return logits; ask for logprobs"),
    Tensor("decoder_text_input", "STRING", (1,), "this server has no encoder-decoder models"),
    Tensor("embedding_bias_words", "STRING", (-1,), "use logit_bias"),
    Tensor("embedding_bias_weights", "FP32", (-1,), "use logit_bias"),
    Tensor("prompt_embedding_table", "FP16", (-1, -1), "this server has no prompt tuning"),
    Tensor("prompt_vocab_size", "INT32", (1,), "this server has no prompt tuning"),
    Tensor("prompt_table_extra_id", "UINT64", (1,), "this server has no prompt tuning"),
    Tensor("lora_task_id", "UINT64", (1,), "this server has no LoRA"),
    Tensor("lora_weights", "FP16", (-1, -1), "this server has no LoRA"),
    Tensor("lora_config", "INT32", (-1, 3), "this server has no LoRA"),
    Tensor("num_draft_tokens", "INT32", (1,), "this server has no speculative decoding"),
    Tensor("use_draft_logits", "BOOL", (1,), "this server has no speculative decoding"),
)

INPUTS = COMMON_INPUTS + SAMPLING_INPUTS

TEXT_OUTPUTS = (Tensor("text_output", "STRING", (-1,)),)

# All that needs no text: sent by the engine itself. Every output that a model declares costs each of its requests some
# microseconds, asked for or not, and to the engine an answer is one request, to the detokenizer each chunk of it.
DETAIL_OUTPUTS = (
    Tensor("finish_reason", "STRING", (-1,)),
    Tensor("cumulative_logprob", "FP32", (-1,)),
    Tensor("logprobs", "STRING", (-1,)),  # JSON, one list a sequence
    Tensor("prompt_logprobs", "STRING", (1,)),  # JSON
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32", (-1,)),
    Tensor("sequence_index", "INT32"),
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("batch_index", "INT32"),
    Tensor("context_logits", "FP32", (-1, -1)),
    Tensor("generation_logits", "FP32", (-1, -1, -1)),
    Tensor("kv_cache_alloc_new_blocks", "INT32"),
    Tensor("kv_cache_reused_blocks", "INT32"),
    Tensor("kv_cache_alloc_total_blocks", "INT32"),
    Tensor("arrival_time_ns", "INT64"),
    Tensor("first_scheduled_time_ns", "INT64"),
    Tensor("first_token_time_ns", "INT64"),
    Tensor("last_token_time_ns", "INT64"),
    Tensor("acceptance_rate", "FP32"),
    Tensor("total_accepted_draft_tokens", "INT32"),
    Tensor("total_draft_tokens", "INT32"),
)

OUTPUTS = TEXT_OUTPUTS + DETAIL_OUTPUTS

# Between the models. `spec` and `chunk` are packed structs of serving.wire.
ENGINE_INPUTS = (Tensor("input_ids", "INT32", (-1,)), Tensor("spec", "UINT8", (-1,)))
CHUNK = (Tensor("chunk", "UINT8", (-1,)),)

# Of the tokenizer, beside what goes to the engine: only for those who ask it itself for them by name.
PROMPT_OUTPUTS = (
    Tensor("prompt_text", "STRING"),  # the prompt that the model sees, special tokens included
    Tensor("token_texts", "STRING", (-1,)),  # each of its tokens alone
    Tensor("model_info", "STRING"),  # JSON: model, max_model_len, vocab_size, chat_template, added_tokens
)

TENSORS = {tensor.name: tensor for tensor in INPUTS}

_WRITTEN = "# Written by `python -m minisgl_backend.serving.schema --write`"
_EDITED = _WRITTEN + ", but for the part from instance_group on, which is yours to edit.\n"
_CPU = "instance_group [ { count: 1 kind: KIND_CPU } ]\n"

_TOKENIZER_PARAMETERS = (
    ("apply_chat_template", "auto", "text_input through the chat template; auto: yes for the demo model only"),
    ("exclude_input_in_output", "true", "false: answers with stream=false begin with the prompt, unless asked not to"),
)

_DETOKENIZER_NOTE = """\
# One instance, never more: a second one would reorder streams. Not decoupled: one answer a chunk costs half.
# No dynamic_batching: Triton 2.51 drops a cancelled stream's chunk from that queue as an error, and never finishes an
# ensemble request that had an error while its engine step was running. Larger chunks make up for it.
"""


def config_text(model: str, tail: str | None = None) -> str:
    """The config.pbtxt of one of MODELS. `tail` replaces the part that users edit: instance group and parameters."""
    if model in ("ensemble", "vllm_model"):
        return _ensemble(model)
    if model == "tokenizer":
        head = (
            _head(model, 1)
            + _tensors("input", INPUTS, optional=True)
            + _tensors("output", ENGINE_INPUTS + PROMPT_OUTPUTS)
        )
        default = _CPU + "".join(f"# {help}\n{_parameter(key, value)}" for key, value, help in _TOKENIZER_PARAMETERS)
    elif model == "engine":
        head = _head(model, 1) + "model_transaction_policy { decoupled: true }\n"
        head += _tensors("input", ENGINE_INPUTS, optional=True) + _tensors("output", CHUNK + DETAIL_OUTPUTS)
        default = _CPU + "# every engine option is a parameter here\n" + _parameter("model", "demo")
    else:
        head = _head(model, 1) + _tensors("input", CHUNK) + _tensors("output", TEXT_OUTPUTS)
        default = _DETOKENIZER_NOTE + _CPU
        return _WRITTEN + ".\n" + head + default
    return _EDITED + head + (default if tail is None else tail)


def write_configs(repository: Path) -> list[Path]:
    """Writes the files that differ from what the tables say and returns their paths."""
    changed = []
    for model in MODELS:
        path = repository / model / "config.pbtxt"
        text = config_text(model, _user_part(path))
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
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
    default = Path(__file__).resolve().parents[2] / "model_repository"
    parser.add_argument("--model-repository", type=Path, default=default)
    options = parser.parse_args(arguments)
    if options.write:
        for path in write_configs(options.model_repository):
            print(f"wrote {path}")
        return 0
    outdated = outdated_configs(options.model_repository)
    for path in outdated:
        print(f"outdated: {path}")
    return 1 if outdated else 0


def _ensemble(model: str) -> str:
    inputs = INPUTS if model == "ensemble" else COMMON_INPUTS
    return (
        f"{_WRITTEN}.\n"
        + f'name: "{model}"\nplatform: "ensemble"\nmax_batch_size: {1 if model == "ensemble" else 0}\n'
        + _tensors("input", inputs, True)
        + _tensors("output", OUTPUTS)
        + "ensemble_scheduling {\n  step [\n"
        + ",\n".join(
            (
                _step("tokenizer", inputs, ENGINE_INPUTS),
                _step("engine", ENGINE_INPUTS, CHUNK + DETAIL_OUTPUTS),
                _step("detokenizer", CHUNK, TEXT_OUTPUTS),
            )
        )
        + "\n  ]\n}\n"
    )


def _step(model: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    lines = [f'      model_name: "{model}"', "      model_version: -1"]
    lines += [f'      input_map {{ key: "{tensor.name}" value: "{tensor.name}" }}' for tensor in inputs]
    lines += [f'      output_map {{ key: "{tensor.name}" value: "{tensor.name}" }}' for tensor in outputs]
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
    """What a file holds from its instance group on; None where there is none."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8")
    start = text.find("\ninstance_group")
    return text[start + 1 :] if start >= 0 else None


if __name__ == "__main__":
    sys.exit(main())
