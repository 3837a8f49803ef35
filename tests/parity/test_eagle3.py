"""An EAGLE-3 head against plain torch, and the hidden states that it is given against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.context import AuxStates
from minisgl_backend.layers.embedding import Embedding
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.eagle3 import Eagle3Config
from minisgl_backend.models.eagle3_head import build_eagle3_head
from minisgl_backend.models.load_config import LoadConfig
from minisgl_backend.tensor_parallel import TensorParallel
from tests.eagle3_heads import SIZES, reference_drafts, save_head
from tests.layer_contexts import layer_context
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.paged import PagedModel
from tests.parity.paged_head import PAGE, PagedHead

CPU = torch.device("cpu")
NUM_DRAFTS = 4
HEADS: dict[str, dict[str, Any]] = {
    "published": {},
    "own embedding, every token": {"own_embedding": True, "draft_vocab_size": 320},
    "target of another size": {"own_embedding": True, "target_hidden_size": 48, "num_key_value_heads": 4},
    "norm before residual": {"norm_before_residual": True},
}


def embedding() -> Embedding:
    made = Embedding(
        SIZES["vocab_size"], SIZES["hidden_size"], "embed_tokens", layer_context(torch.float32, TensorParallel.single())
    )
    made.fill_with_noise(torch.Generator().manual_seed(5))
    return made


@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_plain_torch(name: str, tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", **HEADS[name])
    config, shared = Eagle3Config.load(folder), embedding()
    head = build_eagle3_head(
        config, folder, LoadConfig(dtype=torch.float32, device=CPU, max_seq_len=64), embedding=shared
    )
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(23, 3 * config.target_hidden_size, generator=generator)
    token_ids = torch.randint(0, 320, (24,), generator=generator).tolist()
    expected, logits = reference_drafts(folder, states, token_ids, shared.weight.data, NUM_DRAFTS)
    drafts, found = PagedHead(head).drafts(states, token_ids, NUM_DRAFTS)
    assert drafts == expected
    assert (found - logits).abs().max() <= 1e-4 * logits.abs().max()


@pytest.mark.parametrize("layers", [(2, 0, 1), (3, 0)], ids=["given", "behind the final norm"])
def test_hidden_states_that_a_pass_is_asked_for(layers: tuple[int, ...], tmp_path: Path) -> None:
    """In chunks, beside decoding, of all tokens, whatever logits are computed of."""
    save_checkpoint("llama-llama3-tied", tmp_path)
    tokens = list(range(3, 30))
    with torch.inference_mode():
        outputs = reference_model(tmp_path)(torch.tensor([tokens]), output_hidden_states=True)
    expected = torch.cat([outputs.hidden_states[layer][0] for layer in layers], dim=-1)
    paged, found, logits = PagedModel(tmp_path, page_size=PAGE), [], []
    for chunk, decode in ((tokens[:20], {}), (tokens[20:26], {}), ([], {0: tokens[26]})):
        aux = AuxStates(layers=layers, out=torch.full((len(chunk) or 1, len(layers) * 64), torch.nan))
        logits.append(paged.step({0: chunk} if chunk else {}, decode, last_only=True, aux=aux)[0])
        found.append(aux.out)
    for one, other in ((torch.cat(found), expected), (torch.cat(logits), outputs.logits[0, [19, 25, 26]])):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max()


TARGET = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 320, "num_hidden_layers": 12,
    "num_attention_heads": 4, "intermediate_size": 96, "max_position_embeddings": 512, "torch_dtype": "float32",
    "hidden_act": "silu",
}  # fmt: skip
LAYERS = {
    "published": ({}, (2, 6, 9)),
    "as vLLM has them": ({"eagle_aux_hidden_state_layer_ids": [1, 5, 11]}, (1, 5, 11)),
    "as SGLang has them": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}}, (2, 6, 10)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_whose_hidden_states_it_reads(name: str) -> None:
    given, layers = LAYERS[name]
    assert Eagle3Config.from_config({**SIZES, **given}).states_of(ModelConfig.from_dicts(TARGET, {})) == layers


@pytest.mark.parametrize(
    ("changes", "of_target", "named"),
    [
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is 2"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "architectures is"),
        ({"draft_vocab_size": 321}, {}, "draft_vocab_size is 321"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, {}, "eagle_aux_hidden_state_layer_ids is [1, 2]"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 12]}, {}, "[1, 2, 12]; allowed: 0 to 11"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "eagle_config is"),
        ({}, {"hidden_size": 128}, "allowed: 128, the target's hidden_size"),
        ({}, {"vocab_size": 400}, "allowed: 400, the target's vocab_size"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(
    changes: dict[str, Any], of_target: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Eagle3Config.from_config({**SIZES, **changes}).states_of(ModelConfig.from_dicts({**TARGET, **of_target}, {}))
    assert named in str(error.value)
