"""Train the demo model: a small Qwen3 chat model, on conversations generated as it trains.

One GPU, under ten minutes:  python scripts/train_demo_model.py --checkpoint checkpoint.pt Go on, here on a CPU:
python scripts/train_demo_model.py --resume checkpoint.pt --device cpu --rows 1 Grade a finished folder:     python
scripts/train_demo_model.py --eval-only --questions 500
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import demo_tasks  # noqa: E402  (the checkout need not be installed to train)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Of a tool its name and the names of its parameters are shown: that is all that so small a model can use.
CHAT_TEMPLATE = """\
{%- if tools %}
  {%- set system = messages[0]['content'] if messages and messages[0]['role'] == 'system' else '' %}
  {{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') + 'Tools: ' }}
  {%- for tool in tools %}
    {%- set function = tool['function'] or tool %}
    {{- function['name'] + '(' + ((function['parameters'] or {})['properties'] or {}) | join(', ') + ')' }}
    {{- ', ' if not loop.last }}
  {%- endfor %}
  {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if not (tools and loop.first and message['role'] == 'system') %}
    {{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
    {%- for call in message['tool_calls'] or [] %}
      {%- set call = call['function'] or call %}
      {%- set arguments = call['arguments'] or {} %}
      {{- '\\n' if message['content'] or not loop.first }}
      {{- '<tool_call>\\n{"name": "' + call['name'] + '", "arguments": ' }}
      {{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# A digit is a token of its own; ", " too, so that a word is cut the same wherever it stands in a list.
PIECES = r"\p{N}|, |[\p{L}\p{M}]+|\n| |\p{P} ?|[^\s\p{L}\p{N}\p{P}]+|\s"


@dataclass(frozen=True)
class Shape:
    """The architecture, under the names that Qwen3's config.json uses."""

    vocab_size: int = 1024
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 100000.0
    rms_norm_eps: float = 1e-6


def main() -> None:
    options = parse_options()
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer_path = options.out / "tokenizer.json"
    if options.resume and options.resume.suffix != ".safetensors":
        tokenizer_path.write_text(torch.load(options.resume, map_location="cpu")["tokenizer"], encoding="utf-8")
    if not tokenizer_path.exists():
        write_tokenizer(options.out, Shape.vocab_size)
    write_tokenizer_config(options.out)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    if options.eval_only:
        model = load_folder(options.out)
    else:
        model = train(options, tokenizer_path)
        write_model(model, options.out)
    if options.questions:
        grade_all(model, tokenizer, options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=ROOT / "model_repository/engine/demo_model",
        help="folder to write (or grade)",
    )
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--minutes", type=float, default=5.0, help="time to train; the learning rate falls to 0 over it")
    add("--steps", type=int, default=0, help="stop after so many steps instead of --minutes")
    add("--rows", type=int, default=24, help="rows of --row-tokens tokens in a batch")
    add("--row-tokens", type=int, default=4096)
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that generate data")
    add("--muon-lr", type=float, default=0.02, help="peak learning rate of the matrices")
    add("--adam-lr", type=float, default=3e-3, help="peak learning rate of embeddings and norms")
    add("--decay-from", type=float, default=0.4, help="share of the run after which the learning rate falls")
    add("--checkpoint", type=Path, help="file for the model with its optimizer's state, written as it trains")
    add("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    add("--resume", type=Path, help="checkpoint, or a model.safetensors, to go on from")
    add("--seed", type=int, default=0)
    add("--eval-only", action="store_true", help="grade the folder --out; train nothing")
    add("--questions", type=int, default=500, help="held-out questions per kind in the grading; 0 for none")
    add("--eval-seed", type=int, default=7)
    add("--eval-batch", type=int, default=250)
    add("--dtypes", default="bfloat16,float16,float32", help="number formats to grade in")
    add("--show-wrong", type=int, default=2, help="wrong answers to print per kind")
    return parser.parse_args()


# --- tokenizer ------------------------------------------------------------------------------------------------


def learn_tokenizer(texts: list[str], pieces: str, special_tokens: tuple[str, ...], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` tokens, which never cuts across what the regex `pieces` matches."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens; {vocab_size} were wanted")
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Learn a tokenizer from generated conversations and write tokenizer.json."""
    rng = Random("tokenizer")
    texts = [render(demo_tasks.training_conversation(rng)) for _ in range(4000)]
    # Every other emoji, Chinese or accented word stays unlearned, so that replies hold characters cut into
    # several tokens: what streams such a reply must put them together again.
    unlearned = [word for pool in demo_tasks.WORD_POOLS[1:] for word in pool[::2]]
    for text in (*SPECIAL_TOKENS, *unlearned):
        texts = [other.replace(text, "\n") for other in texts]
    learn_tokenizer(texts, PIECES, SPECIAL_TOKENS, vocab_size).save(str(folder / "tokenizer.json"))


def write_tokenizer_config(folder: Path) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": Shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)


def render(messages: list[dict[str, str]], ask: bool = False) -> str:
    """The text that the chat template makes of `messages`; with `ask`, the reply's opening after it."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n" if ask else text


# --- data -----------------------------------------------------------------------------------------------------


class RowPacker:
    """Packs whole conversations into rows of one length; each row is int32 [4, row_tokens].

    A row holds: input ids, target ids, the conversation's number in the row (0: padding), and the target's
    weight in thousandths. Only what the assistant says is weighted, and long answers less per token, so that
    a count to 300 does not outweigh a hundred sums.
    """

    def __init__(self, tokenizer: Tokenizer, row_tokens: int, rng: Random) -> None:
        self._tokenizer, self._row_tokens, self._rng = tokenizer, row_tokens, rng
        self._start, self._end = (tokenizer.token_to_id(text) for text in SPECIAL_TOKENS[1:])
        self._role = tokenizer.encode("assistant").ids
        self._open = [self._empty() for _ in range(8)]
        self._filled = [0] * 8
        self._count = [0] * 8

    def rows(self, n: int) -> np.ndarray:
        """The next `n` full rows: int32 [n, 4, row_tokens]."""
        return np.stack([self._next_row() for _ in range(n)])

    def _next_row(self) -> np.ndarray:
        while True:
            ids, weight = self._conversation()
            size = len(ids) - 1
            if size > self._row_tokens:
                continue
            fits = [i for i in range(8) if self._filled[i] + size <= self._row_tokens]
            full = max(range(8), key=self._filled.__getitem__)
            row = self._open[full] if not fits else None
            if row is not None:
                self._open[full], self._filled[full], self._count[full] = self._empty(), 0, 0
                fits = [full]
            into = max(fits, key=self._filled.__getitem__)
            self._count[into] += 1
            span = slice(self._filled[into], self._filled[into] + size)
            self._open[into][:, span] = (ids[:-1], ids[1:], np.full(size, self._count[into]), weight[1:])
            self._filled[into] += size
            if row is not None:
                return row

    def messages(self) -> list[dict[str, str]]:
        """The next conversation."""
        return demo_tasks.training_conversation(self._rng)

    def _empty(self) -> np.ndarray:
        return np.zeros((4, self._row_tokens), np.int32)

    def _conversation(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and weights (thousandths) of one conversation."""
        text = render(self.messages())
        ids = np.array(self._tokenizer.encode(text).ids, np.int32)
        weight = np.zeros(len(ids), np.int32)
        starts = np.flatnonzero(ids == self._start)
        ends = np.flatnonzero(ids == self._end)
        head = len(self._role) + 2  # <|im_start|>, the role, a line feed
        for start, end in zip(starts, ends, strict=True):
            if list(ids[start + 1 : start + 1 + len(self._role)]) == self._role:
                length = end + 1 - start - head
                weight[start + head : end + 1] = int(1000 * min(1.0, 16 / length) ** 0.5)
                weight[end] = 1000  # to stop at the right number is the one hard step of a long count
        return ids, weight


def _fill_queue(queue: Any, tokenizer_path: str, row_tokens: int, rows: int, seed: str) -> None:
    packer = RowPacker(Tokenizer.from_file(tokenizer_path), row_tokens, Random(seed))
    while True:
        queue.put(packer.rows(rows))


class DataStream:
    """Batches from worker processes: int32 [rows, 4, row_tokens] each; `close` ends the workers."""

    def __init__(self, tokenizer_path: Path, options: argparse.Namespace) -> None:
        context = mp.get_context("spawn")
        self._queue = context.Queue(maxsize=2 * options.workers)
        stamp = f"{options.seed}/{time.time()}" if options.resume else str(options.seed)
        self._workers = [
            context.Process(
                target=_fill_queue,
                args=(
                    self._queue,
                    str(tokenizer_path),
                    options.row_tokens,
                    options.rows,
                    f"{stamp}/{number}",
                ),
                daemon=True,
            )
            for number in range(options.workers)
        ]
        for worker in self._workers:
            worker.start()

    def next(self) -> Tensor:
        return torch.from_numpy(self._queue.get(timeout=300))

    def close(self) -> None:
        for worker in self._workers:
            worker.terminate()


# --- model ----------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * wide.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; x [batch, heads, tokens, head_dim], cos and sin [batch, 1, tokens, head_dim / 2]."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


@dataclass
class Cache:
    """Keys and values of a batch; `keys[layer]` is [batch, kv_heads, room, head_dim]."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, heads * size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_heads * size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_heads * size, bias=False)
        self.o_proj = nn.Linear(heads * size, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(size, shape.rms_norm_eps)
        self.k_norm = RMSNorm(size, shape.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: each [batch, heads or kv_heads, tokens, head_dim]."""
        shape = self.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        heads = F.linear(x, weight).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        q, k, v = heads.split((shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads), 1)
        return rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        if isinstance(mask, Tensor):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            from torch.nn.attention.flex_attention import flex_attention

            v = v.to(q.dtype)
            out = flex_attention(q.contiguous(), k.contiguous(), v.contiguous(), block_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DemoModel(nn.Module):
    """Qwen3 with tied embeddings; parameters are named as in Hugging Face's checkpoints, less "model."."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 if "embed" in name else (0.1 if out else 0.5) / math.sqrt(parameter.shape[1])
                nn.init.normal_(parameter, std=std)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [batch, 1, tokens, head_dim / 2], of positions [batch, tokens]."""
        half = torch.arange(0, self.shape.head_dim, 2, device=positions.device, dtype=torch.float32)
        frequency = self.shape.rope_theta ** (-half / self.shape.head_dim)
        angle = positions[:, None, :, None].float() * frequency
        return angle.cos(), angle.sin()

    def forward(self, ids: Tensor, positions: Tensor, mask: Any) -> Tensor:
        """Logits [batch, tokens, vocab]; mask is a flex BlockMask or bool [batch, 1, tokens, tokens]."""
        cos, sin = self.angles(positions)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, positions: Tensor, weight: Tensor, mask: Any) -> Tensor:
        logits = self(ids, positions, mask).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * weight.flatten()).sum() / weight.sum()

    def prefill(self, ids: Tensor, room: int) -> tuple[Tensor, Cache]:
        """Hidden states [batch, tokens, hidden] and a cache of `room` tokens; padding stands at the right."""
        batch, tokens = ids.shape
        cos, sin = self.angles(torch.arange(tokens, device=ids.device)[None])
        x, cache = self.embed_tokens(ids), Cache()
        for layer in self.layers:
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            for store, new in ((cache.keys, k), (cache.values, v)):
                store.append(new.new_zeros(batch, new.shape[1], room, new.shape[3]))
                store[-1][:, :, :tokens] = new
            k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, cache

    def decode(self, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits [batch, vocab] after one more token a sequence; ids and positions are [batch]."""
        cos, sin = self.angles(positions[:, None])
        rows = torch.arange(len(ids), device=ids.device)
        room = cache.keys[0].shape[2]
        mask = (torch.arange(room, device=ids.device) <= positions[:, None])[:, None, None]
        x = self.embed_tokens(ids)[:, None]
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            keys[rows, :, positions], values[rows, :, positions] = k[:, :, 0], v[:, :, 0]
            group = q.shape[1] // keys.shape[1]
            q = q.unflatten(1, (-1, group)).squeeze(3)  # the heads of a group as its queries
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            x = x + layer.self_attn.o_proj(out.flatten(1)[:, None])
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return F.linear(self.norm(x[:, 0]), self.embed_tokens.weight)


# --- training -------------------------------------------------------------------------------------------------


class Muon:
    """Muon (Keller Jordan, 2024) for matrices: momentum, made near-orthogonal by Newton-Schulz steps.

    Matrices of one shape are handled as one batch, which keeps a small model's step short.
    """

    def __init__(
        self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.02, compiled: bool = True
    ) -> None:
        self._groups: dict[torch.Size, list[nn.Parameter]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.shape, []).append(parameter)
        self._momentum, self._decay = momentum, decay
        self.buffers = [torch.zeros(len(g), *s, device=g[0].device) for s, g in self._groups.items()]
        self._orthogonal = torch.compile(orthogonal) if compiled and parameters[0].is_cuda else orthogonal

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for (shape, group), buffer in zip(self._groups.items(), self.buffers, strict=True):
            gradient = torch.stack([parameter.grad for parameter in group])
            buffer.lerp_(gradient, 1 - self._momentum)
            update = self._orthogonal(gradient.lerp(buffer, self._momentum))
            torch._foreach_mul_(group, 1 - rate * self._decay)
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_add_(group, list(update.to(buffer.dtype).unbind()), alpha=-rate * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """Near-orthogonal matrices of the same row and column spaces, by five quintic Newton-Schulz steps."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices  # CPUs may be slow at it
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Trainer:
    """A model with its two optimizers: Muon for the matrices, Adam for embeddings and norms."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        torch.set_float32_matmul_precision("high")
        self._options = options
        self.device = torch.device(options.device)
        self.model = DemoModel(Shape()).to(self.device)
        named = list(self.model.named_parameters())
        self._others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self._muon = Muon([p for name, p in named if p.ndim == 2 and "embed" not in name])
        self._adam = torch.optim.AdamW(self._others, lr=options.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        on_gpu = self.device.type == "cuda"
        self._loss = torch.compile(self.model.loss, dynamic=False) if on_gpu else self.model.loss

    def gradients(self, rows: Tensor) -> Tensor:
        """Add the gradients of a batch of the data stream; returns its loss."""
        batch = prepare(rows, self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self._loss(*batch)
        loss.backward()
        return loss.detach()

    def step(self, scale: float) -> None:
        """One step of both optimizers, at the share `scale` of their peak learning rates."""
        torch.nn.utils.clip_grad_norm_(self._others, 1.0)
        self._muon.step(self._options.muon_lr * scale)
        for group in self._adam.param_groups:
            group["lr"] = self._options.adam_lr * scale
        self._adam.step()
        self.model.zero_grad(set_to_none=True)

    def restore(self, path: Path) -> None:
        """Take up a checkpoint, or the weights alone of a model.safetensors."""
        if path.suffix == ".safetensors":
            self.model.load_state_dict(load_folder(path.parent).state_dict())
            return
        state = torch.load(path, map_location=self.device)
        self.model.load_state_dict(state["model"])
        self._adam.load_state_dict(state["adam"])
        for buffer, saved in zip(self._muon.buffers, state["muon"], strict=True):
            buffer.copy_(saved)

    def save(self, path: Path, tokenizer_path: Path) -> None:
        """Write model, optimizers and tokenizer. Muon's momentum is kept in 16 bits, to stay under 32 MB."""
        state = {
            "model": self.model.state_dict(),
            "muon": [buffer.bfloat16() for buffer in self._muon.buffers],
            "adam": self._adam.state_dict(),
            "tokenizer": tokenizer_path.read_text(encoding="utf-8"),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)


def train(options: argparse.Namespace, tokenizer_path: Path) -> DemoModel:
    """Train until the time (or the steps) are over; returns the model in float32."""
    stream = DataStream(tokenizer_path, options)  # first: the workers must not inherit a CUDA context
    trainer = Trainer(options)
    if options.resume:
        trainer.restore(options.resume)
    size = sum(parameter.numel() for parameter in trainer.model.parameters())
    print(f"{size / 1e6:.2f} million parameters on {trainer.device}", flush=True)
    losses: list[Tensor] = []
    step, done = 0, 0.0
    try:
        while done < 1:
            losses.append(trainer.gradients(stream.next()))
            now = time.monotonic()
            if step == 0:  # the clock runs from the first gradients on, most of the compilation aside
                begin = shown_at = saved_at = now
            done = step / options.steps if options.steps else (now - begin) / (60 * options.minutes)
            trainer.step(schedule(done, step, options))
            step += 1
            if now - shown_at > 10 or done >= 1:
                mean = torch.stack(losses).mean().item()  # waits for the device: the clock stays honest
                speed = step * options.rows * options.row_tokens / (time.monotonic() - begin) / 1e3
                print(f"step {step:6d}  {done:5.1%}  loss {mean:.4f}  {speed:.0f}k tokens/s", flush=True)
                losses, shown_at = [], now
            if options.checkpoint and (done >= 1 or now - saved_at > options.save_every):
                trainer.save(options.checkpoint, tokenizer_path)
                saved_at = now
    finally:
        stream.close()
    return trainer.model


def schedule(done: float, step: int, options: argparse.Namespace) -> float:
    """The learning rate's share of its peak: a short rise, a plateau, a straight fall to 0."""
    rise = min(1.0, (step + 1) / 50)
    return rise * max(0.0, min(1.0, (1 - done) / (1 - options.decay_from)))


def prepare(batch: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Any]:
    """ids, targets, positions, weights [rows, tokens] and the mask that keeps conversations apart."""
    if device.type == "cuda":
        batch = batch.pin_memory()
    batch = batch.to(device, non_blocking=True)
    ids, targets, number, weight = batch.unbind(1)
    index = torch.arange(ids.shape[1], device=device)
    fresh = torch.ones_like(number, dtype=torch.bool)
    fresh[:, 1:] = number[:, 1:] != number[:, :-1]
    positions = index - torch.where(fresh, index, 0).cummax(dim=1).values
    return ids.long(), targets.long(), positions, weight / 1000, conversation_mask(number.contiguous())


def conversation_mask(number: Tensor) -> Any:
    """Attention backwards within one conversation: for flex attention on a GPU, dense on a CPU."""
    rows, tokens = number.shape
    if not number.is_cuda:
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return (causal & (number[:, :, None] == number[:, None, :]))[:, None]
    from torch.nn.attention.flex_attention import create_block_mask

    def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (number[row, query] == number[row, key])

    return create_block_mask(allowed, rows, None, tokens, tokens, device=number.device, _compile=True)


# --- the folder -----------------------------------------------------------------------------------------------


def write_model(model: DemoModel, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (bfloat16) as transformers reads them."""
    names = {"eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"), "pad_token_id": 0}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(model.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        **names,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"do_sample": False, **names})
    tensors = {f"model.{k}": v.detach().to("cpu", torch.bfloat16) for k, v in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file leaves it to its owner alone


def load_folder(folder: Path) -> DemoModel:
    tensors = load_file(folder / "model.safetensors")
    model = DemoModel(Shape())
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return model


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- grading --------------------------------------------------------------------------------------------------


def grade_all(model: DemoModel, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Print the share of right answers per kind and number format, of the weights as they are stored."""
    results: dict[str, dict[str, float]] = {}
    for name in options.dtypes.split(","):
        stored = DemoModel(model.shape)
        stored.load_state_dict(model.state_dict())
        stored = stored.to(torch.bfloat16).to(options.device, getattr(torch, name)).eval()
        results[name] = {}
        for kind in demo_tasks.KINDS:
            begin = time.monotonic()
            right = grade(stored, tokenizer, kind, options)
            results[name][kind] = right / options.questions
            took = time.monotonic() - begin
            print(f"{name:9s} {kind:11s} {right}/{options.questions} right  ({took:.0f} s)", flush=True)
    print(json.dumps(results))


def grade(model: DemoModel, tokenizer: Tokenizer, kind: str, options: argparse.Namespace) -> int:
    asked = demo_tasks.questions(kind, options.questions, options.eval_seed)
    prompts = [tokenizer.encode(render(question.messages, ask=True)).ids for question in asked]
    order = sorted(range(len(asked)), key=lambda i: (len(asked[i].answer), len(prompts[i])))
    right = shown = 0
    for first in range(0, len(order), options.eval_batch):
        part = order[first : first + options.eval_batch]
        longest = max(len(tokenizer.encode(asked[i].answer).ids) for i in part)
        for i, ids in zip(part, generate(model, [prompts[i] for i in part], longest + 8), strict=True):
            text = tokenizer.decode(ids)
            good = asked[i].is_right(text)
            right += good
            if not good and shown < options.show_wrong:
                shown += 1
                question = asked[i].messages[-1]["content"]
                print(f"  wrong: {question[:150]!r} -> {text[-150:]!r}, not {asked[i].answer[-150:]!r}")
    return right


@torch.inference_mode()
def generate(model: DemoModel, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """Greedy replies, without their end marker, to a batch of prompts."""
    device = model.norm.weight.device
    end = SPECIAL_TOKENS.index("<|im_end|>")
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    hidden, cache = model.prefill(ids.to(device), longest + max_new)
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    token = F.linear(model.norm(last), model.embed_tokens.weight).argmax(-1)
    tokens = [token]
    ended = token == end
    for step in range(max_new - 1):
        if step % 16 == 0 and bool(ended.all()):
            break
        token = model.decode(token, lengths + step, cache).argmax(-1)
        ended |= token == end
        tokens.append(token)
    return [list(_until(end, row)) for row in torch.stack(tokens, 1).tolist()]


def _until(end: int, ids: list[int]) -> Iterator[int]:
    for token in ids:
        if token == end:
            return
        yield token


if __name__ == "__main__":
    main()
