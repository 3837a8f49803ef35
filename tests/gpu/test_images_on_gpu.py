"""Images on a GPU: encoders against the CPU, whole engines on every attention backend against transformers."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.driver import Driver
from minisgl_backend.attention.mha import BACKENDS
from minisgl_backend.encoder_limits import num_parts
from minisgl_backend.encoders.attention import Segments, rotate
from minisgl_backend.encoders.base import Encoder
from minisgl_backend.encoders.build import build_encoder
from minisgl_backend.errors import ConfigError
from minisgl_backend.layers.encoder_config import QwenVisionConfig
from minisgl_backend.models.config import ModelConfig
from tests.gpu.test_windows_on_gpu import skip_what_is_not_here
from tests.parity.checkpoints import save_tokenizer
from tests.parity.seeing import Image, reference, seeing
from tests.parity.vision_checkpoints import FAMILIES, TOWERS, pixels, save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

GPU, CPU = torch.device("cuda"), torch.device("cpu")
NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", *TOWERS)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert bool(found.isfinite().all())
    return ((found.double().cpu() - expected.double()).norm() / expected.double().norm()).item()


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_encoders_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    config = ModelConfig.load(tmp_path)
    assert config.encoder is not None

    def built(device: torch.device, dtype: torch.dtype) -> Encoder:
        assert config.encoder is not None
        return build_encoder(config.encoder, tmp_path, device=device, dtype=dtype, model=name)

    plain = 1e-3 if name in TOWERS else 1e-4  # convolutions of float32 multiply in TF32, as torch has them
    for dtype, bound in ((torch.float32, plain), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)):
        # Transformers' towers of Idefics3 and SmolVLM choose learned positions by numbers of the model's own precision.
        exact, tried = built(CPU, dtype if name in TOWERS else torch.float32), built(GPU, dtype)
        for size in FAMILIES[name].sizes:
            image, grid = pixels(*size), FAMILIES[name].grid(*size)
            found = tried.encode(image.to(GPU), grid)
            assert error(found, exact.encode(image, grid)) < bound, (size, dtype)


@torch.inference_mode()
@pytest.mark.parametrize(("head_dim", "generation"), [(72, "3"), (80, "2.5")])
def test_an_encoder_of_real_head_sizes(head_dim: int, generation: str, tmp_path: Path) -> None:
    """With windows that an image cuts off, and an MLP of a size that GEMMs cannot read 16 bytes at once of."""
    name = {"3": "qwen3_vl", "2.5": "qwen2_5_vl"}[generation]
    save(name, tmp_path)
    read = ModelConfig.load(tmp_path).encoder
    assert isinstance(read, QwenVisionConfig)
    config = replace(read, hidden_size=4 * head_dim, num_heads=4, intermediate_size=500, patch_size=14)
    config = replace(config, window=8 if generation == "2.5" else None)

    def built(device: torch.device, dtype: torch.dtype) -> Encoder:
        return build_encoder(config, tmp_path, device=device, dtype=dtype, model=name, dummy_weights=True)

    exact = built(CPU, torch.float32)
    bounds = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
    encoders = {dtype: built(GPU, dtype) for dtype in bounds}
    for encoder in encoders.values():
        encoder.load_state_dict(exact.state_dict())
    for rows, columns in ((20, 34), (2, 2), (40, 34), (70, 64)):
        for seed in range(3 if rows < 70 else 1):  # captured when a shape comes again, up to a size
            image, grid = pixels(14 * rows, 14 * columns, seed=seed), (1, rows, columns)
            expected = exact.encode(image, grid)
            for dtype, bound in bounds.items():
                encoder = encoders[dtype]
                found = encoder.encode(image.to(GPU), grid)
                assert error(found, expected) < bound, (rows, columns, dtype, seed)
                state = encoder.begin(image.to(GPU), grid)
                units = encoder.config.num_layers * num_parts(rows * columns, encoder.config.part_patches)
                for first in range(0, units, 2):
                    encoder.run(state, first, min(units, first + 2))
                assert error(encoder.finish(state), found.cpu()) < bound
    captured = encoders[torch.bfloat16]._graphs._seen.values()  # type: ignore[union-attr, operator]
    assert [one is not None for one in captured] == [True] * 3


@torch.inference_mode()
def test_images_encoded_together(tmp_path: Path) -> None:
    save("qwen2_5_vl", tmp_path)
    config = ModelConfig.load(tmp_path)
    assert config.encoder is not None
    encoder = build_encoder(config.encoder, tmp_path, device=GPU, dtype=torch.bfloat16, model="qwen2_5_vl")
    family = FAMILIES["qwen2_5_vl"]
    for seed in range(3):
        images = [(pixels(*size, seed=seed).to(GPU), family.grid(*size)) for size in (*family.sizes, family.sizes[0])]
        for found, one in zip(encoder.encode_all(images), images, strict=True):
            assert error(found, encoder.encode(*one).cpu()) < 3e-2


@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 88, 96, 128])
@pytest.mark.parametrize("lengths", [[64] * 9 + [12, 3, 1], [700, 1, 129], [5000], [9100]])
def test_attention_within_segments(head_dim: int, lengths: list[int]) -> None:
    torch.manual_seed(head_dim)
    qkv = torch.randn(sum(lengths), 3, 4, head_dim, dtype=torch.bfloat16, device=GPU)
    angles = torch.randn(len(qkv), head_dim // 2, device=GPU)
    exact = qkv.float()
    rotate(exact, angles.cos(), angles.sin())
    from minisgl_backend.kernels.attention import segments

    segments.rotate(qkv, angles.cos(), angles.sin())
    assert error(qkv, exact.cpu()) < 3e-3
    attention = Segments(lengths, GPU, part=1024, fused=True)
    found = attention.attend(qkv, 0, len(qkv))
    parts = [one.permute(1, 2, 0, 3) for one in qkv.float().split(lengths)]
    expected = torch.cat([F.scaled_dot_product_attention(*one).transpose(0, 1).flatten(1) for one in parts])
    assert error(found, expected.cpu()) < 5e-3
    if len(qkv) > 2048:  # of long segments by two programs for each query, where these would be few
        assert error(attention.attend(qkv, 1024, 2048), expected[1024:2048].cpu()) < 5e-3


BACKENDS_TRIED = ("triton", "torch", "fa", "fi", "fa,triton", "triton,fi")
TEXT = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("names", BACKENDS_TRIED)
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_an_engine_on_every_backend(name: str, names: str, tmp_path: Path) -> None:
    """Whole, in chunks, cached, beside text, with captured steps and without: as transformers in float32."""
    skip_what_is_not_here(names)
    model = save(name, tmp_path, **TEXT)
    save_tokenizer(tmp_path)
    size = FAMILIES[name].sizes[0]
    first, second = Image(pixels(*size)), Image(pixels(*size, seed=3))
    prompts: list[list[int | Image]] = [[5, 6, 7, first, 8, 9, second, 10, 11], [7, 8, 9, 10, 11, 12]]
    prompts.append([5, 6, 7, second, 8, 9, first, 10, 11])
    expected = [reference(name, model, prompt) for prompt in prompts]
    served = [BACKENDS[one].half_only for one in names.split(",")]
    dtype, bound = ("bfloat16", 0.08) if any(served) else ("float32", 1e-3)
    options: dict[str, Any] = {"dtype": dtype, "attention_backend": names, "page_size": 16, "max_seq_len_override": 256}
    if name == "gemma3" and names.split(",")[0] == "fi":
        with pytest.raises(ConfigError, match="tokens see each other"), seeing(name, tmp_path, **options):
            pass
        return
    for more in (dict[str, Any](), {"max_prefill_length": 7}, {"cuda_graph_max_bs": 0, "cuda_graph_max_tokens": 0}):
        with seeing(name, tmp_path, **options, **more) as engine:
            for _ in range(2):
                found = engine.ask(*(engine.request(prompt) for prompt in prompts))
                for said, wanted in zip(found, expected, strict=True):
                    same = next(
                        (
                            k
                            for k, pair in enumerate(zip(said.tokens, wanted.tokens, strict=True))
                            if len(set(pair)) > 1
                        ),
                        5,
                    )
                    # Rounding may choose another of two tokens that are about as likely; what follows is another text.
                    assert same == 5 or dtype != "float32"
                    count = min(same + 1, 5)
                    np.testing.assert_allclose(said.logprobs[:count], wanted.logprobs[:count], atol=bound)


def kernels_of(folder: Path) -> Counter[str]:
    """What steps of text launch on the card: a prompt, then tokens."""
    driver = Driver(folder, dtype="bfloat16", num_pages=200, page_size=16, max_running_requests=8)
    for _ in range(2):  # the second time everything is compiled
        driver.clear()
        driver.submit([7] * 40, 20)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            driver.run()
            torch.cuda.synchronize()
    driver.close()
    names = [one.name for one in profiler.events() if one.device_type == torch.autograd.DeviceType.CUDA]
    # What copies within the card depends on addresses.
    return Counter("copy" if name.startswith(("Memcpy DtoD", "memcpy")) else name for name in names)


def test_text_launches_what_a_text_model_does(tmp_path: Path) -> None:
    seeing_folder, text_folder = tmp_path / "seeing", tmp_path / "text"
    save("qwen3_vl", seeing_folder, **TEXT)
    text_folder.mkdir()
    config = json.loads((seeing_folder / "config.json").read_text())["text_config"]
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 10000.0}
    for name in ("rope_parameters", "rope_scaling"):
        config.pop(name, None)
    (text_folder / "config.json").write_text(json.dumps(config))
    for folder in (seeing_folder, text_folder):
        save_tokenizer(folder)
    assert kernels_of(seeing_folder) == kernels_of(text_folder)
