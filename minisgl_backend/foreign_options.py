"""The equivalents here of other servers' options: for hints on the command line and in Python, and the tables
of docs/moving.md.

The names are those of vLLM 0.26, SGLang 0.5, Mini-SGLang, trtllm-serve 1.2, llama.cpp's server and Ollama, late in
2026. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches

_SIMILAR = 0.75  # least difflib ratio at which a name, or the one word of it that differs, counts as a typing error
_ALMOST = 0.9  # the same for a name whose words are other ones
_STATES_KEPT = "none: the prefix cache keeps states where prompts meet, whatever the page size"


@dataclass(frozen=True)
class ForeignOption:
    """One row of a table: flags that mean the same, and their equivalent here, as Markdown."""

    flags: tuple[str, ...]
    here: str

    @property
    def hint(self) -> str:
        """`here` as plain text."""
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", self.here).replace("`", "")
        return f"there is {text}" if text.startswith("none") else text


def _row(flags: str, here: str) -> ForeignOption:
    return ForeignOption(tuple(flags.split()), here)


FOREIGN_OPTIONS: dict[str, tuple[ForeignOption, ...]] = {
    "vLLM": (
        _row("--host", "`--host`, 127.0.0.1 by default, not all interfaces"),
        _row("--port", "`--openai-port 9000`; 8000 is Triton's HTTP"),
        _row("--served-model-name", "the same"),
        _row("--api-key", "the same; `MINISGL_API_KEY` for `VLLM_API_KEY`"),
        _row("--ssl-certfile --ssl-keyfile", "the same"),
        _row("--allowed-origins", "the same; origins follow each other as words, not as JSON"),
        _row("--config", "the same: a YAML file with our options' names"),
        _row("--dtype", "the same"),
        _row("--trust-remote-code", "the same, for tokenizers alone"),
        _row("--max-model-len", "`--max-seq-len-override`"),
        _row("--gpu-memory-utilization", "`--memory-ratio`: of the memory that is free, not of all"),
        _row("--max-num-seqs", "`--max-running-requests`"),
        _row(
            "--max-num-batched-tokens",
            "`--max-prefill-length`; within mixed batches: `--mixed-prefill-length`",
        ),
        _row("--block-size", "`--page-size`"),
        _row("--limit-mm-per-prompt", 'the same, for images: `{"image": 8}`; or `--max-images 8`'),
        _row("--mm-processor-cache-gb", "`--image-cache-mib`, of decoded images"),
        _row(
            "--allowed-media-domains",
            "the same, of `LLM` `media_domains`; `*` is all public hosts; without it no URL is fetched",
        ),
        _row(
            "--allowed-local-media-path",
            "none: no file of the server is opened for a request; a data URL, or `file_id` of an upload",
        ),
        _row("--language-model-only", "`--encoder-cache-mib 0`: the encoder is not loaded"),
        _row(
            "--mm-processor-kwargs --media-io-kwargs",
            "none: requests have `mm_processor_kwargs` and `media_io_kwargs`; `--max-image-tokens` bounds all",
        ),
        _row("--interleave-mm-strings", "always on: images and texts keep their order"),
        _row("--mm-encoder-tp-mode", "none: each image is encoded by one GPU, as with `data`"),
        _row("--skip-mm-profiling", "none: memory for the largest image is counted at the start"),
        _row("--enable-mm-embeds", "none: vectors of clients are not taken; send the image"),
        _row("--mm-processor-cache-type --mm-shm-cache-max-object-size-mb", "none: always shared memory"),
        _row("--mm-encoder-attn-backend", "none: the fastest for the machine"),
        _row("--num-gpu-blocks-override", "`--num-pages`"),
        _row(
            "--mamba-cache-mode --mamba-block-size",
            "none: the prefix cache keeps states where prompts meet, whatever the page size",
        ),
        _row("--mamba-cache-dtype --mamba-ssm-cache-dtype", "none: states are float32"),
        _row("--kv-cache-dtype", "the same; `fp8` is `fp8_e4m3`"),
        _row("--enable-prefix-caching", "on by default; `--cache-type naive` switches it off"),
        _row("--no-enable-prefix-caching", "`--cache-type naive`"),
        _row("--enable-chunked-prefill", "always on; `--max-prefill-length` bounds a chunk"),
        _row("--enforce-eager", "`--cuda-graph-max-bs 0`"),
        _row("--max-cudagraph-capture-size", "`--cuda-graph-max-bs`"),
        _row(
            "--attention-backend", "`--attn`: `fa` for `FLASH_ATTN`, `fi` for `FLASHINFER`, `triton` for `TRITON_ATTN`"
        ),
        _row("--no-async-scheduling", "`MINISGL_DISABLE_OVERLAP_SCHEDULING=1`"),
        _row("--tensor-parallel-size -tp", "`--tp`"),
        _row("--data-parallel-size -dp", "`--dp`, on one machine"),
        _row("--nnodes", "`--nodes`"),
        _row("--node-rank", "the same"),
        _row(
            "--master-addr --master-port",
            "`--rendezvous HOST:PORT` and a [secret](operations.md#several-machines-one-model)",
        ),
        _row("--scheduling-policy", "always `priority`; see the request's field below"),
        _row("--enable-auto-tool-choice", "always on"),
        _row(
            "--tool-call-parser",
            "the same, with vLLM's names for [those that are served](openai.md#tools-and-thoughts); chosen from the "
            "template by default",
        ),
        _row("--reasoning-parser", "the same"),
        _row("--generation-config", "always as `auto`: the model's own defaults, `max_new_tokens` among them"),
        _row("--download-dir", "`HF_HOME`"),
        _row("--seed", "none: requests have their own `seed`"),
        _row("--chat-template", "none: the tokenizer's; edit the folder"),
        _row("--tokenizer", "none: the tokenizer of the model's folder"),
        _row("--disable-log-stats", "none: a line every ten seconds while there is work"),
        _row("--disable-log-requests --enable-log-requests", "none: requests are not logged"),
        _row("--quantization", "the same: `fp8`; unset for checkpoints that are quantized, whose format is recognised"),
        _row("-q", "`--quantization`"),
        _row("--lora-modules", "`--adapters NAME=FOLDER,NAME=FOLDER` ([what is served](adapters.md))"),
        _row("--enable-lora", "none: on with `--adapters`, `--adapter-dir` or `--max-lora-rank`"),
        _row("--max-loras", "`--max-adapters`; by default each of `--adapters` has a slot"),
        _row("--max-cpu-loras", "`--max-loaded-adapters`"),
        _row("--max-lora-rank", "the same, for adapters that are loaded later; those of `--adapters` say theirs"),
        _row("--lora-dtype", "none: the model's number format"),
        _row(
            "--fully-sharded-loras --lora-target-modules",
            "none: each adapter's own modules, split as their weights are",
        ),
        _row("--speculative-config", "the same: methods `ngram`, `draft_model`, `eagle3` and `mtp`"),
        _row("--cpu-offload-gb --swap-space", "none: weights and pages stay on the device"),
        _row("--pipeline-parallel-size -pp", "none; several GPUs: `--tp`"),
        _row("--enable-expert-parallel", "none; several GPUs: `--tp`"),
    ),
    "SGLang": (
        _row("--model-path", "`--model`, or the first argument"),
        _row("--tokenizer-path", "none: the tokenizer of the model's folder"),
        _row("--port", "`--openai-port 9000`; 8000 is Triton's HTTP"),
        _row("--context-length", "`--max-seq-len-override`"),
        _row("--mem-fraction-static", "`--memory-ratio`: of the memory that is free"),
        _row("--max-running-requests", "the same"),
        _row("--max-queued-requests", "`--max-waiting-requests`"),
        _row("--max-total-tokens", "`--num-pages`, times `--page-size`"),
        _row("--max-mamba-cache-size", "`--num-state-slots`"),
        _row("--mamba-full-memory-ratio", "`--num-state-slots`; unset: at most half of what weights leave"),
        _row(
            "--mamba-scheduler-strategy --mamba-track-interval",
            "none: the prefix cache keeps states where prompts meet, whatever the page size",
        ),
        _row("--mamba-ssm-dtype", "none: states are float32"),
        _row("--chunked-prefill-size --max-prefill-tokens", "`--max-prefill-length`"),
        _row("--enable-mixed-chunk", "always on; `--mixed-prefill-length` bounds it"),
        _row("--schedule-policy", "the same: `fcfs`, `lpm`"),
        _row("--limit-mm-data-per-request", '`--limit-mm-per-prompt`, for images: `{"image": 8}`; or `--max-images 8`'),
        _row("--enable-multimodal", "always on, for models that see"),
        _row("--mm-enable-dp-encoder", "always on: each image is encoded by one GPU"),
        _row("--language-only", "`--encoder-cache-mib 0`: the encoder is not loaded"),
        _row("--encoder-only --encoder-urls", "none: the encoder runs beside its decoder"),
        _row("--mm-attention-backend", "none: the fastest for the machine"),
        _row("--mm-process-config", "none: requests have `mm_processor_kwargs`; `--max-image-tokens` bounds all"),
        _row("--page-size", "the same"),
        _row("--kv-cache-dtype", "the same"),
        _row("--attention-backend", "`--attn`: `fa` for `fa3`, `fi` for `flashinfer`, `triton`, `torch`"),
        _row("--disable-radix-cache", "`--cache-type naive`"),
        _row("--disable-cuda-graph", "`--cuda-graph-max-bs 0`"),
        _row("--cuda-graph-max-bs", "the same"),
        _row("--disable-overlap-schedule", "`MINISGL_DISABLE_OVERLAP_SCHEDULING=1`"),
        _row("--tp-size --tensor-parallel-size", "`--tp`"),
        _row("--dp-size --data-parallel-size", "`--dp`"),
        _row("--nnodes", "`--nodes`"),
        _row("--dist-init-addr", "`--rendezvous` and a [secret](operations.md#several-machines-one-model)"),
        _row("--tool-call-parser --reasoning-parser", "the same"),
        _row("--grammar-backend", "xgrammar, where it is installed"),
        _row("--enable-metrics", "always on: port 8002"),
        _row("--log-level", "`LOG_LEVEL`"),
        _row("--random-seed", "none: requests have their own `seed`"),
        _row("--quantization", "the same: `fp8`; unset for checkpoints that are quantized, whose format is recognised"),
        _row("--lora-paths", "`--adapters NAME=FOLDER,NAME=FOLDER` ([what is served](adapters.md))"),
        _row("--enable-lora", "none: on with `--adapters`, `--adapter-dir` or `--max-lora-rank`"),
        _row("--max-loras-per-batch", "`--max-adapters`; by default each of `--adapters` has a slot"),
        _row("--max-loaded-loras", "`--max-loaded-adapters`"),
        _row("--max-lora-rank", "the same, for adapters that are loaded later; those of `--adapters` say theirs"),
        _row("--lora-target-modules", "none: each adapter's own modules"),
        _row("--lora-drain-wait-threshold", "none: an adapter waits a bounded time, always"),
        _row("--admin-api-key", "`--admin-key`"),
        _row("--lora-backend --lora-eviction-policy", "none"),
        _row("--speculative-algorithm", "`--speculative-config`: methods `ngram`, `draft_model`, `eagle3` and `mtp`"),
        _row("--ep-size --expert-parallel-size", "none; several GPUs: `--tp`"),
        _row("--enable-torch-compile", "none"),
    ),
    "TensorRT-LLM": (
        _row("--tp_size", "`--tp`"),
        _row("--max_batch_size", "`--max-running-requests`"),
        _row("--max_num_tokens", "`--max-prefill-length`"),
        _row("--max_seq_len", "`--max-seq-len-override`"),
        _row(
            "--kv_cache_free_gpu_memory_fraction",
            "`--memory-ratio`: of what is free before the weights, weights included, not after them",
        ),
        _row("--kv_cache_dtype", "`--kv-cache-dtype`"),
        _row("--reasoning_parser --tool_parser", "`--reasoning-parser`, `--tool-call-parser`"),
        _row("--trust_remote_code", "`--trust-remote-code`"),
        _row("--extra_llm_api_options", "`--config`: a YAML file with our options' names"),
        _row("--backend", "none: there is one engine"),
        _row("--tokenizer", "none: the tokenizer of the model's folder"),
        _row("--max_beam_width", "none: no beam search"),
        _row("--pp_size --ep_size", "none; several GPUs: `--tp`"),
        _row("--gpus_per_node", "`CUDA_VISIBLE_DEVICES`"),
    ),
    "Mini-SGLang": (
        _row("--model", "the same, or the first argument"),
        _row("--port", "`--openai-port 9000`"),
        _row("--dtype --memory-ratio --max-running-requests --max-seq-len-override --num-pages --host", "the same"),
        _row("--page-size", "the same; unset, the best measured one, not 1"),
        _row("--max-prefill-length --max-extend-length", "`--max-prefill-length`"),
        _row("--cuda-graph-max-bs --graph", "`--cuda-graph-max-bs`"),
        _row(
            "--attention-backend --attn",
            "the same: `fa`, `fi`, `trtllm`, and two with a comma; and `triton`, `torch`",
        ),
        _row("--cache-type", "the same: `radix`, `naive`"),
        _row("--tensor-parallel-size --tp-size", "`--tp`"),
        _row(
            "--disable-pynccl",
            "the same: all sums over ranks go by torch's NCCL; else through memory that the GPUs share, where they can",
        ),
        _row("--num-tokenizer", "`instance_group` of the model `tokenizer`"),
        _row("--shell-mode", "`minisgl chat`, while a server runs"),
        _row("--moe-backend", "none: one for all"),
        _row("--model-source", "none: a folder, or Hugging Face's hub"),
        _row("--expert-parallel-size", "none; several GPUs: `--tp`"),
    ),
    "llama.cpp": (
        _row("-m --model model_path", "`--model`, or the first argument: a .gguf file, or a model's folder"),
        _row("-hf -hfr --hf-repo", "`--model` with an id of the hub; of a repository of GGUF files, the fetched file"),
        _row("-hff --hf-file -mu --model-url", "none: fetch the file, and give its path"),
        _row("-a --alias", "`--served-model-name`"),
        _row("--host --api-key", "the same"),
        _row("--port", "`--openai-port 9000`; 8000 is Triton's HTTP"),
        _row("--ssl-cert-file", "`--ssl-certfile`"),
        _row("--ssl-key-file", "`--ssl-keyfile`"),
        _row("-c --ctx-size n_ctx", "`--max-seq-len-override`: of each request, not of all together"),
        _row("-np --parallel", "`--max-running-requests`"),
        _row("-cb --cont-batching -nocb --no-cont-batching", "always on"),
        _row("-b --batch-size -ub --ubatch-size n_batch n_ubatch", "`--max-prefill-length`"),
        _row("-n --predict --n-predict", "none: requests have `max_tokens`"),
        _row("-t --threads -tb --threads-batch n_threads", "`OMP_NUM_THREADS`; all cores by default"),
        _row(
            "-ngl --gpu-layers --n-gpu-layers n_gpu_layers",
            "none: all layers are on the GPU, or on the CPU where there is no GPU",
        ),
        _row("-sm --split-mode -ts --tensor-split", "`--tp`: over so many GPUs, in equal parts"),
        _row("-mg --main-gpu -dev --device", "`CUDA_VISIBLE_DEVICES`"),
        _row("-fa --flash-attn", "`--attn`; the best one for the machine by default"),
        _row("-ctk --cache-type-k -ctv --cache-type-v", "`--kv-cache-dtype`: of keys and values alike"),
        _row(
            "--mlock --mmap --no-mmap -lm --load-mode --numa",
            "none: weights are copied to where they are computed with",
        ),
        _row("--jinja --no-jinja", "always on: the model's own chat template"),
        _row("--chat-template --chat-template-file", "none: the tokenizer's; edit the folder"),
        _row("--reasoning-format", "`--reasoning-parser`"),
        _row(
            "--temp --temperature --top-k --top-p --min-p --repeat-penalty",
            "none: requests have these fields; the model's defaults are in its generation_config.json",
        ),
        _row("-s --seed", "none: requests have their own `seed`"),
        _row("--grammar --json-schema -j", "none: requests have `response_format`"),
        _row("-md --model-draft --draft --draft-max", "`--speculative-config`: method `draft_model`"),
        _row("--lora --lora-scaled", "`--adapters NAME=FOLDER`, of a folder of PEFT's; not of a .gguf file"),
        _row("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale", "none: the file's, or config.json's"),
        _row(
            "-mm --mmproj -mmu --mmproj-url",
            "none: a folder of safetensors has its encoder; with a .gguf file, text alone",
        ),
        _row("--no-mmproj", "`--encoder-cache-mib 0`: the encoder is not loaded"),
        _row("--image-max-tokens", "`--max-image-tokens`"),
        _row("--image-min-tokens", "none: the model's own"),
        _row("--embedding --embeddings --reranking --rerank", "always on, for models that have them"),
        _row("--metrics", "always on: port 8002"),
        _row("-v --verbose", "`--verbose`: tritonserver's log; ours: `LOG_LEVEL`"),
        _row("--log-verbose -lv --verbosity --log-disable", "`LOG_LEVEL`"),
    ),
    "Ollama": (
        _row("OLLAMA_HOST", "`--host` and `--openai-port`, 127.0.0.1 and 9000 by default"),
        _row("OLLAMA_CONTEXT_LENGTH num_ctx", "`--max-seq-len-override`"),
        _row("OLLAMA_NUM_PARALLEL", "`--max-running-requests`"),
        _row("OLLAMA_MAX_QUEUE", "`--max-waiting-requests`"),
        _row("OLLAMA_MAX_LOADED_MODELS", "none: a server has one model"),
        _row("OLLAMA_KEEP_ALIVE keep_alive", "none: the model stays loaded until the server ends"),
        _row("OLLAMA_LOAD_TIMEOUT", "`--start-timeout`"),
        _row("OLLAMA_MODELS", "`HF_HOME`; what `minisgl fetch` brings is in `XDG_CACHE_HOME`"),
        _row("OLLAMA_ORIGINS", "`--allowed-origins`"),
        _row("OLLAMA_FLASH_ATTENTION", "`--attn`; the best one for the machine by default"),
        _row("OLLAMA_KV_CACHE_TYPE", "`--kv-cache-dtype`"),
        _row("OLLAMA_DEBUG", "`LOG_LEVEL=DEBUG`"),
        _row("num_batch", "`--max-prefill-length`"),
        _row("num_gpu", "none: all layers are on the GPU, or on the CPU where there is no GPU"),
        _row("num_thread", "`OMP_NUM_THREADS`; all cores by default"),
        _row("num_predict", "none: requests have `max_tokens`"),
        _row("repeat_penalty", "none: requests have `repetition_penalty`"),
    ),
}


def is_foreign(given: str) -> bool:
    """Whether another server has this option, `--name`, `-n` or `--name=value`, as typed."""
    return any(_owners(given.partition("=")[0]))


def explain_unknown(given: str, known: Sequence[str], others: Sequence[str] = ()) -> str:
    """One line about an unknown option: its equivalent here, or the option that was probably meant.

    `given`: as typed, `--name` or `--name=value`; `known`: the existing options; `others`: further unknown ones beside
    it, which tell whose command line it is.
    """
    name = given.partition("=")[0]
    return _explained(name, known, others) or f"no such option: {name}; --help lists all"


def explain_unknown_argument(name: str, known: Sequence[str], others: Sequence[str] = ()) -> str:
    """The same for a keyword argument, or a parameter of a file; `known`: the existing ones."""
    flags = [f"--{_plain(one)}" for one in known]
    text = _explained(f"--{_plain(name)}", flags, [f"--{_plain(one)}" for one in others])
    text = text or f"no such option: {name}; allowed: {', '.join(known)}"
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: flag[1].replace("-", "_"), text)


def _explained(name: str, known: Sequence[str], others: Sequence[str]) -> str | None:
    plain = _plain(name)
    if plain in known:
        return f"no such option: {name}; did you mean {plain}?"
    owners = dict(_owners(name))
    if owners:
        first = max(owners, key=lambda server: _votes(server, others))  # of several the first in the tables
        servers = " and ".join(f"{server}'s" for server in owners)
        return f"{name} is {servers}; here {owners[first].hint}"
    for near in get_close_matches(plain, known, cutoff=_SIMILAR):
        if not _has_another_word(plain, near):
            return f"no such option: {name}; did you mean {near}?"
    similar = [
        (_votes(server, others), likeness, flag)
        for server, rows in FOREIGN_OPTIONS.items()
        for row in rows
        for flag in row.flags
        if (likeness := _likeness(name, flag))
    ]
    if similar:
        _, _, flag = max(similar, key=lambda found: found[:2])
        return f"no such option: {name}; {_explained(flag, known, others)}"
    return None


def _owners(name: str) -> Iterator[tuple[str, ForeignOption]]:
    """The servers that have this option, and its row."""
    for server, rows in FOREIGN_OPTIONS.items():
        for row in rows:
            if any(_is_same(name, flag) for flag in row.flags):
                yield server, row


def _votes(server: str, others: Sequence[str]) -> int:
    """How many of these options are this server's."""
    return sum(server in dict(_owners(other.partition("=")[0])) for other in others)


def _is_same(name: str, flag: str) -> bool:
    """A setting, which is no flag there (num_ctx, OLLAMA_HOST), is one with dashes before it here."""
    if not flag.startswith("-"):
        name, flag = name.lstrip("-").lower(), flag.lower()
    return _plain(name) == _plain(flag)


def _likeness(name: str, flag: str) -> float:
    """0 unless it may be a typing error: the same words but for one that is similar, or nearly the same in all."""
    one, other = _words(name), _words(flag)
    whole = SequenceMatcher(None, "-".join(one), "-".join(other)).ratio()
    differing = _differing(one, other)
    is_typo = len(differing) == 1 and SequenceMatcher(None, *differing[0]).ratio() >= _SIMILAR
    return whole if is_typo or whole >= _ALMOST else 0.0


def _has_another_word(name: str, flag: str) -> bool:
    """Whether they differ in a whole word. Many options end alike: --ctx-size is not --page-size."""
    one, other = _words(name), _words(flag)
    differing = _differing(one, other)
    return len(one) > 1 and any(SequenceMatcher(None, *pair).ratio() < _SIMILAR for pair in differing)


def _differing(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, str]]:
    """The words that differ, of names with equally many."""
    return [pair for pair in zip(one, other, strict=True) if pair[0] != pair[1]] if len(one) == len(other) else []


def _words(flag: str) -> list[str]:
    return _plain(flag).strip("-").lower().split("-")


def _plain(flag: str) -> str:
    """Replaces _ by -, which some write instead."""
    return flag.replace("_", "-")
