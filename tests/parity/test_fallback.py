"""Types of transformers that run through its own code: logits of tiny random checkpoints against transformers, float32.

Prompts cross chunks, pages and windows (24 tokens), one continues from a cached prefix, decode runs beside prefill.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minisgl_backend import LLM
from minisgl_backend.errors import ConfigError
from minisgl_backend.images.families import why_blind
from minisgl_backend.models.choose import load_model_config
from tests.parity.checkpoints import save_tokenizer
from tests.parity.decoder_types import SERVED, VOCAB_SIZE, save_type, small_config
from tests.parity.paged import PagedModel

TOLERANCE = 1e-4  # of the largest logit
IN_FIVE_GROUPS = "gemma3n_text"  # of cache, so that a page holds a layer: a sequence of these tests takes 23 of them
# Learned positions; values narrower than keys; sinks and windows; multipliers, parallel blocks and NoPE layers; soft
# caps, natively served; two attentions a layer; layers that differ in their keys and values, and share them.
EVERY_RUN = ("gpt2", "deepseek_v3", "gpt_oss", "cohere2", "gemma2", "diffllama", "gemma4_text")


class Reference:
    """A checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        model_class: Any = transformers.AutoModelForCausalLM
        self.model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab_size]."""
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0].float()
        return logits

    def check(self, logits: torch.Tensor, tokens: list[int]) -> None:
        """`logits` are those of the last of `tokens`."""
        expected = self.logits(tokens)[-len(logits) :]
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


def _tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB_SIZE) for _ in range(count)]


_LONG = [1.0 + index / 4 for index in range(8)]
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0 + index / 16 for index in range(8)],
    "long_factor": _LONG,
    "short_mscale": 1.25,
    "long_mscale": 1.5,
}
# Changes of the small config, as released models have them: PhiMoE's LongRoPE; OPT 350M, whose hidden states at the end
# have another size; a rope whose frequencies transformers chooses in each pass.
RELEASED: list[tuple[str, dict[str, Any]]] = [
    ("phimoe", {"rope_parameters": _LONGROPE, "max_position_embeddings": 2048}),
    ("opt", {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("phi", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}}),
]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        *[pytest.param(name, {}, marks=[] if name in EVERY_RUN else [pytest.mark.full]) for name in sorted(SERVED)],
        *RELEASED,
    ],
)
def test_logits(model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    save_type(model_type, tmp_path, **changes)
    reference = Reference(tmp_path)
    paged = PagedModel(tmp_path, page_size=16, model_impl="transformers")
    prompts = {1: _tokens(100, 4), 2: _tokens(60, 5)}
    for begin, end in ((0, 33), (33, 34), (34, 60), (60, 100)):  # chunks
        chunks = {row: tokens[begin:end] for row, tokens in prompts.items() if begin < len(tokens)}
        for row, logits in paged.step(chunks, {}).items():
            reference.check(logits, prompts[row][:end])
    paged.share_prefix(1, 4, num_pages=4)
    steps: list[tuple[dict[int, list[int]], dict[int, int]]] = [
        ({4: _tokens(30, 6)}, {1: 7, 2: 8}),  # a cached prefix beside decode
        ({}, {4: 9, 1: 10, 2: 11}),
    ]
    for prefill, decode in steps:
        for row, logits in paged.step(prefill, decode).items():
            reference.check(logits, paged.tokens[row])


@pytest.mark.parametrize(("model_type", "factor"), [("phimoe", 1.5), ("phi", 1.0)])
def test_rope_is_that_of_the_longest_sequence(model_type: str, factor: float, tmp_path: Path) -> None:
    """Beyond the original context as well; transformers chooses it in each pass, or not at all (phimoe)."""
    changes = dict(RELEASED)[model_type]
    save_type(model_type, tmp_path, **changes)
    paged = PagedModel(tmp_path, page_size=16, model_impl="transformers", max_seq_len=1024)
    rope = next(module for module in paged.model.modules() if hasattr(module, "inv_freq"))
    rope_type, config = changes["rope_parameters"]["rope_type"], small_config(model_type, **changes)
    meant, _ = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=1024)
    torch.testing.assert_close(rope.inv_freq, meant)
    cos, _ = rope(torch.zeros(1), torch.tensor([[0]]))
    assert float(cos.flatten()[0]) == factor
    longest = 2048
    assert load_model_config(tmp_path, "transformers").max_seq_len(longest) == longest


def test_a_prefix_of_all_tensors_is_hinted_at(tmp_path: Path) -> None:
    save_type("phi", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({f"module.{name}": tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"lacks \d+ tensors that PhiForCausalLM .*; it has \d+ of them under 'module.'"
    ):
        PagedModel(tmp_path, page_size=16, model_impl="transformers")


def test_images_are_refused_by_name_where_transformers_code_runs(tmp_path: Path) -> None:
    """Gemma 4's other sizes, of whose family an image could be prepared."""
    text = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 8}
    text |= {"vocab_size": 64, "vocab_size_per_layer_input": 64, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma4Config(text_config=text, vision_config={"num_hidden_layers": 1}, audio_config=None)
    config.architectures = ["Gemma4ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false}')
    model = load_model_config(str(tmp_path), "auto")
    assert (model.implementation, model.encoder) == ("transformers", None)
    assert why_blind(tmp_path, model.why_no_images) == "it runs through transformers' own code, which gets text alone"


def test_the_text_part_of_a_vision_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision_config = transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(vision_config=vision_config, text_config=small_config("llama"))
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokens = _tokens(50, 1)
    found = PagedModel(tmp_path, page_size=16, model_impl="transformers").step({0: tokens}, {})[0]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens])).logits[0]
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()
    assert "only the text model is served, as LlamaForCausalLM" in caplog.text
    assert "tensors of the checkpoint are of no use for text and left out" in caplog.text


@torch.inference_mode()
def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The most likely continuation with its log-probabilities."""
    tokens: list[int] = []
    found: list[float] = []
    for _ in range(count):
        logprobs = model(torch.tensor([prompt + tokens])).logits[0, -1].float().log_softmax(-1)
        tokens.append(int(logprobs.argmax()))
        found.append(float(logprobs[tokens[-1]]))
    return tokens, found


@pytest.mark.parametrize(
    "model_type",
    ["cohere2", *[pytest.param(name, marks=pytest.mark.full) for name in sorted(SERVED) if name != "cohere2"]],
)
def test_the_whole_engine(model_type: str, tmp_path: Path) -> None:
    """Greedy tokens and log-probabilities with chunked prefill, a prefix cache, and too few pages for all sequences at
    once, so that some are preempted."""
    save_type(model_type, tmp_path)
    save_tokenizer(tmp_path)
    reference, count = Reference(tmp_path).model, 16
    shared = _tokens(40, 1)
    prompts = [_tokens(5, 2), shared + _tokens(20, 3), shared + _tokens(60, 4), _tokens(90, 5)]
    expected = [_greedy(reference, prompt, count) for prompt in prompts]
    limits: dict[str, Any] = {"page_size": 16, "max_running_requests": 4, "max_seq_len_override": 128}
    limits["num_pages"] = 30 if model_type == IN_FIVE_GROUPS else 14
    chunks: dict[str, Any] = {"max_prefill_length": 24, "mixed_prefill_length": 8}
    with LLM(str(tmp_path), dtype="float32", model_impl="transformers", **limits, **chunks) as llm:
        for _ in range(2):  # again with every prompt cached
            outputs = llm.generate(prompts, temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
            assert [output.token_ids for output in outputs] == [tokens for tokens, _ in expected]
            for output, (_, wanted) in zip(outputs, expected, strict=True):
                assert output.logprobs is not None
                assert [one.logprob for one in output.logprobs] == pytest.approx(wanted, abs=1e-3)
