"""The tensors that clients may send and receive, defined once; every config.pbtxt is generated from these tables.

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


@dataclass(frozen=True)
class Tensor:
    """One tensor; `dims` without the batch dimension, -1 is any length."""

    name: str
    dtype: str  # Triton's name: STRING, INT32 ...
    dims: tuple[int, ...] = (1,)
    refused: str = ""  # the reason why it is not served, although declared so that clients may name it


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
    Tensor("embedding_request", "STRING"),  # JSON; the response is an embedding, as a JSON list
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
    Tensor("cache_salt", "STRING"),
    Tensor("speculative", "BOOL"),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    # Not named like the outputs logprobs and prompt_logprobs: inputs and outputs of an ensemble share one name space.
    # As request parameters (keys in the JSON body of `generate`) both are accepted by the outputs' names, too.
    Tensor("num_logprobs", "INT32"),
    Tensor("num_prompt_logprobs", "INT32"),
    Tensor("guided_decoding_guide_type", "STRING"),
    Tensor("guided_decoding_guide", "STRING"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("return_perf_metrics", "BOOL"),  # with every response, where NVIDIA's client reads them
    Tensor("return_final_perf_metrics", "BOOL"),  # only with the last one, so that a stream costs no more
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
    Tensor("num_draft_tokens", "INT32", (1,), "drafts are this server's own; see speculative_config"),
    Tensor("use_draft_logits", "BOOL", (1,), "drafts are this server's own; see speculative_config"),
)

INPUTS = COMMON_INPUTS + SAMPLING_INPUTS

# TensorRT-LLM's names on its model `tensorrt_llm`, which takes token ids; most are aliases of inputs above.
TENSORRT_LLM_INPUTS = (
    Tensor("input_lengths", "INT32"),
    Tensor("request_output_len", "INT32"),
    Tensor("streaming", "BOOL"),
    Tensor("runtime_top_k", "INT32"),
    Tensor("runtime_top_p", "FP32"),
    Tensor("len_penalty", "FP32"),
    Tensor("early_stopping", "BOOL"),
    Tensor("stop_words_list", "INT32", (2, -1)),
    Tensor("bad_words_list", "INT32", (2, -1)),
    Tensor("embedding_bias", "FP32", (-1,), "use logit_bias"),
    Tensor("draft_input_ids", "INT32", (-1,), "drafts are this server's own; see speculative_config"),
    Tensor("decoder_input_ids", "INT32", (-1,), "this server has no encoder-decoder models"),
    Tensor("prompt_table_extra_ids", "UINT64", (-1,), "this server has no prompt tuning"),
    Tensor("lookahead_window_size", "INT32", (1,), "drafts are this server's own; see speculative_config"),
    Tensor("lookahead_ngram_size", "INT32", (1,), "drafts are this server's own; see speculative_config"),
    Tensor(
        "lookahead_verification_set_size",
        "INT32",
        (1,),
        "drafts are this server's own; see speculative_config",
    ),
)

# Of the model `embedding`: a list of texts, or the token ids of one text. Without `query` each becomes a vector; with
# it, each gets a score of how well it answers the query.
EMBEDDING_INPUTS = (
    Tensor("input_text", "STRING", (-1,)),
    Tensor("input_ids", "INT32", (-1,)),
    Tensor("dimensions", "INT32"),
    Tensor("normalize", "BOOL"),
    Tensor("query", "STRING"),
    Tensor("instruction", "STRING"),
    Tensor("priority", "INT32"),
    Tensor("pooling_request", "STRING"),  # JSON: all of these and more, in the format of serving.pooling_codec
)
# TensorRT-LLM's names on its model of the LLM API; most are aliases of inputs above.
_NO_LORA = "this server has no LoRA"
LLMAPI_INPUTS = (
    Tensor("sampling_param_best_of", "INT32"),
    Tensor("sampling_param_temperature", "FP32"),
    Tensor("sampling_param_top_k", "INT32"),
    Tensor("sampling_param_top_p", "FP32"),
    Tensor("sampling_param_frequency_penalty", "FP32"),
    Tensor("sampling_param_presence_penalty", "FP32"),
    Tensor("sampling_param_max_tokens", "INT32"),
    Tensor("sampling_param_stop", "STRING", (-1,)),
    Tensor("sampling_param_seed", "UINT64"),
    Tensor("sampling_param_exclude_input_from_output", "BOOL"),
    Tensor("sampling_param_return_perf_metrics", "BOOL"),
    Tensor("return_stop_reason", "BOOL"),
    Tensor("image_url", "STRING", (-1,), "this server has no multimodal models"),
    Tensor("lora_id", "UINT64", (1,), _NO_LORA),
    Tensor("lora_name", "STRING", (1,), _NO_LORA),
    Tensor("lora_path", "STRING", (1,), _NO_LORA),
    Tensor("lora_ckpt_source", "STRING", (1,), _NO_LORA),
)

# The tokenizer's names of ensemble inputs that show which API the client uses: see `Ensemble.renamed`.
RENAMED_INPUTS = (
    Tensor("vllm_text_input", "STRING"),
    Tensor("trtllm_input_ids", "INT32", (-1,)),
    Tensor("llmapi_text_input", "STRING"),
    Tensor("stop_request", "BOOL"),
    Tensor("num_responses", "INT32"),
    Tensor("pooling_request", "STRING"),  # JSON of serving.pooling_codec; only from the model `embedding`
)

TEXT_OUTPUTS = (Tensor("text_output", "STRING", (-1,)),)
TOKEN_OUTPUTS = (Tensor("output_ids", "INT32", (-1, -1)),)  # [beam, tokens]

# Outputs other than text, sent by the engine itself. Every declared output costs each request of a model some
# microseconds, requested or not; for the engine an answer is one request, for the detokenizer each chunk is.
DETAIL_OUTPUTS = (
    Tensor("finish_reason", "STRING", (-1,)),
    Tensor("stop_reason", "STRING", (-1,)),
    Tensor("cumulative_logprob", "FP32", (-1,)),
    Tensor("logprobs", "STRING", (-1,)),  # JSON, one list per sequence
    Tensor("prompt_logprobs", "STRING", (1,)),  # JSON
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32", (-1,)),
    Tensor("num_cached_tokens", "INT32"),  # prompt tokens that the prefix cache supplied; among a request's metrics
    Tensor("sequence_index", "INT32"),
    Tensor("cum_log_probs", "FP32", (-1,)),
    Tensor("output_log_probs", "FP32", (-1, -1)),
    Tensor("batch_index", "INT32"),
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
# Instead of tokens, in response to requests for vectors.
VECTOR_OUTPUTS = (
    Tensor("embedding", "FP32", (-1, -1)),  # one row per prompt
    Tensor("score", "FP32", (-1,)),  # one per document
    Tensor("prompt_lengths", "INT32", (-1,)),  # tokens of each prompt
)
# Outputs that only the LLM API's model has, and those of the above that it has, too.
LLMAPI_OUTPUTS = (
    Tensor("kv_cache_reused_block", "INT32"),
    Tensor("kv_cache_missed_block", "INT32"),
    Tensor("kv_cache_hit_rate", "FP32"),
)
_LLMAPI_DETAILS = (
    *("finish_reason", "cumulative_logprob", "kv_cache_alloc_new_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens", "stop_reason"),
)
SEQUENCE_LENGTH = (Tensor("sequence_length", "INT32", (-1,)),)

# Between the models. `spec` and `chunk` are packed structs of ipc.wire.
ENGINE_INPUTS = (Tensor("input_ids", "INT32", (-1,)), Tensor("spec", "UINT8", (-1,)))
CHUNK = (Tensor("chunk", "UINT8", (-1,)),)

# The tokenizer's outputs other than those for the engine: only for clients that call it directly and name them.
PROMPT_OUTPUTS = (
    Tensor("prompt_text", "STRING"),  # the prompt as the model sees it, special tokens included
    Tensor("prompt_tail", "STRING"),  # its last tokens, which determine how the answer begins
    Tensor("token_texts", "STRING", (-1,)),  # each of its tokens as text
    Tensor("model_info", "STRING"),  # JSON: model, max_model_len, vocab_size, chat_template, added_tokens
)

TENSORS = {tensor.name: tensor for tensor in (*INPUTS, *TENSORRT_LLM_INPUTS, *LLMAPI_INPUTS, *RENAMED_INPUTS)}


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

ENSEMBLES = (
    Ensemble("ensemble", INPUTS),
    # TensorRT-LLM's BLS model: like its ensemble.
    Ensemble("tensorrt_llm_bls", INPUTS, renamed=_APART),
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
