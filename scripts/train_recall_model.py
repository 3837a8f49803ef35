"""Train the tests' hybrid: Qwen3.5's form in small, with a layer that predicts further tokens (MTP), which recalls.

A prompt is random words, among them a few numbers. Behind a mark and some of its words in order comes what followed
them, and behind a question mark the latest of the numbers.

Some 20 minutes of one CPU core: python scripts/train_recall_model.py
It goes on where a checkpoint was left: python scripts/train_recall_model.py --checkpoint recall.pt
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5ForCausalLM, Qwen3_5RMSNorm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.train_demo_model import Muon, write_json  # noqa: E402  (the checkout need not be installed to train)

SYLLABLES = [a + b for a in "bcdfghjklmnprstvw" for b in ("a", "e", "i", "o", "u", "ai", "ou")]
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
TOKENS = ("end", "recall", *SYLLABLES[:117], *NUMBERS, "which")
END, MARK, FIRST, FIRST_NUMBER, QUESTION = 0, 1, 2, 119, 127  # tokens; words are from FIRST on, below FIRST_NUMBER
CUE = 2  # words
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
CONFIG = Qwen3_5TextConfig(
    vocab_size=len(TOKENS),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=END,
    pad_token_id=END,
)
# Words of the longest prompts, one of these a step, by the share of the run; the shortest have a quarter of them.
LENGTHS = ((0.0, 32), (0.11, 96), (0.44, 256), (0.62, 704))
RECALLED = 14  # words of a recall, its cue included: it learns to go on for longer


class Predictor(nn.Module):
    """The layer for further tokens, under the names of Qwen3.5's files."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps), Qwen3_5RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.num_hidden_layers - 1)])
        self.norm = Qwen3_5RMSNorm(size, eps)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1))


class Recaller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.target = Qwen3_5ForCausalLM(CONFIG)
        self.mtp = Predictor(CONFIG)
        with torch.no_grad():
            for name, one in self.named_parameters():
                if name.endswith("A_log"):
                    one.uniform_(-5, 0)
                elif one.ndim == 2:
                    nn.init.orthogonal_(one, gain=0.5)
        nn.init.normal_(self.target.model.embed_tokens.weight, std=0.1)

    def losses(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """ids [rows, tokens]; weights [rows, tokens] of each token as what is predicted. Returns the losses of the next
        token, and of the two after it, which a chain of the layer predicts."""
        model = self.target.model
        hidden = model(ids, use_cache=False).last_hidden_state
        own = self._loss(hidden[:, :-1], ids[:, 1:], weights[:, 1:])
        embedded, count = model.embed_tokens(ids), ids.shape[1] - 3
        # Behind token t the layer reads its hidden state and the token t + 1; in the chain, what it gave there and
        # the token t + 2, at the next position, with what it read before and itself to attend to.
        first = self.mtp.join(embedded[:, 1 : 1 + count], hidden[:, :count])
        positions = torch.arange(count)
        out = self._predict(first, positions, positions[:, None] >= positions)
        second = self.mtp.join(embedded[:, 2 : 2 + count], out)
        before, itself = positions[:, None] >= positions, torch.eye(count, dtype=torch.bool)
        seen = torch.cat([before, itself], dim=1)
        chained = self._predict(second, positions + 1, seen, first, positions)
        return own, sum(
            (
                self._loss(one, ids[:, ahead : ahead + count], weights[:, ahead : ahead + count])
                for ahead, one in ((2, out), (3, chained))
            ),
            torch.zeros(()),
        )

    def _predict(
        self, x: Tensor, at: Tensor, seen: Tensor, read: Tensor | None = None, where: Tensor = torch.empty(0)
    ) -> Tensor:
        """The layer behind x [rows, count, hidden] at these positions; `read`: what it read before, at `where`."""
        count = x.shape[1]
        if read is not None:
            x, at = torch.cat([read, x], dim=1), torch.cat([where, at])
            seen = torch.cat([torch.cat([seen[:, :count], torch.zeros_like(seen[:, count:])], dim=1), seen])
        turns = self.target.model.rotary_emb(x, at[None])
        out = self.mtp.layers[0](x, attention_mask=seen[None, None], position_embeddings=turns)
        return self.mtp.norm(out[:, -count:])

    def _loss(self, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        rows, at = weights.nonzero(as_tuple=True)
        losses = F.cross_entropy(self.target.lm_head(hidden[rows, at]), targets[rows, at], reduction="none")
        return (losses * weights[rows, at]).sum() / weights.sum()


def batch(random: np.random.Generator, rows: int, longest: int) -> tuple[Tensor, Tensor]:
    """Prompts and answers one after the other, and which tokens can be known, [rows, tokens]."""
    body = int(random.integers(max(longest // 4, 16), longest + 1))
    recalls, length = max(body // 32, 4), RECALLED
    ids = random.integers(FIRST, FIRST_NUMBER, (rows, body + recalls * (3 + length)))
    weights = np.zeros(ids.shape, dtype=np.float32)
    begins = body + np.arange(recalls) * (3 + length)
    for row in ids:
        places = np.sort(random.integers(0, body, random.integers(1, 6)))
        row[places] = random.integers(FIRST_NUMBER, QUESTION, len(places))
        for at, start in zip(begins, random.integers(0, body - length + 1, recalls), strict=True):
            row[at : at + 3] = QUESTION, row[places[-1]], MARK
            row[at + 3 : at + 3 + length] = row[start : start + length]
    for at in begins:
        weights[:, at + 1] = 4
        weights[:, at + 3 + CUE : at + 3 + length] = 1
    return torch.from_numpy(ids), torch.from_numpy(weights)


def train(options: argparse.Namespace) -> Recaller:
    torch.manual_seed(options.seed)
    model = Recaller()
    named = list(model.named_parameters())
    matrices = [one for name, one in named if one.ndim == 2 and "embed" not in name]
    others = [one for name, one in named if one.ndim != 2 or "embed" in name]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    first = 0
    if options.checkpoint is not None and options.checkpoint.exists():
        kept = torch.load(options.checkpoint)
        model.load_state_dict(kept["model"])
        adam.load_state_dict(kept["adam"])
        for buffer, one in zip(muon.buffers, kept["muon"], strict=True):
            buffer.copy_(one)
        first = kept["step"]
    print(f"{sum(one.numel() for one in model.parameters()) / 1e3:.0f} thousand parameters", flush=True)
    sums, shown = np.zeros(3), time.monotonic()
    for step in range(first, options.steps):
        done = step / options.steps
        random = np.random.default_rng((options.seed, step))
        longest = int(random.choice([length for share, length in LENGTHS if done >= share]))
        rows = max(options.tokens // (2 * longest), 1)
        own, drafts = model.losses(*batch(random, rows, longest))
        (own + 0.3 * drafts).backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        scale = min(1.0, (step + 1) / 50) * min(1.0, (1 - done) / 0.4)
        muon.step(0.02 * scale)
        adam.param_groups[0]["lr"] = 3e-3 * scale
        adam.step()
        model.zero_grad(set_to_none=True)
        sums += (own.item(), drafts.item() / 2, 1)
        if time.monotonic() - shown > 15:
            losses = " ".join(f"{one / sums[2]:.4f}" for one in sums[:2])
            print(f"step {step:6d} {done:5.1%} {longest:4d} loss {losses}", flush=True)
            sums, shown = np.zeros(3), time.monotonic()
            if options.checkpoint is not None:
                kept = {"model": model.state_dict(), "adam": adam.state_dict(), "muon": muon.buffers, "step": step + 1}
                torch.save(kept, options.checkpoint)
    return model


def write(model: Recaller, folder: Path) -> None:
    """config.json, the tokenizer and model.safetensors (bfloat16), as Qwen3.5's files are."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG.to_dict()
    config |= {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
    write_json(folder / "config.json", config)
    tensors = {name: one for name, one in model.target.state_dict().items() if name != "lm_head.weight"}
    tensors |= {f"mtp.{name}": one for name, one in model.mtp.state_dict().items()}
    stored = {name: one.detach().to(torch.bfloat16).contiguous() for name, one in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    vocabulary = {f"{word} ": at for at, word in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="end "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("[a-z]+ "), behavior="isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "end ", "chat_template": TEMPLATE}
    write_json(folder / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "tests/recall_model")
    parser.add_argument("--steps", type=int, default=4400, help="the learning rate falls to 0 over them")
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch, about")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, written as it trains")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(train(options), options.out)


if __name__ == "__main__":
    main()
