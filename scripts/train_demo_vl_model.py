"""Train the demo model with eyes: Qwen3-VL's form in small, on drawn images and conversations generated as it trains.

One GPU, a few minutes:   python scripts/train_demo_vl_model.py
Grade a finished folder:  python scripts/train_demo_vl_model.py --eval-only --questions 500
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import demo_sights  # noqa: E402  (the checkout need not be installed to train)
from scripts.demo_vl_data import DataStream, Rows, patches_of, write_texts, write_tokenizer  # noqa: E402
from scripts.demo_vl_model import TABLES, DemoEyes, load_folder, write_model  # noqa: E402
from scripts.train_demo_model import Muon, schedule  # noqa: E402


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    if not (options.out / "tokenizer.json").exists():
        write_tokenizer(options.out)
    write_texts(options.out)
    if options.eval_only:
        model = load_folder(options.out)
    else:
        model = train(options)
        write_model(model, options.out)
    if options.questions:
        grade_all(model, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=ROOT / "model_repository/engine/demo_vl_model", help="folder to write (or grade)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--minutes", type=float, default=3.0, help="time to train; the learning rate falls to 0 over it")
    add("--steps", type=int, default=0, help="stop after so many steps instead of --minutes")
    add("--rows", type=int, default=256, help="conversations in a batch")
    add("--row-tokens", type=int, default=256)
    add("--images", type=int, default=192, help="images in a batch; each is in several conversations")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that generate data")
    add("--muon-lr", type=float, default=0.02, help="peak learning rate of the matrices")
    add("--adam-lr", type=float, default=3e-3, help="peak learning rate of embeddings, biases and norms")
    add("--decay-from", type=float, default=0.4, help="share of the run after which the learning rate falls")
    add("--resume", type=Path, help="model.safetensors to go on from")
    add("--no-compile", action="store_true")
    add("--seed", type=int, default=0)
    add("--eval-only", action="store_true", help="grade the folder --out; train nothing")
    add("--questions", type=int, default=500, help="held-out questions per kind in the grading; 0 for none")
    add("--eval-seed", type=int, default=7)
    add("--eval-every", type=float, default=20.0, help="seconds between short gradings while it trains")
    add("--dtypes", default="bfloat16,float16,float32", help="number formats to grade in")
    add("--show-wrong", type=int, default=3, help="wrong answers to print per kind")
    return parser.parse_args()


# --- training -------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> DemoEyes:
    """Train until the time (or the steps) are over; returns the model in float32."""
    stream = DataStream(options.out / "tokenizer.json", options)  # first: the workers must not inherit a CUDA context
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(options.device)
    model = (load_folder(options.resume.parent) if options.resume else DemoEyes()).to(device)
    if device.type == "cuda" and not options.no_compile:
        for block in (*model.visual.blocks, *model.language_model.layers):
            block.compile(dynamic=False)
    named = list(model.named_parameters())
    others = [one for name, one in named if one.ndim != 2 or name.endswith(TABLES)]
    muon = Muon([one for name, one in named if one.ndim == 2 and not name.endswith(TABLES)], compiled=False)
    adam = torch.optim.AdamW(others, lr=options.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    print(f"{sum(one.numel() for _, one in named) / 1e6:.2f} million parameters on {device}", flush=True)
    asked = Asked(options, per_kind=min(options.questions, 100))
    losses: list[Tensor] = []
    step, done = 0, 0.0
    try:
        while done < 1:
            batch = stream.next(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model.loss(*batch)
            loss.backward()
            losses.append(loss.detach())
            now = time.monotonic()
            if step == 0:  # the clock runs from the first gradients on, most of the compilation aside
                begin = shown_at = graded_at = now
            done = step / options.steps if options.steps else (now - begin) / (60 * options.minutes)
            scale = schedule(done, step, options)
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            muon.step(options.muon_lr * scale)
            adam.param_groups[0]["lr"] = options.adam_lr * scale
            adam.step()
            model.zero_grad(set_to_none=True)
            step += 1
            if now - shown_at > 5 or done >= 1:
                mean = torch.stack(losses).mean().item()  # waits for the device: the clock stays honest
                rate = step / (time.monotonic() - begin)
                print(f"step {step:6d}  {done:5.1%}  loss {mean:.4f}  {rate:.1f} steps/s", flush=True)
                losses, shown_at = [], now
            if now - graded_at > options.eval_every:
                shares = asked.grade(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
                write_model(model, options.out)
                print("  right: " + "  ".join(f"{kind} {share:.0%}" for kind, share in shares.items()), flush=True)
                graded_at = time.monotonic()
    finally:
        stream.close()
    return model


# --- grading --------------------------------------------------------------------------------------------------


class Asked:
    """Held-out questions with their answers. A greedy answer is right if each of its tokens is the most likely one
    behind the right ones before it, which one pass over all tells."""

    def __init__(self, options: argparse.Namespace, per_kind: int) -> None:
        tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
        self._device, self._tokenizer = torch.device(options.device), tokenizer
        self.per_kind = per_kind
        self.questions = [
            one for kind in demo_sights.KINDS for one in demo_sights.questions(kind, per_kind, options.eval_seed)
        ]
        self._parts = []
        for first in range(0, len(self.questions), 100):
            part = self.questions[first : first + 100]
            seen = [patches_of(image) for one in part for image in one.images]
            patches, grids = np.stack([one for one, _ in seen]), np.array([grid for _, grid in seen], np.int32)
            rows, numbers = Rows(tokenizer, len(part), options.row_tokens), iter(range(len(seen)))
            for row, one in enumerate(part):
                turn = [text if isinstance(text, str) else next(numbers) for text in one.sight.parts]
                rows.fill(row, [(turn, one.sight.answer)], grids)
            self._parts.append([torch.from_numpy(array) for array in (patches, grids, *rows.arrays)])

    @torch.no_grad()
    def grade(self, model: DemoEyes, dtype: torch.dtype, show: int = 0) -> dict[str, float]:
        """Shares of right answers by kind."""
        right: list[bool] = []
        for part in self._parts:
            patches, grids, ids, weight, positions, vector = (one.to(self._device) for one in part)
            mixed = dtype == torch.bfloat16 and next(model.parameters()).dtype == torch.float32
            # Blocks are compiled for the batches of training alone.
            with torch.compiler.set_stance("force_eager"), torch.autocast(self._device.type, dtype, enabled=mixed):
                found = model(patches, grids, ids, positions, vector)[:, :-1].argmax(-1)
            good = (found == ids[:, 1:]) | (weight[:, 1:] == 0)
            for row in range(len(good)):
                one = self.questions[len(right)]
                right.append(bool(good[row].all()))
                if show and not right[-1] and right.count(False) <= show * len(demo_sights.KINDS):
                    said = self._tokenizer.decode(found[row][weight[row, 1:] > 0].tolist())
                    print(f"  wrong: {one.kind} {one.text!r} -> {said!r}, not {one.sight.answer!r}")
        kinds = enumerate(demo_sights.KINDS)
        return {kind: sum(right[at * self.per_kind :][: self.per_kind]) / self.per_kind for at, kind in kinds}


def grade_all(model: DemoEyes, options: argparse.Namespace) -> None:
    """Print the share of right answers per kind and number format, of the weights as they are stored."""
    asked, results = Asked(options, options.questions), {}
    for name in options.dtypes.split(","):
        stored = DemoEyes()
        stored.load_state_dict(model.state_dict())
        for one in stored.to(options.device).parameters():
            one.data = one.data.to(torch.bfloat16).to(getattr(torch, name))
        results[name] = asked.grade(stored, getattr(torch, name), options.show_wrong)
        print(f"{name:9s} " + "  ".join(f"{kind} {share:.1%}" for kind, share in results[name].items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
