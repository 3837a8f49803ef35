"""The user's settings resolved for a given model and machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from minisgl_backend.attention.decode_by_batch import DecodeByBatch
from minisgl_backend.config import EngineConfig
from minisgl_backend.kv.groups import MOST_GROUPS
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.speculative_config import most_decode_entries


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Settings of the draft model of speculative decoding."""

    model_dir: str = field(repr=False)  # repr=False, as for everything that may differ between machines
    model: ModelConfig = field(repr=False)
    prefill_backend: str
    decode_backend: str
    max_seq_len: int  # tokens up to which it proposes


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Resolved settings: nothing is "auto" any more. Made once by `resolve`, then only read."""

    config: EngineConfig
    model_dir: str
    device: str  # "cpu" or "cuda"
    first_device: int = 0  # see EngineConfig.first_device
    dtype: str  # bfloat16, float16 or float32
    kv_dtype: str  # of the KV cache: bfloat16, float16, float32 or float8_e4m3fn
    prefill_backend: str
    decode_backend: str
    decode_by_batch: DecodeByBatch | None = None  # backend of decode steps with few rows; None: decode_backend
    page_size: int
    max_seq_len: int
    max_prefill_length: int
    cuda_graph_max_bs: int | None  # None: chosen from free memory once the weights are loaded
    cuda_graph_max_tokens: int  # 0: steps with prompt tokens run without graphs
    eager_graphs: bool = False  # graphs and pieces are not captured
    flashinfer_tensor_cores: bool | None
    draft: DraftSettings | None = None  # None: no draft model

    @property
    def most_decode_entries(self) -> int:
        """Entries of the largest decode step: rows, and their drafts."""
        return most_decode_entries(self.config.max_running_requests, self.config.speculation)

    @property
    def most_cache_groups(self) -> int:
        """Limit for the model. With a draft model all layers are one group, since both models share pages."""
        return MOST_GROUPS if self.draft is None else 1

    def device_index(self, rank: int) -> int:
        """Index of a tensor-parallel rank's GPU on its machine."""
        return self.first_device + rank % self.config.ranks_per_node

    def shared(self) -> dict[str, str]:
        """Settings that must be the same on all ranks, as text: all except those of one machine."""
        own = ("config", "model_dir", "first_device")
        return {spec.name: str(getattr(self, spec.name)) for spec in dataclasses.fields(self) if spec.name not in own}
