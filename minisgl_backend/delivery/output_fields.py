"""Requested outputs other than text: finish reasons, counts, log-probabilities, metrics of the request.

The engine's front sends them together with the chunk that becomes text: the ensemble puts both into one response.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from minisgl_backend.delivery.arrays import Arrays, floats, ints, texts
from minisgl_backend.delivery.delta import Delta, PerfMetrics
from minisgl_backend.delivery.stream import Stream
from minisgl_backend.request import FinishReason
from minisgl_backend.step import Logprobs
from minisgl_backend.text.vocabulary import Vocabulary


class OutputFieldEncoder:
    """Stateless; called by the stream's sender thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def encode(self, stream: Stream, deltas: Sequence[Delta], *, first: bool, metrics: PerfMetrics | None) -> Arrays:
        """The outputs for these new parts of the stream. `first`: they are in the sequence's first response."""
        options = stream.spec.options
        arrays: Arrays = {}
        if options.finish_reason:
            # vllm_backend's spelling: "None" while the sequence goes on.
            labels = [FinishReason(delta.reason).label if delta.reason else "None" for delta in deltas]
            arrays["finish_reason"] = texts(labels)
        if options.stop_reason:
            arrays["stop_reason"] = texts([str(stream.sequences[delta.index].stop_string) for delta in deltas])
        if options.num_input_tokens:
            arrays["num_input_tokens"] = ints([stream.num_input_tokens])
        if options.num_output_tokens:
            arrays["num_output_tokens"] = ints([delta.num_tokens for delta in deltas])
        if options.cumulative_logprob:
            arrays["cumulative_logprob"] = floats([delta.cumulative_logprob for delta in deltas])
        if options.logprobs:
            entries = [() if options.null_logprobs else delta.logprobs for delta in deltas]
            arrays["logprobs"] = texts([self._logprobs_json(one, options.token_bytes) for one in entries])
        if options.prompt_logprobs and first and deltas[0].index == 0:  # once: all sequences have the same prompt
            arrays["prompt_logprobs"] = texts([self._logprobs_json(stream.prompt_logprobs, options.token_bytes)])
        if options.log_probs:
            _add_log_probs(arrays, stream, deltas)
        if len(deltas) == 1 and (len(stream.sequences) > 1 or options.apart):
            arrays["sequence_index"] = ints([deltas[0].index])
        if options.apart:
            arrays["batch_index"] = ints([0])
        if options.token_ids:
            length = deltas[0].num_tokens + (len(options.prompt_ids) // 4 if first else 0)
            arrays["sequence_length"] = ints([length])
        if metrics is not None:
            _add_metrics(arrays, metrics)
            if options.llmapi:
                _add_llmapi_metrics(arrays, metrics)
        return arrays

    def _logprobs_json(self, entries: Sequence[Logprobs], with_bytes: bool) -> str:
        """vllm_backend's format: for each position {token id: {logprob, rank, decoded_token}}; "null" for none.

        As there, the position's own token comes first, then the most likely ones. `with_bytes`: adds `bytes` where
        `decoded_token` is not whole characters.
        """
        if not entries:
            return "null"
        # Position by position: one call for a long prompt would hold the interpreter's lock and stall all other
        # streams.
        return f"[{', '.join(json.dumps(self._position(entry, with_bytes), ensure_ascii=False) for entry in entries)}]"

    def _position(self, entry: Logprobs, with_bytes: bool) -> dict[str, dict[str, Any]]:
        position = {str(entry.token_id): self._logprob(entry.token_id, entry.logprob, entry.rank, with_bytes)}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top, strict=True), start=1):
            position[str(token_id)] = self._logprob(token_id, logprob, rank, with_bytes)
        return position

    def _logprob(self, token_id: int, logprob: float, rank: int, with_bytes: bool) -> dict[str, Any]:
        # JSON has no infinities: a token that cannot be sampled gets the logarithm of the smallest float instead.
        logprob = max(logprob, -1e4)
        text = self._vocabulary.token_text(token_id)
        found: dict[str, Any] = {"logprob": logprob, "rank": rank, "decoded_token": text}
        if with_bytes and "\N{REPLACEMENT CHARACTER}" in text:
            found["bytes"] = list(self._vocabulary.table(False)[token_id])
        return found


def _add_log_probs(arrays: Arrays, stream: Stream, deltas: Sequence[Delta]) -> None:
    """tensorrtllm_backend's format: all log-probabilities so far, sequences padded to one length."""
    rows = [stream.sequences[delta.index].add_log_probs(delta.logprobs) for delta in deltas]
    longest = max(map(len, rows))
    padded = [[*row, *[0.0] * (longest - len(row))] for row in rows]
    arrays["cum_log_probs"] = floats([delta.cumulative_logprob for delta in deltas])
    arrays["output_log_probs"] = np.asarray([padded], dtype=np.float32).reshape(1, len(rows), longest)


def _add_llmapi_metrics(arrays: Arrays, metrics: PerfMetrics) -> None:
    """The same metrics by TensorRT-LLM's LLM API names."""
    reused, total = min(metrics.reused_pages, metrics.total_pages), metrics.total_pages
    arrays["kv_cache_reused_block"] = ints([reused])
    arrays["kv_cache_missed_block"] = ints([total - reused])
    arrays["kv_cache_hit_rate"] = floats([reused / total if total else 0.0])


def _add_metrics(arrays: Arrays, metrics: PerfMetrics) -> None:
    images = [metrics.image_tokens] if metrics.image_tokens else []
    arrays["num_cached_tokens"] = ints([metrics.cached_tokens, *images])
    reused = min(metrics.reused_pages, metrics.total_pages)
    arrays["kv_cache_reused_blocks"] = ints([reused])
    arrays["kv_cache_alloc_new_blocks"] = ints([metrics.total_pages - reused])
    arrays["kv_cache_alloc_total_blocks"] = ints([metrics.total_pages])
    for name, value in (
        ("arrival_time_ns", metrics.arrival_ns),
        ("first_scheduled_time_ns", metrics.first_scheduled_ns),
        ("first_token_time_ns", metrics.first_token_ns),
        ("last_token_time_ns", metrics.last_token_ns),
    ):
        arrays[name] = np.asarray([[value]], dtype=np.int64)
    drafted, accepted = metrics.draft_tokens, metrics.accepted_draft_tokens
    arrays["total_draft_tokens"], arrays["total_accepted_draft_tokens"] = ints([drafted]), ints([accepted])
    arrays["acceptance_rate"] = floats([accepted / drafted if drafted else 0.0])
