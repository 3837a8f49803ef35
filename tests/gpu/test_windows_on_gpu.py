"""Sliding windows on every attention backend, with graphs and pieces: the engine's tokens judged by transformers.

Models are random, in bfloat16, with distributions as sharp as a trained model's. Rounding may swap two tokens that are
about as likely, so each greedy token is looked up in transformers' float32 logits of the same text: it may be less
likely than the first by a hair only. A window that is off by one, or not there, puts many far behind.
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity_reference import Sequences, save_checkpoint, transformers_logits
from minisgl_backend.attention.base import LayerGroup
from minisgl_backend.attention.mha import BACKENDS
from minisgl_backend.attention.registry import create_attention, import_failure
from minisgl_backend.errors import ConfigError
from tests.gpu.test_attention_backends import Cache, error
from tests.specs import one_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NAMES = ("triton", "fa", "fi", "fa,trtllm", "torch")
WINDOW, LONG_WINDOW = 24, 4096
GAP = 0.6  # of logits with a standard deviation of 3.5

_SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MISTRAL = {**_SHAPE, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_QWEN2 = {**_SHAPE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
SHAPES = {
    "mistral-24": {**_MISTRAL, "sliding_window": WINDOW},
    "mistral-4096": {**_MISTRAL, "sliding_window": LONG_WINDOW, "num_hidden_layers": 2},
    "qwen2-24-above-2": {**_QWEN2, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2-24-above-1": {**_QWEN2, "sliding_window": WINDOW, "max_window_layers": 1},  # three groups with a window
}


def skip_what_is_not_here(names: str) -> None:
    for name in names.split(","):
        package = BACKENDS[name].library.package
        reason = import_failure(package) if package else None
        if reason is not None:
            pytest.skip(f"{package} is not installed: {reason}")
        if name == "trtllm" and torch.cuda.get_device_capability()[0] < 9:
            pytest.skip("trtllm has no kernels for this GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@functools.cache
def prompts_of(lengths: tuple[int, ...]) -> list[list[int]]:
    rng = random.Random(str(lengths))
    shared = [rng.randrange(3, 1024) for _ in range(max(lengths))]
    return [shared[: length // 2] + [rng.randrange(3, 1024) for _ in range(length - length // 2)] for length in lengths]


def gaps(checkpoint: Path, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
    """How much less likely than the first each answered token is, in float32 logits of transformers."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = transformers_logits(checkpoint, Sequences(((*prompt, *answer),), (len(prompt),)), torch.float32)
        lines = logits[len(prompt) - 1 : -1]
        chosen = lines.gather(1, torch.tensor(answer, device=lines.device).unsqueeze(1)).squeeze(1)
        found.append(lines.amax(1) - chosen)
    return torch.cat(found)


def generate(checkpoint: Path, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Greedy, all at once; then again with a warm prefix cache, one after the other."""
    from minisgl_backend import LLM

    settings = {"dtype": "bfloat16", "max_running_requests": 8, "memory_ratio": 0.3, "cuda_graph_max_tokens": 256}
    with LLM(str(checkpoint), **{**settings, **options}) as llm:
        wish = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
        outputs = llm.generate(prompts, **wish)
        for prompt in prompts[-2:]:
            outputs += llm.generate([prompt], **wish)
    return [output.token_ids for output in outputs]


def save(name: str, folder: Path) -> Path:
    from tests.parity.checkpoints import save_tokenizer

    checkpoint = save_checkpoint(name, SHAPES[name], folder)
    if not (checkpoint / "tokenizer.json").is_file():
        save_tokenizer(checkpoint)
    return checkpoint


@pytest.mark.parametrize(
    ("model", "names"),
    [*((model, names) for model in ("mistral-24", "qwen2-24-above-2", "qwen2-24-above-1") for names in NAMES)],
)
def test_a_window_of_24(model: str, names: str, folder: Path) -> None:
    """Prompts shorter than the window, in pieces (to 256 tokens), in chunks and longer than those; decode in graphs."""
    skip_what_is_not_here(names)
    checkpoint, prompts = save(model, folder), prompts_of((5, 24, 25, 150, 700))
    options = {"max_prefill_length": 512, "mixed_prefill_length": 128, "max_seq_len_override": 1024}
    answers = generate(checkpoint, prompts, attention_backend=names, **options)
    found = gaps(checkpoint, prompts + prompts[-2:], answers)
    assert found.max() <= GAP, f"{(found > GAP).sum()} of {len(found)} tokens, the worst by {found.max():.2f}"


@pytest.mark.parametrize("names", NAMES)
def test_a_window_of_4096_at_8000_tokens(names: str, folder: Path) -> None:
    skip_what_is_not_here(names)
    checkpoint, prompts = save("mistral-4096", folder), prompts_of((4090, 8000))
    options = {"max_prefill_length": 3000, "max_seq_len_override": 8192, "cuda_graph_max_tokens": 0}
    answers = generate(checkpoint, prompts, attention_backend=names, **options)
    found = gaps(checkpoint, prompts + prompts[-2:], answers)
    assert found.max() <= GAP, f"{(found > GAP).sum()} of {len(found)} tokens, the worst by {found.max():.2f}"


def test_the_judge_sees_a_window_of_another_size(folder: Path) -> None:
    """What transformers itself would answer with a window of 32 stands out."""
    import json

    checkpoint, (prompt,) = save("mistral-24", folder), prompts_of((300,))
    other = Path(tempfile.mkdtemp(dir=folder)) / "other"
    other.mkdir()
    for path in checkpoint.iterdir():
        (other / path.name).symlink_to(path)
    (other / "config.json").unlink()
    (other / "config.json").write_text(json.dumps({**SHAPES["mistral-24"], "sliding_window": WINDOW + 8}))
    skip_what_is_not_here("triton")
    (answer, *_) = generate(other, [prompt, prompt], attention_backend="triton", max_seq_len_override=1024)
    assert gaps(checkpoint, [prompt], [answer]).max() > GAP


@pytest.mark.parametrize(
    ("name", "window", "chunk"),
    [
        *((name, window, None) for name in ("triton", "fa", "fi", "trtllm") for window in (1, 24, 1000)),
        *(("triton", None, chunk) for chunk in (1, 24, 1000)),
    ],
)
def test_kernels(name: str, window: int | None, chunk: int | None) -> None:
    """Decode eager and captured, and prefill, against the `torch` backend; a group of layers is all that they know."""
    skip_what_is_not_here(name)
    spec = one_group(
        num_q_heads=16, num_kv_heads=8, head_dim=128, page_size=64, max_seq_len=4096, max_rows=33,
        dtype=torch.bfloat16, device="cuda", window=window, chunk=chunk,
    )  # fmt: skip
    assert isinstance(spec.groups[0], LayerGroup)
    torch.manual_seed(window or 0)
    capable = BACKENDS[name].prefill_capability <= 10 * torch.cuda.get_device_capability()[0]
    backend, reference = (
        create_attention(name if capable else "torch", name, spec),
        create_attention("torch", "torch", spec),
    )
    kv_lens = [1, 23, 24, 25, 63, 64, 65, 1000, 1001, 3000]
    cache = Cache(spec, kv_lens)
    inputs = cache.decode_inputs()
    q = torch.randn(len(kv_lens), 16, 128, device="cuda").bfloat16()
    ref = reference.attend(reference.spec.layer(0, cache.kv), q, reference.plan(None, inputs))
    assert error(backend.attend(backend.spec.layer(0, cache.kv), q, backend.plan(None, inputs)), ref) < 1e-2
    backend.allocate_graph(32)
    plan = backend.plan_capture(inputs)
    backend.attend(backend.spec.layer(0, cache.kv), q, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(backend.spec.layer(0, cache.kv), q, plan)
    backend.plan_replay(inputs)
    graph.replay()
    assert error(out, ref) < 1e-2
    if capable:
        q_lens = [1, 23, 2, 1, 63, 20, 65, 700, 1, 300]
        prefill = cache.prefill_inputs(q_lens)
        q = torch.randn(sum(q_lens), 16, 128, device="cuda").bfloat16()
        out, ref = (one.attend(one.spec.layer(0, cache.kv), q, one.plan(prefill, None)) for one in (backend, reference))
        assert error(out, ref) < 1e-2


def test_trtllm_serves_no_prompts_on_hopper(folder: Path) -> None:
    skip_what_is_not_here("trtllm")
    if torch.cuda.get_device_capability()[0] >= 10:
        pytest.skip("it does here")
    with pytest.raises(ConfigError, match="fa,trtllm"):
        generate(save("mistral-24", folder), [[3]], attention_backend="trtllm")
