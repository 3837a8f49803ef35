"""The tensors that clients may send and receive, and those between the models, defined once."""

from __future__ import annotations

from dataclasses import dataclass


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
    Tensor("image", "STRING", (-1,)),  # base64 of image files, or data URLs
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
    Tensor("prompt_table_extra_id", "UINT64"),  # a client's id of its image; here images are known by what they are
    Tensor("lora_task_id", "UINT64"),
    Tensor("lora_weights", "FP16", (-1, -1)),
    Tensor("lora_config", "INT32", (-1, 3)),
    Tensor("num_draft_tokens", "INT32", (1,), "drafts are this server's own; see speculative_config"),
    Tensor("use_draft_logits", "BOOL", (1,), "drafts are this server's own; see speculative_config"),
)

INPUTS = COMMON_INPUTS + SAMPLING_INPUTS
# Of tensorrtllm_backend's multimodal ensembles.
IMAGE_INPUTS = (
    Tensor("image_url_input", "STRING", (-1,)),
    Tensor("image_bytes_input", "UINT8", (-1, -1, -1, -1)),  # pixels [images, 3, height, width], or 3 at the end
    Tensor("image_sizes_input", "INT64", (-1, 2)),  # height and width of each; of pixels, behind which is padding
    Tensor(
        "image_input", "FP16", (-1, -1, -1, -1), "pixels are prepared here; send image_bytes_input or image_url_input"
    ),
    Tensor("video_bytes_input", "UINT8", (-1, -1, -1, -1), "this server has no video; send single frames as images"),
)
# From the OpenAI-compatible endpoint: the files of the images in `messages`, in order.
ENDPOINT_INPUTS = (Tensor("image_data", "STRING", (-1,)),)

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
    Tensor("image_url", "STRING", (-1,)),  # before the text, through the chat template
    Tensor("lora_id", "UINT64"),
    Tensor("lora_name", "STRING"),
    Tensor("lora_path", "STRING"),
    Tensor("lora_ckpt_source", "STRING"),
)

# The tokenizer's names of ensemble inputs that show which API the client uses: see `Ensemble.renamed` in `schema`.
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
    # Prompt tokens that the prefix cache supplied; with images, also those that are theirs. Among a request's metrics.
    Tensor("num_cached_tokens", "INT32", (-1,)),
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
# Outputs that only the LLM API's model has.
LLMAPI_OUTPUTS = (
    Tensor("kv_cache_reused_block", "INT32"),
    Tensor("kv_cache_missed_block", "INT32"),
    Tensor("kv_cache_hit_rate", "FP32"),
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

TENSORS = {
    tensor.name: tensor
    for tensor in (
        *(*INPUTS, *IMAGE_INPUTS, *ENDPOINT_INPUTS),
        *(*TENSORRT_LLM_INPUTS, *LLMAPI_INPUTS, *RENAMED_INPUTS),
    )
}
# The inputs that are images, of which a request has one.
IMAGES = ("image", "image_url_input", "image_bytes_input", "image_url")
