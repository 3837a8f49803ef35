"""Which backends a machine gets, what is said when a package is missing, and the page size."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minisgl_backend.attention import flash_attn_trial
from minisgl_backend.attention.mha import BACKENDS
from minisgl_backend.attention.needs import AttentionNeeds, Scores
from minisgl_backend.attention.reference import TorchBackend
from minisgl_backend.attention.registry import AttentionChoice, choose_attention, create_attention
from minisgl_backend.errors import ConfigError
from tests.specs import one_group


def without(*packages: str) -> Callable[[str], str | None]:
    return lambda package: "ImportError: libnuma.so.1" if package in packages else None


def choose(
    requested: str, capability: int | None, *missing: str, page_size: int | None = None, **model: Any
) -> AttentionChoice:
    needs = AttentionNeeds(compute_capability=capability, **model)
    return choose_attention(requested, page_size, needs, without(*missing))


@pytest.mark.parametrize(
    ("capability", "missing", "pair"),
    [
        (None, (), ("torch", "torch")),
        (100, (), ("trtllm", "trtllm")),
        (103, (), ("trtllm", "trtllm")),
        (120, (), ("fi", "fi")),
        (90, (), ("fa", "triton")),
        (90, ("sgl_kernel",), ("triton", "triton")),
        (90, ("sgl_kernel", "triton"), ("torch", "torch")),
        (89, (), ("fi", "fi")),
        (80, ("flashinfer",), ("triton", "triton")),
        (75, (), ("triton", "triton")),
    ],
)
def test_automatic_choice(capability: int | None, missing: tuple[str, ...], pair: tuple[str, str]) -> None:
    choice = choose("auto", capability, *missing)
    assert (choice.prefill, choice.decode) == pair
    assert bool(choice.warnings) == bool(missing)


@pytest.mark.parametrize(
    ("requested", "capability", "pair", "page_size"),
    [
        ("auto", None, ("torch", "torch"), 16),
        ("auto", 80, ("triton", "triton"), 64),
        ("auto", 90, ("fa", "flashmla"), 64),
        ("triton,flashmla", 90, ("triton", "flashmla"), 64),
        ("fa", 90, ("fa", "fa"), 64),
    ],
)
def test_backends_of_latents(requested: str, capability: int | None, pair: tuple[str, str], page_size: int) -> None:
    choice = choose(requested, capability, head_dims=(576,), latents=(512, 64))
    assert (choice.prefill, choice.decode, choice.page_size) == (*pair, page_size)


@pytest.mark.parametrize(
    ("requested", "capability", "pair"),
    [
        ("auto", None, ("torch", "torch")),
        ("auto", 80, ("torch", "torch")),
        ("auto", 90, ("fa", "triton")),  # prompts are computed of what latents are expanded to
        ("fa,triton", 90, ("fa", "triton")),
        ("auto", 100, ("triton", "triton")),
    ],
)
def test_backends_of_latents_in_fp8(requested: str, capability: int | None, pair: tuple[str, str]) -> None:
    choice = choose(
        requested, capability, head_dims=(576,), latents=(512, 64), kv_dtype="float8_e4m3fn", num_q_heads=16
    )
    assert (choice.prefill, choice.decode, choice.decode_by_batch) == (*pair, None)


@pytest.mark.parametrize(
    ("requested", "capability", "more", "said"),
    [
        ("trtllm", 90, {}, "trtllm serves no latents (MLA); use triton or torch"),
        ("fa", 100, {}, "no kernels for latents"),
        ("flashmla", 80, {}, "no kernels for latents"),
        ("fi", 90, {"latents": (256, 32)}, "512 + 64 numbers; this model has 256 + 32"),
        ("flashmla", 90, {"latents": None, "head_dims": (128,)}, "only serves latents (MLA)"),
        ("flashmla", 90, {"dtype": "float32"}, "serves float16 and bfloat16"),
        ("fa,flashmla", 90, {"kv_dtype": "float8_e4m3fn"}, "flashmla cannot decode over latents (MLA) in fp8_e4m3"),
        ("triton", 80, {"kv_dtype": "float8_e4m3fn"}, "in fp8_e4m3 on a GPU of compute capability 8.0"),
    ],
)
def test_backends_that_do_not_serve_latents_are_refused(
    requested: str, capability: int, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        choose(requested, capability, **{"head_dims": (576,), "latents": (512, 64), **more})


@pytest.mark.parametrize(
    ("requested", "num_q_heads", "missing", "decode", "few"),
    [
        ("auto", 16, (), "flashmla", "triton"),
        ("auto", 16, ("minisgl_backend.attention.latent.flashmla:answers",), "fa", "triton"),
        ("auto", 16, ("triton",), "flashmla", None),
        ("auto", 128, (), "fa", "triton"),
        ("fa,flashmla", 16, (), "flashmla", None),  # what is named serves all steps
    ],
)
def test_latents_are_decoded_by_heads_and_rows(
    requested: str, num_q_heads: int, missing: tuple[str, ...], decode: str, few: str | None
) -> None:
    choice = choose(requested, 90, *missing, head_dims=(576,), latents=(512, 64), num_q_heads=num_q_heads)
    assert choice.decode == decode
    assert (choice.decode_by_batch and choice.decode_by_batch.backend) == few


def test_flashmla_has_pages_of_64_tokens() -> None:
    choice = choose("triton,flashmla", 90, head_dims=(576,), latents=(512, 64), page_size=16)
    assert choice.page_size == 64
    assert "flashmla" in choice.warnings[0]


def test_the_warning_says_how_to_get_the_better_one() -> None:
    (warning,) = choose("auto", 90, "sgl_kernel").warnings
    assert "pip install sgl-kernel" in warning
    assert "libnuma1" in warning


@pytest.mark.parametrize("capability", [None, 75, 80, 89, 90, 100, 120])
def test_auto_serves_every_head_size_and_score(capability: int | None) -> None:
    """And a backend that is named serves it, or is refused by name before anything is loaded."""
    for size, soft_cap, sinks in itertools.product((64, 80, 96, 128, 192, 256), (False, True), (False, True)):
        model: dict[str, Any] = {"head_dims": (size,), "scores": Scores(soft_cap, sinks), "dtype": "float16"}
        needs = AttentionNeeds(compute_capability=capability, **model)
        for missing in ((), ("sgl_kernel", "flashinfer")):
            choice = choose("auto", capability, *missing, **model)
            for name in (choice.prefill, choice.decode):
                assert BACKENDS[name].refusal(needs) is None
        for name, entry in BACKENDS.items():
            if entry.refusal(needs) is not None:
                with pytest.raises(ConfigError, match=f"attention_backend is '{name}', but {name} "):
                    choose(name, capability, **model)


@pytest.mark.parametrize(
    ("capability", "model", "pair"),
    [
        (100, {"head_dims": (100,)}, ("triton", "triton")),
        (89, {"head_dims": (80,)}, ("triton", "triton")),
        (89, {"dtype": "float32"}, ("triton", "triton")),
        (90, {"dtype": "float32"}, ("triton", "triton")),
        (90, {"head_dims": (100,)}, ("triton", "triton")),
        (90, {"head_dims": (96,)}, ("fa", "triton")),
        (90, {"head_dims": (512,)}, ("torch", "torch")),
        (90, {"head_dims": (256, 512)}, ("torch", "torch")),  # of different layers
        (80, {"head_dims": (64, 96)}, ("triton", "triton")),
        (100, {"head_dims": (256,), "dtype": "float16"}, ("trtllm", "trtllm")),
        (None, {"head_dims": (100,), "dtype": "float32"}, ("torch", "torch")),
        (90, {"kv_dtype": "float8_e4m3fn"}, ("triton", "triton")),  # fa would round the queries too
        (100, {"kv_dtype": "float8_e4m3fn"}, ("fi", "fi")),
        (80, {"kv_dtype": "float8_e4m3fn"}, ("fi", "fi")),
        (75, {"kv_dtype": "float8_e4m3fn", "dtype": "float16"}, ("torch", "torch")),
        (90, {"kv_dtype": "float16"}, ("triton", "triton")),
        (None, {"kv_dtype": "float8_e4m3fn", "dtype": "float32"}, ("torch", "torch")),
    ],
)
def test_the_automatic_choice_serves_the_model(
    capability: int | None, model: dict[str, Any], pair: tuple[str, str]
) -> None:
    choice = choose("auto", capability, **model)
    assert (choice.prefill, choice.decode) == pair
    assert not choice.warnings, "nobody can do anything about it"


@pytest.mark.parametrize(
    ("requested", "model", "words"),
    [
        ("fi", {"head_dims": (100,)}, "fi serves head sizes 64, 128, 256; this model has 100"),
        ("fa,triton", {"head_dims": (100,)}, "fa serves head sizes to 256 divisible by 8; this model has 100"),
        ("fa,triton", {"dtype": "float32"}, "fa serves float16 and bfloat16, not float32"),
        ("triton", {"head_dims": (288,)}, "triton serves head sizes to 256; this model has 288"),
        (
            "fi",
            {"kv_dtype": "float16"},
            "fi serves a KV cache in bfloat16, as the queries are, or fp8_e4m3, not float16",
        ),
    ],
)
def test_a_named_backend_that_cannot_serve_the_model_is_refused(
    requested: str, model: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        choose(requested, 90, **model)


@pytest.mark.parametrize(("requested", "capability"), [("triton", 80), ("trtllm", 100), ("fa,triton", 80)])
def test_an_fp8_cache_is_refused_where_nobody_reads_it(requested: str, capability: int) -> None:
    with pytest.raises(
        ConfigError, match=f"reads no KV cache in fp8_e4m3 on a GPU of compute capability {capability / 10}"
    ):
        choose(requested, capability, kv_dtype="float8_e4m3fn")
    for name in ("triton", "fi", "fa", "fa,trtllm"):
        choose(name, 90, kv_dtype="float8_e4m3fn")


def install_fa(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, flash_attn: str
) -> Callable[[str, str], AttentionChoice]:
    """A package sgl_kernel whose flash_attn module has this text."""
    (folder / "sgl_kernel").mkdir()
    (folder / "sgl_kernel" / "__init__.py").write_text("")
    (folder / "sgl_kernel" / "flash_attn.py").write_text(flash_attn)
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    return lambda requested, dtype: choose_attention(
        requested, None, AttentionNeeds(compute_capability=90, dtype=dtype)
    )


@pytest.mark.parametrize(
    ("flash_attn", "why"),
    [
        ("raise ImportError('Can not import FA3\\nin sgl_kernel')", "ImportError: Can not import FA3 in sgl_kernel"),
        ("def is_fa3_supported(): raise RuntimeError('half a wheel')", "RuntimeError: half a wheel"),
        ("def is_fa3_supported(): return False", r"is_fa3_supported\(\) says no"),
        ("", "ImportError: cannot import name"),
    ],
)
def test_a_package_without_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flash_attn: str, why: str
) -> None:
    """`auto` falls back and says what would help; a named backend is refused in one line."""
    choose_with = install_fa(tmp_path, monkeypatch, flash_attn=flash_attn)
    choice = choose_with("auto", "bfloat16")
    assert (choice.prefill, choice.decode) == ("triton", "triton")
    assert len(choice.warnings) == 1
    with pytest.raises(ConfigError) as caught:
        choose_with("fa,triton", "bfloat16")
    for text in (*choice.warnings, str(caught.value)):
        assert re.search(why, text)
        assert BACKENDS["fa"].library.remedy in text
        assert len(text.splitlines()) == 1
    for name in ("sgl_kernel.flash_attn", "sgl_kernel"):
        sys.modules.pop(name, None)


def test_a_package_with_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_trial, "open_gpu", lambda: None)
    choose_with = install_fa(tmp_path, monkeypatch, flash_attn="def is_fa3_supported(): return True")
    assert choose_with("auto", "bfloat16") == AttentionChoice("fa", "triton", 64, ())
    for name in ("sgl_kernel.flash_attn", "sgl_kernel"):
        sys.modules.pop(name, None)


CALL = """
import torch
def is_fa3_supported(): return True
def flash_attn_with_kvcache(q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal,
                            window_size, num_splits):
"""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("    return torch.zeros_like(q)", ""),
        (
            "    raise TypeError('fwd() takes 30 arguments\\nbut 31')",
            "TypeError: fwd.. takes 30 arguments but 31",
        ),
        ("    raise NotImplementedError('no kernel')", "NotImplementedError: no kernel"),
    ],
)
def test_a_package_whose_first_call_fails_is_left_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    """It can be imported, and says that it has kernels: its Python is that of another version."""
    monkeypatch.setattr(flash_attn_trial, "open_gpu", lambda: torch.device("cpu"))
    choose_with = install_fa(tmp_path, monkeypatch, flash_attn=CALL + body)
    choice = choose_with("auto", "bfloat16")
    assert choice.prefill == ("triton" if why else "fa")
    assert len(choice.warnings) == bool(why)
    for warning in choice.warnings:
        assert re.search(why, warning)
        assert "pip uninstall sgl-kernel sglang-kernel" in warning
        assert BACKENDS["fa"].library.remedy in warning
    for name in ("sgl_kernel.flash_attn", "sgl_kernel"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("requested", "missing", "remedy"),
    [
        ("fa", "sgl_kernel", "pip install sgl-kernel"),
        ("fa,fi", "flashinfer", "pip install flashinfer-python"),
        ("fa,trtllm", "flashinfer", "pip install flashinfer-python"),
    ],
)
def test_a_named_backend_without_its_package_is_an_error(requested: str, missing: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        choose(requested, 90, missing)


def test_trtllm_without_a_prefill_kernel_names_a_hybrid() -> None:
    with pytest.raises(ConfigError, match=r"no prefill kernel.*fa,trtllm"):
        choose("trtllm", 90)
    assert choose("fa,trtllm", 90).decode == "trtllm"


@pytest.mark.parametrize("requested", ["fa", "torch,triton", "fi"])
def test_gpu_backends_are_refused_on_cpu(requested: str) -> None:
    with pytest.raises(ConfigError, match="allowed on CPU: torch"):
        choose(requested, None)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match="attention_backend is 'fast'"):
        choose("fast", 90)


@pytest.mark.parametrize(
    ("requested", "wanted", "size", "warned"),
    [
        ("torch", None, 16, False),
        ("fa,fi", None, 64, False),
        ("fa,fi", 1, 1, False),
        ("trtllm", None, 64, False),
        ("trtllm", 32, 32, False),
        ("trtllm", 1, 64, True),
        ("fa,trtllm", 128, 64, True),
        ("trtllm,torch", None, 16, False),
        ("trtllm,fi", 8, 64, True),
    ],
)
def test_page_size(requested: str, wanted: int | None, size: int, warned: bool) -> None:
    choice = choose(requested, 100, page_size=wanted)
    assert choice.page_size == size
    assert bool(choice.warnings) == warned


def test_one_object_serves_both_parts() -> None:
    spec = one_group(num_q_heads=2, num_kv_heads=1, head_dim=8, page_size=16, max_seq_len=64, max_rows=2)
    attention = create_attention("torch", "torch", spec)
    (prefill,), (decode,) = attention.backends
    assert isinstance(prefill, TorchBackend)
    assert decode is prefill


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with FlashInfer and without anything that compiles: the folder of its programs."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "FLASHINFER_NVCC"):
        monkeypatch.delenv(name, raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    for package in ("flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    return programs


def install(folder: Path, *programs: str) -> None:
    folder.mkdir(exist_ok=True)
    for program in programs:
        (folder / program).touch(mode=0o755)


@pytest.mark.parametrize(
    ("programs", "lacks"), [(["c++", "ninja"], "nvcc"), (["nvcc", "ninja"], "c++"), (["nvcc", "c++"], "ninja")]
)
def test_flashinfer_is_left_where_its_kernels_cannot_be_compiled(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch, programs: list[str], lacks: str
) -> None:
    """The start ended in its compiler's error."""
    install(bare_machine, *programs)
    if lacks == "nvcc":
        monkeypatch.setenv("CUDA_HOME", str(bare_machine / "nowhere"))
    choice = choose_attention("auto", None, AttentionNeeds(compute_capability=80))
    assert (choice.prefill, choice.decode) == ("triton", "triton")
    assert re.search(rf"there is no \S*{re.escape(lacks)}\).*CUDA toolkit.*flashinfer-jit-cache", choice.warnings[0])
    with pytest.raises(ConfigError, match=rf"'fi', but fi needs kernels .* there is no \S*{re.escape(lacks)}\)"):
        choose_attention("fi", None, AttentionNeeds(compute_capability=80))


@pytest.mark.parametrize("where", ["there", "beside Python", "compiled before", "built by others", "by variables"])
def test_flashinfer_serves_where_its_kernels_can_be_had(
    bare_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    if where == "there":
        install(bare_machine, "nvcc", "c++", "ninja")
    elif where == "beside Python":  # its environment is not activated
        install(bare_machine, "nvcc", "c++")
        install(tmp_path / "venv", "ninja")
    elif where == "compiled before":
        kernels = tmp_path / ".cache" / "flashinfer" / "0.6.8" / "90a"
        kernels.mkdir(parents=True)
        (kernels / "decode.so").touch()
    elif where == "built by others":
        (tmp_path / "flashinfer_jit_cache.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    else:
        install(tmp_path / "cuda", "compiler")
        install(bare_machine, "ninja", "clang++")
        monkeypatch.setenv("FLASHINFER_NVCC", str(tmp_path / "cuda" / "compiler"))
        monkeypatch.setenv("CXX", "clang++ -v")
    choice = choose_attention("auto", None, AttentionNeeds(compute_capability=80))
    assert (choice.prefill, choice.decode, choice.warnings) == ("fi", "fi", ())
    if where == "beside Python":
        assert shutil.which("ninja") == str(tmp_path / "venv" / "ninja")


@pytest.mark.parametrize(
    ("capability", "scores", "missing", "pair"),
    [
        (None, Scores(soft_cap=True, sinks=True), (), ("torch", "torch")),
        (90, Scores(soft_cap=True), (), ("fa", "triton")),
        (90, Scores(sinks=True), (), ("fa", "triton")),
        (90, Scores(sinks=True), ("minisgl_backend.attention.flash_attn:serves_sinks",), ("triton", "triton")),
        (90, Scores(), ("minisgl_backend.attention.flash_attn:serves_sinks",), ("fa", "triton")),
        (100, Scores(soft_cap=True), (), ("fi", "fi")),
        (100, Scores(sinks=True), (), ("triton", "triton")),
        (80, Scores(sinks=True), (), ("triton", "triton")),
        (None, Scores(chunks=True), (), ("torch", "torch")),
        (90, Scores(chunks=True), (), ("triton", "triton")),
        (100, Scores(chunks=True), (), ("triton", "triton")),
    ],
)
def test_auto_serves_soft_caps_and_sinks(
    capability: int | None, scores: Scores, missing: tuple[str, ...], pair: tuple[str, str]
) -> None:
    choice = choose("auto", capability, *missing, scores=scores)
    assert (choice.prefill, choice.decode) == pair
    assert len(choice.warnings) == (len(missing) if scores.sinks else 0)


@pytest.mark.parametrize(
    ("name", "scores", "said"),
    [
        ("trtllm", Scores(soft_cap=True), "trtllm computes no soft cap"),
        ("fa,triton", Scores(chunks=True), "fa serves no attention in chunks"),
        ("fi,triton", Scores(sinks=True), "fi computes no attention sinks"),
        ("fa", Scores(sinks=True), "fa needs kernels with attention sinks"),
    ],
)
def test_backends_without_soft_caps_or_sinks_are_refused_by_name(name: str, scores: Scores, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose(name, 100, "minisgl_backend.attention.flash_attn:serves_sinks", scores=scores)


def test_a_backend_is_not_created_for_scores_that_it_does_not_compute() -> None:
    spec = one_group(
        num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=64, max_seq_len=128, max_rows=3,
        dtype=torch.bfloat16, sinks=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="fi computes no attention sinks"):
        create_attention("fi", "fi", spec)
