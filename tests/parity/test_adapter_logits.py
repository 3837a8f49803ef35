"""Logits with adapters equal those of transformers with the adapter in its weights, and PEFT's for every variant."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl_backend.adapters import slots as slots_module
from minisgl_backend.adapters.merge import MergedCheckpoint
from minisgl_backend.adapters.slots import AdapterSlots
from minisgl_backend.adapters.tensors import AdapterTensors
from minisgl_backend.errors import ConfigError
from minisgl_backend.kernels.lora.reference import LoraFactors, LoraKernels
from tests.adapter_folders import factors, merge, save_adapter, save_for
from tests.parity.checkpoints import reference_model, save_checkpoint
from tests.parity.paged import PagedModel

PROMPTS = {0: [5, 9, 77, 3, 8], 1: [11] * 7, 2: list(range(40, 51)), 3: [2, 3]}
PROJECTIONS = r"\.((q|k|v|o|qkv|gate|up|down|gate_up|q_a|q_b)_proj|kv_a_proj_with_mqa|in_proj_(qkv|z|a|b)|out_proj)$"
FAMILIES = {
    "qwen3-tied-sharded": PROJECTIONS,
    "phi3": PROJECTIONS,  # q, k and v in one tensor, as gate and up are
    "cohere": PROJECTIONS,  # attention and MLP in parallel
    "gemma3": PROJECTIONS,  # norms behind sublayers
    "gpt_oss": PROJECTIONS,  # a mixture: attention alone
    "qwen2_moe": r"self_attn|shared_expert\.",
    "deepseek_v3": r"self_attn\.(?!kv_b)|shared_experts",  # latents
    "qwen3_5": PROJECTIONS,  # states
}
VARIANTS: dict[str, dict[str, Any]] = {
    "all-linear": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\..*": 2},
        "alpha_pattern": {"down_proj": 3, "layers.0.self_attn.o_proj": 1},
    },
    "rslora-with-a-pattern": {"use_rslora": True, "rank_pattern": {"^model.layers.0.self_attn.q_proj": 3}},
    "keys-and-values": {"target_modules": ["k_proj", "v_proj"]},
    "one-layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "regular-expression": {"target_modules": r".*\.[12]\.self_attn\.(q|o)_proj"},
    "excluded": {"exclude_modules": ["q_proj"]},
    "rank-1": {"r": 1, "lora_alpha": 0.5},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"], "rank_pattern": {"embed_tokens": 7}},
    "embedding-rslora": {"base": "llama", "target_modules": ["embed_tokens"], "use_rslora": True},
    "scaled-embedding": {"base": "gemma3", "target_modules": ["embed_tokens", "v_proj"]},
    "multiplied-embedding": {"base": "granite", "target_modules": ["embed_tokens", "lm_head"]},
    "output-projection": {"base": "llama", "target_modules": ["lm_head", "o_proj"]},
    "tied-output-projection": {"target_modules": ["lm_head"]},
    "short-convolutions": {"base": "lfm2", "target_modules": ["in_proj", "out_proj", "q_proj", "w1", "w2"]},
    "states": {"base": "qwen3_5", "target_modules": ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]},
    "latents": {"base": "deepseek_v3", "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
}


def with_adapters(paged: PagedModel, folders: Sequence[Path], num_slots: int = 3) -> AdapterSlots:
    """In slots 1, 2 ..."""
    names, read = paged.model.config.tensor_names, {folder.name: AdapterTensors.read(folder) for folder in folders}
    return AdapterSlots(paged.model, names, read, num_slots, dtype=torch.float32, device=torch.device("cpu"))


def logits(paged: PagedModel, prompts: dict[int, list[int]], slots: Sequence[int]) -> dict[int, torch.Tensor]:
    counts = torch.tensor([len(prompt) for prompt in prompts.values()])
    by_row = torch.tensor(slots, dtype=torch.int32).repeat_interleave(counts)
    return paged.step(prompts, {}, change=lambda tokens: tokens._replace(by_row=by_row))


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_a_mixed_batch_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path / "base")
    base = reference_model(tmp_path / "base")
    first = save_for(tmp_path / "first", base, FAMILIES[name])
    second = save_for(tmp_path / "second", base, r"(o_proj|out_proj)$", rank=7, seed=2, use_rslora=True)
    paged = PagedModel(tmp_path / "base", page_size=4, max_rows=12)
    with_adapters(paged, [first, second])
    slots = [1, 0, 2, 1]
    found = logits(paged, PROMPTS, slots)
    merged = {0: base, 1: reference_model(tmp_path / "base"), 2: reference_model(tmp_path / "base")}
    merge(merged[1], first)
    merge(merged[2], second)
    for (row, prompt), slot in zip(PROMPTS.items(), slots, strict=True):
        with torch.no_grad():
            expected = merged[slot](torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)
        alone = logits(paged, {row + 4: prompt}, [slot])[row + 4]
        torch.testing.assert_close(found[row], alone, rtol=1e-5, atol=1e-5)


MERGED: dict[str, dict[str, Any]] = {
    "plain": {"rank_pattern": {"down_proj": 7}},
    "dora": {"use_dora": True},
    "rsdora-with-patterns": {"use_dora": True, "use_rslora": True, "alpha_pattern": {"q_proj": 3}},
    "fused": {"base": "phi3", "use_dora": True},
    "untied": {"base": "llama", "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "latents": {"base": "deepseek_v3", "target_modules": ["kv_b_proj", "q_a_proj", "o_proj"], "use_dora": True},
    "states": {"base": "qwen3_5", "target_modules": ["in_proj_qkv", "in_proj_a", "out_proj", "down_proj"]},
}


def peft_model(folder: Path, base: str = "qwen3-tied-sharded", **options: Any) -> Any:
    """A checkpoint in folder/base with an adapter by PEFT in folder/adapter, neither of them trivial; the model of
    transformers with it."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    save_checkpoint(base, folder / "base")
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **options}
    model = peft.get_peft_model(reference_model(folder / "base"), peft.LoraConfig(**options)).eval()
    torch.manual_seed(len(str(options)))
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)
        elif "lora_" in name:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder / "adapter")
    return model


@torch.no_grad()
def assert_as(found: torch.Tensor, model: Any, prompt: list[int]) -> None:
    torch.testing.assert_close(found, model(torch.tensor([prompt])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_peft(variant: str, tmp_path: Path) -> None:
    model = peft_model(tmp_path, **VARIANTS[variant])
    paged = PagedModel(tmp_path / "base", page_size=4)
    with_adapters(paged, [tmp_path / "adapter"])
    assert_as(logits(paged, {0: PROMPTS[2]}, [1])[0], model, PROMPTS[2])


@pytest.mark.parametrize("variant", MERGED)
def test_a_merged_adapter_is_pefts(variant: str, tmp_path: Path) -> None:
    model = peft_model(tmp_path, **MERGED[variant])
    adapter = AdapterTensors.read(tmp_path / "adapter", merged=True)
    paged = PagedModel(tmp_path / "base", page_size=4, merge=partial(MergedCheckpoint, adapter))
    assert_as(paged.step({0: PROMPTS[2]}, {})[0], model, PROMPTS[2])


def test_an_adapter_of_experts_is_merged(tmp_path: Path) -> None:
    save_checkpoint("qwen2_moe", tmp_path / "base")
    base = reference_model(tmp_path / "base")
    tensors: dict[str, torch.Tensor] = {}
    for prefix, experts in base.named_modules():
        if not prefix.endswith("mlp.experts"):
            continue
        size = experts.down_proj.shape[2]
        for expert in range(0, len(experts.down_proj), 2):
            for name, into in {
                "gate_proj": experts.gate_up_proj.data[expert, :size],
                "up_proj": experts.gate_up_proj.data[expert, size:],
                "down_proj": experts.down_proj.data[expert],
            }.items():
                given = factors(f"{prefix}.{expert}.{name}", into.shape[1], len(into))
                a, b = given.values()
                into += 2 * (b @ a)
                tensors |= given
    folder = save_adapter(tmp_path / "adapter", tensors)
    with pytest.raises(ConfigError, match=r"of a mixture's experts, whose adapters are merged alone"):
        AdapterTensors.read(folder)
    merge_into = partial(MergedCheckpoint, AdapterTensors.read(folder, merged=True))
    paged = PagedModel(tmp_path / "base", page_size=4, merge=merge_into)
    assert_as(paged.step({0: PROMPTS[2]}, {})[0], base, PROMPTS[2])


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    save_checkpoint("qwen3-tied-sharded", tmp_path / "base")
    embedding = {
        "model.embed_tokens.lora_embedding_A": torch.ones(4, 9),
        "model.embed_tokens.lora_embedding_B": torch.ones(8, 4),
    }
    q = "model.layers.0.self_attn.q_proj"
    wrong = {
        "is also the output projection's weight": embedding,
        "the checkpoint has no lm_head.weight": factors("lm_head"),
        r"the checkpoint has no model\.layers\.9\.mlp\.up_proj.weight": factors("model.layers.9.mlp.up_proj"),
        "the adapter's has 6 outputs and 8 inputs": factors(q),
        "lora_magnitude_vector; allowed: one of each": {**factors(q), f"{q}.lora_magnitude_vector": torch.ones(6)},
    }
    for words, tensors in wrong.items():
        folder = save_adapter(tmp_path / "adapter", tensors)
        with pytest.raises(ConfigError, match=words):
            PagedModel(
                tmp_path / "base",
                page_size=4,
                merge=partial(MergedCheckpoint, AdapterTensors.read(folder, merged=True)),
            )


def test_a_slot_is_filled_anew_and_unused_ones_are_not_read(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "base")
    base = reference_model(tmp_path / "base")
    folders = [save_for(tmp_path / str(seed), base, PROJECTIONS, seed=seed) for seed in (1, 2)]
    folders.append(save_for(tmp_path / "few", base, "q_proj", rank=2))
    paged = PagedModel(tmp_path / "base", page_size=4)
    slots = with_adapters(paged, folders)
    expected = logits(paged, {0: PROMPTS[0]}, [3])[0]
    slots.load(1, 2)
    for layer in paged.model.modules():
        if getattr(layer, "lora", None) is not None:
            layer.lora.factors.a[1].fill_(torch.nan)
    assert torch.equal(logits(paged, {1: PROMPTS[0]}, [1])[1], expected)


def test_kernels_are_launched_once_for_each_layout_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, int, tuple[int, ...]]] = []

    class Noting(LoraKernels):
        rank_multiple, row_counts = 16, (1, 512)

        def add(self, out: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, factors: LoraFactors) -> None:
            launched.append((*x.shape, factors.ends))
            super().add(out, x, slots, factors)

    monkeypatch.setattr(slots_module, "choose_lora", lambda device, dtype: Noting())
    save_checkpoint("llama", tmp_path / "base")
    adapter = save_for(tmp_path / "adapter", reference_model(tmp_path / "base"), PROJECTIONS)
    with_adapters(PagedModel(tmp_path / "base", page_size=4), [adapter])
    counts = [count for count, _, _ in launched]
    assert (counts, len(set(launched))) == ([1] * 4 + [512] * 4, len(launched))


def test_a_weight_of_the_base_may_be_there(tmp_path: Path) -> None:
    """As PEFT saves it beside an adapter of the output projection."""
    save_checkpoint("phi3", tmp_path / "base")
    base = reference_model(tmp_path / "base")
    paged = PagedModel(tmp_path / "base", page_size=4)
    for module in ("lm_head", "model.layers.1.self_attn.qkv_proj"):
        weight = base.get_submodule(module).weight.detach().clone()
        given = factors(module, weight.shape[1], len(weight))
        for name, changed in {
            "": weight,
            "is the base's": weight.half().float() * 1.5,
            "tokens were": weight[1:],
        }.items():
            folder = save_adapter(tmp_path / "adapter", {**given, f"{module}.base_layer.weight": changed.contiguous()})
            if name:
                with pytest.raises(ConfigError, match=r"differs from this model's|tokens were added"):
                    with_adapters(paged, [folder])
            else:
                with_adapters(paged, [folder])


def test_modules_of_another_base_are_refused(tmp_path: Path) -> None:
    save_checkpoint("llama", tmp_path / "base")
    paged = PagedModel(tmp_path / "base", page_size=4)
    wrong = {
        "is of another base": factors("model.layers.0.self_attn.q_proj"),
        r"layers\.99\.self_attn\.q_proj is no linear layer": factors("model.layers.99.self_attn.q_proj"),
        r"model\.visual\.blocks\.0\.attn\.qkv is no linear layer": factors("model.visual.blocks.0.attn.qkv"),
        "allowed: down_proj, embed_tokens, gate_proj": factors("model.layers.0.mlp.gate"),
    }
    for words, tensors in wrong.items():
        with pytest.raises(ConfigError, match=words):
            with_adapters(paged, [save_adapter(tmp_path / "wrong", tensors)])
