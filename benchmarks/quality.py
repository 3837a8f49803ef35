"""What a number format of weights costs a model's answers: on real checkpoints, on a CPU, against their float32.

    python -m benchmarks.quality [--models demo,smollm2,gemma3] [--formats fp8,gptq] [--questions 50] [--json]

For each model and format, over the fixed text quality_text.txt, or conversations of the demo model's own kind:

- `kl`: mean KL divergence, in nats, of the next token's distribution from the plain model's in float32.
- `perplexity` of the text, and `best`: the share of places in which the most likely next token stays the same.
- `greedy`: of 24 tokens that follow a beginning of the text, the share before the first that differs. Of formats that
  leave activations alone by the dequantized weights, whose logits are the same within 1e-3 (tests/parity).
- `gauge` of the demo model: its held-out questions answered right; `alike`: by transformers, with weights and
  activations that are quantized alike, so that the two say what this engine adds to the format's own loss.

Models are folders, or the names above: checkpoints that tests/real fetches from package registries. Formats are rows
of quality_formats.py. Quantized checkpoints are made in a temporary folder and computed in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.gauge import ask
from benchmarks.parity import kl_divergence
from benchmarks.quality_formats import FORMATS, Calibration, Format
from minisgl_backend import LLM, SamplingParams
from minisgl_backend.models.folder import find_model_dir
from tests.parity.checkpoints import reference_model
from tests.parity.paged import PagedModel
from tests.parity.test_fp8_weights import fp8
from tests.real import models

TEXT = (Path(__file__).parent / "quality_text.txt").read_text(encoding="utf-8")
MODELS = ("demo", "smollm2", "gemma3")
BEGINNINGS, NEW_TOKENS = 8, 24
DEMO_CONVERSATIONS, DEMO_TOKENS = 10, 900
ANSWER_TOKENS = 1300  # the longest answer of a question has 1,200

Row = dict[str, float]


def logits_of(model: PagedModel, ids: list[int]) -> torch.Tensor:
    """Of every token: float32 [num_tokens, vocab_size]."""
    return model.step({0: ids}, {})[0].float()


def continuations(model: PagedModel, ids: list[int]) -> list[list[int]]:
    """Greedy tokens behind beginnings of a text."""
    starts = [len(ids) * (row + 1) // (BEGINNINGS + 1) for row in range(BEGINNINGS)]
    rows = {row + 1: ids[max(0, start - 48) : start] for row, start in enumerate(starts)}
    found: dict[int, list[int]] = {row: [] for row in rows}
    step = model.step(rows, {}, last_only=True)
    for _ in range(NEW_TOKENS):
        for row, logits in step.items():
            found[row].append(int(logits[-1].argmax()))
        step = model.step({}, {row: tokens[-1] for row, tokens in found.items()})
    return list(found.values())


def compared(expected: torch.Tensor, found: torch.Tensor, ids: Sequence[int]) -> Row:
    """Logits [num_tokens, vocab_size] of a text."""
    targets = torch.tensor(ids[1:])
    slabs = zip(found[:-1].split(128), targets.split(128), strict=True)
    losses = [torch.nn.functional.cross_entropy(logits, tokens, reduction="none") for logits, tokens in slabs]
    return {
        "kl": kl_divergence(expected, found).mean().item(),
        "perplexity": torch.cat(losses).mean().exp().item(),
        "best": (expected.argmax(-1) == found.argmax(-1)).float().mean().item(),
    }


def agreement(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """The mean share of each sequence before the first token that differs."""
    shares = []
    for one, other in zip(expected, found, strict=True):
        differing = [index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
        shares.append((differing[0] if differing else len(one)) / len(one))
    return sum(shares) / len(shares)


def measure(
    folder: Path, ids: list[int], formats: Sequence[str], questions: int = 0, calibration: Calibration | None = None
) -> Iterator[tuple[str, Row]]:
    """The plain model and each format, by name, over the tokens `ids`. questions: of each kind to the demo model.
    calibration: None: made here, where a format needs it."""
    if calibration is None:
        calibrates = any(FORMATS[name].calibrates for name in formats)
        calibration = Calibration.of(folder) if calibrates else Calibration()
    model = _load(folder, {}, len(ids))
    expected, continued = logits_of(model, ids), continuations(model, ids)
    yield "float32", compared(expected, expected, ids) | {"greedy": 1.0} | _gauge(folder, {}, questions)
    for name in formats:
        chosen = FORMATS[name]
        with tempfile.TemporaryDirectory() as parent:
            quantized, dequantized = folder, folder
            if chosen.write is not None:
                quantized, dequantized = Path(parent) / "quantized", Path(parent) / "plain"
                chosen.write(folder, quantized, dequantized, calibration)
            model = _load(quantized, chosen.options, len(ids))
            row = compared(expected, logits_of(model, ids), ids)
            if chosen.write is not None and chosen.activations is None:
                model = _load(dequantized, {}, len(ids))
            row["greedy"] = agreement(continued, continuations(model, ids))
            row |= _gauge(quantized, chosen.options, questions)
            if questions and chosen.activations is not None:
                row["alike"] = _gauge_alike(dequantized, chosen, calibration, questions)
        yield name, row


def _load(folder: Path, options: Mapping[str, str], length: int) -> PagedModel:
    max_seq_len = -(-(length + NEW_TOKENS) // 512) * 512
    return PagedModel(
        folder, page_size=16, max_seq_len=max_seq_len, max_rows=BEGINNINGS + 1,
        dtype=getattr(torch, options.get("dtype", "float32")), quantization=options.get("quantization"),
    )  # fmt: skip


def _gauge(folder: Path, options: Mapping[str, str], questions: int) -> Row:
    if not questions:
        return {}
    asked = ask(questions)
    engine: dict[str, Any] = {"dtype": "float32", "page_size": 16, "num_pages": 4096, **options}
    with LLM(str(folder), **engine) as llm:
        said = llm.chat([one.messages for one in asked], SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS))
    return {"gauge": sum(one.is_right(answer.text) for one, answer in zip(asked, said, strict=True)) / len(asked)}


@torch.inference_mode()
def _gauge_alike(folder: Path, chosen: Format, calibration: Calibration, questions: int) -> float:
    """Of transformers with the dequantized weights (of the fp8 option: quantized here) and activations alike."""
    assert chosen.activations is not None, "its callers look"
    model, tokenizer = reference_model(folder), AutoTokenizer.from_pretrained(folder)
    of_input = chosen.activations(calibration)
    for path, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and path.startswith("model.layers."):
            if chosen.write is None:
                layer.weight.data = fp8(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, inputs, path=path: (of_input(path, inputs[0]),))
    asked = ask(questions)
    right = 0
    for kind in dict.fromkeys(one.kind for one in asked):
        group = [one for one in asked if one.kind == kind]
        prompts: Any = tokenizer.apply_chat_template(
            [one.messages for one in group], add_generation_prompt=True, padding=True, return_dict=True,
            return_tensors="pt", tokenizer_kwargs={"padding_side": "left"},
        )  # fmt: skip
        said = model.generate(**prompts, do_sample=False, max_new_tokens=ANSWER_TOKENS, pad_token_id=0)
        texts = tokenizer.batch_decode(said[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(one.is_right(text) for one, text in zip(group, texts, strict=True))
    return right / len(asked)


def find_model(name: str) -> Path:
    made = {"smollm2": models.smollm2, "gemma3": models.gemma3}
    return made[name]() if name in made else find_model_dir(name)


def text_ids(folder: Path, *, of_demo: bool) -> list[int]:
    """Tokens of the fixed text; of_demo: of held-out conversations, as the demo model has learned no other texts."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not of_demo:
        return list(tokenizer.encode(TEXT))
    ids: list[int] = []
    for one in ask(DEMO_CONVERSATIONS):
        messages = [*one.messages, {"role": "assistant", "content": one.answer}]
        tokens: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
        ids += tokens
        if len(ids) >= DEMO_TOKENS:
            break
    return ids[:DEMO_TOKENS]


def table(results: Mapping[str, Mapping[str, Row]]) -> str:
    """Of Markdown: a row for each format, columns for each model."""
    lines = []
    for model, rows in results.items():
        lines += [f"{model}:", "", "| | KL, nats | perplexity | best token the same | greedy tokens the same | gauge |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for name, row in rows.items():
            title = FORMATS[name].title if name in FORMATS else name
            gauge = f"{100 * row['gauge']:.1f}%" if "gauge" in row else ""
            gauge += f", alike {100 * row['alike']:.1f}%" if "alike" in row else ""
            lines.append(
                f"| {title} | {row['kl']:.4f} | {row['perplexity']:.2f} | {100 * row['best']:.1f}% | "
                f"{100 * row['greedy']:.0f}% | {gauge} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--formats", default=",".join(FORMATS), help="of: " + ", ".join(FORMATS))
    parser.add_argument("--questions", type=int, default=20, help="of each kind, to the demo model; 0: none")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object, last line")
    arguments = parser.parse_args()
    formats = arguments.formats.split(",")
    if unknown := [name for name in formats if name not in FORMATS]:
        parser.error(f"unknown formats {', '.join(unknown)}; of: {', '.join(FORMATS)}")
    results: dict[str, dict[str, Any]] = {}
    for model in arguments.models.split(","):
        questions = arguments.questions if model == "demo" else 0
        folder = find_model(model)
        for name, row in measure(folder, text_ids(folder, of_demo=model == "demo"), formats, questions):
            print(f"{model} {name}: {json.dumps(row)}", file=sys.stderr, flush=True)
            results.setdefault(model, {})[name] = row
    print(table(results))
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
