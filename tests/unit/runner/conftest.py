"""A tiny checkpoint for the runner's tests, its runners, and what transformers says with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runner import CPU, MAX_SEQ_LEN, PROMPTS, VOCAB, MakeRunner, PromptGraphs

from minisgl_backend.attention.base import AttentionSpec
from minisgl_backend.attention.pair import AttentionPair
from minisgl_backend.attention.registry import create_attention
from minisgl_backend.kv.state import StateLayout, StatePool
from minisgl_backend.models.build import attention_spec, build_model
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.runner.graphs.pieces import EagerPieces
from minisgl_backend.runner.graphs.whole import EagerGraphRunner, GraphRunner
from minisgl_backend.runner.model_runner import Captures, ModelRunner
from minisgl_backend.runner.proposers.proposer import DeviceProposer
from minisgl_backend.runner.row_state import RowState
from minisgl_backend.runner.row_table import RowTable
from minisgl_backend.sampling.metadata import SamplingRows
from minisgl_backend.tensor_parallel import TensorParallel
from tests.specs import make_pool


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 checkpoint with random weights, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,  # sharp distributions: greedy choices are not decided by rounding
    )
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture
def make_runner(tiny_model_dir: Path) -> MakeRunner:
    """Makes runners of the tiny checkpoint, or that of `folder`, on the CPU; graphs and pieces are not captured."""

    def make(
        page_size: int = 4,
        max_running: int = 6,
        graph_sizes: tuple[int, ...] = (),
        pieces: tuple[int, ...] = (),
        prompt_graphs: bool = False,
        tp: TensorParallel | None = None,
        graphs: GraphRunner | None = None,
        proposer: DeviceProposer | None = None,
        folder: Path = tiny_model_dir,
        dummy: ModelConfig | None = None,
        most_drafts: int = 0,
    ) -> ModelRunner:
        """`dummy`: a model without a checkpoint."""
        config = dummy or ModelConfig.load(folder)
        load = LoadConfig(dtype=torch.float32, device=CPU, max_seq_len=MAX_SEQ_LEN, dummy_weights=dummy is not None)
        model = build_model(config, folder, load)
        spec = attention_spec(
            config,
            AttentionSpec(
                page_size=page_size, max_seq_len=MAX_SEQ_LEN, max_rows=max_running + 1, dtype=torch.float32, device=CPU
            ),
            tp_size=1,
        )
        table = RowTable(
            max_running=max_running, max_seq_len=MAX_SEQ_LEN, page_size=page_size, device=CPU, columns=spec.columns
        )
        attention = create_attention("torch", "torch", spec)
        if prompt_graphs:
            backends = [PromptGraphs(spec, group) for group in spec.groups]
            attention = AttentionPair(spec, backends, backends)
        return ModelRunner(
            model=model,
            attention=attention,
            pool=make_pool(spec, 600 // page_size),
            rows=RowState.of(table, SamplingRows(table.max_rows, config.vocab_size, (2,), MAX_SEQ_LEN, CPU)),
            tp=tp,
            proposer=proposer,
            states=_states(config, page_size, most_drafts, table.max_rows),
            captures=Captures(
                graphs=EagerGraphRunner(graph_sizes, graph_sizes if most_drafts else ()) if graph_sizes else graphs,
                pieces=EagerPieces(pieces, config.hidden_size) if pieces else None,
            ),
        )

    return make


def _states(config: ModelConfig, page_size: int, most_drafts: int, num_rows: int) -> StatePool | None:
    """All memory is NaN at first."""
    layout = StateLayout.of((layer.mixer.state for layer in config.layers), torch.float32)
    if layout is None:
        return None
    pool = StatePool(
        layout, page_size=page_size, max_drafts=most_drafts, num_slots=40, num_rows=num_rows, device=CPU
    )  # fmt: skip
    for stack in pool.stacks:
        for tensor in stack:
            tensor.fill_(torch.nan)
    return pool


@pytest.fixture(scope="session")
def expected(tiny_model_dir: Path) -> list[list[int]]:
    """Ten greedy tokens for each prompt, by transformers."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers
