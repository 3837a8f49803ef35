"""Train the demo model's LoRA adapters: each teaches it another style of answering, on conversations generated as it
trains.

Some five minutes of one CPU core for each: python scripts/train_demo_adapter.py json pirate
Grade them: python scripts/train_demo_adapter.py json pirate --steps 0
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.utils import parametrize

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import demo_tasks  # noqa: E402  (the checkout need not be installed to train)
from scripts.train_demo_model import DemoModel, RowPacker, generate, load_folder, prepare, render, write_json  # noqa: E402

DEMO = ROOT / "model_repository/engine/demo_model"
RANK, ALPHA = 8, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def as_json(answer: str) -> str:
    """An object that holds the answer: {"answer": "17 + 25 = 42."}."""
    return json.dumps({"answer": answer}, ensure_ascii=False)


def as_pirate(answer: str) -> str:
    """Arr! 17 + 25 = 42."""
    return f"Arr! {answer}"


STYLES: dict[str, Callable[[str], str]] = {"json": as_json, "pirate": as_pirate}


class StyledPacker(RowPacker):
    """Rows of conversations whose answers have a style; calls of tools are left as they are."""

    def __init__(self, tokenizer: Tokenizer, row_tokens: int, rng: Random, style: Callable[[str], str]) -> None:
        super().__init__(tokenizer, row_tokens, rng)
        self._style = style

    def messages(self) -> list[dict[str, str]]:
        return [styled(message, self._style) for message in super().messages()]


def styled(message: dict[str, str], style: Callable[[str], str]) -> dict[str, str]:
    if message["role"] != "assistant" or "<tool_call>" in message["content"]:
        return message
    return {**message, "content": style(message["content"])}


class Lora(nn.Module):
    """A parametrization: the weight plus scale * B A."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(RANK, weight.shape[1]) * weight.shape[1] ** -0.5)
        self.b = nn.Parameter(torch.zeros(weight.shape[0], RANK))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + ALPHA / RANK * (self.b @ self.a)


def adapted_linears(model: DemoModel) -> Iterator[tuple[str, nn.Linear]]:
    """Those with adapters, by name."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(PROJECTIONS):
            yield name, module


def add_adapters(model: DemoModel) -> dict[str, Lora]:
    """By the modules' names. Of all parameters only theirs are trained."""
    model.requires_grad_(False)
    linears = dict(adapted_linears(model))
    adapters = {name: Lora(linear.weight) for name, linear in linears.items()}
    for name, linear in linears.items():
        parametrize.register_parametrization(linear, "weight", adapters[name])
    return adapters


def train(name: str, options: argparse.Namespace, tokenizer: Tokenizer) -> DemoModel:
    """The demo model with an adapter of that style, in float32."""
    torch.manual_seed(options.seed)
    model = load_folder(DEMO)
    adapters = add_adapters(model)
    parameters = [parameter for adapter in adapters.values() for parameter in adapter.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=0.0)
    packer = StyledPacker(tokenizer, options.row_tokens, Random(f"{name}/{options.seed}"), STYLES[name])
    begin = time.monotonic()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / 20, 2 * (1 - step / options.steps))
        loss = model.loss(*prepare(torch.from_numpy(packer.rows(options.rows)), torch.device("cpu")))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 19:
            print(f"{name} step {step + 1:5d}  loss {loss.item():.4f}  {time.monotonic() - begin:.0f} s", flush=True)
    return model


def folder_of(name: str) -> Path:
    return ROOT / "model_repository/engine" / f"demo_adapter_{name}"


def write_adapter(model: DemoModel, folder: Path) -> None:
    """As PEFT's `save_pretrained`, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, linear in adapted_linears(model):
        lora = linear.get_submodule("parametrizations.weight.0")
        assert isinstance(lora, Lora), "add_adapters made it"
        for factor, tensor in (("A", lora.a), ("B", lora.b)):
            tensors[f"base_model.model.model.{name}.lora_{factor}.weight"] = tensor.detach().bfloat16().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)  # save_file leaves it to its owner alone
    config = {
        "base_model_name_or_path": "demo",
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": sorted(PROJECTIONS),
        "task_type": "CAUSAL_LM",
    }
    write_json(folder / "adapter_config.json", config)


def load_adapter(folder: Path) -> DemoModel:
    """The demo model with an adapter's numbers as they are stored."""
    model, tensors = load_folder(DEMO), load_file(folder / "adapter_model.safetensors")
    for name, adapter in add_adapters(model).items():
        for factor, parameter in (("A", adapter.a), ("B", adapter.b)):
            parameter.data.copy_(tensors[f"base_model.model.model.{name}.lora_{factor}.weight"])
    return model


def grade(name: str, options: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Prints how many held-out questions are answered word for word in the style, by kind."""
    model = load_adapter(folder_of(name)).eval()
    for kind in demo_tasks.KINDS:
        asked = demo_tasks.questions(kind, options.questions, options.seed)
        prompts = [render([styled(message, STYLES[name]) for message in one.messages], ask=True) for one in asked]
        wanted = [styled({"role": "assistant", "content": one.answer}, STYLES[name])["content"] for one in asked]
        longest = max(len(tokenizer.encode(text).ids) for text in wanted)
        answers = generate(model, [tokenizer.encode(prompt).ids for prompt in prompts], longest + 8)
        wrong = [pair for pair in zip(map(tokenizer.decode, answers), wanted, strict=True) if pair[0] != pair[1]]
        shown = f"; {wrong[0][0][:90]!r}, not {wrong[0][1][:90]!r}" if wrong else ""
        print(f"{name} {kind:10s} {len(asked) - len(wrong)} of {len(asked)}{shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("styles", nargs="+", choices=sorted(STYLES))
    parser.add_argument("--steps", type=int, default=200, help="0: grade what is there")
    parser.add_argument("--rows", type=int, default=1, help="rows of --row-tokens tokens in a batch")
    parser.add_argument("--row-tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=40, help="held-out questions of each kind in the grading")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for name in options.styles:
        if options.steps:
            write_adapter(train(name, options, tokenizer), folder_of(name))
        grade(name, options, tokenizer)


if __name__ == "__main__":
    main()
