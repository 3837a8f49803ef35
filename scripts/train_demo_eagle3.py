"""Train an EAGLE-3 head for the demo model: a draft model of one layer, which reads the demo model's hidden states.

Some 8 minutes of two CPU cores: python scripts/train_demo_eagle3.py
What it is worth: python -m benchmarks.speculation --model demo --kinds gauge --every-draft --speculative-config \\
    '{"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 4}'

A head learns what it will be asked for (Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language
Models via Training-Time Test"): a chain of drafts, each made from the head's own hidden state of the one before. What
it is to say is what the demo model says.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import demo_tasks  # noqa: E402  (the checkout need not be installed to train)
from scripts.train_demo_model import (  # noqa: E402
    MLP,
    SPECIAL_TOKENS,
    DemoModel,
    Muon,
    RMSNorm,
    Shape,
    load_folder,
    render,
    rotate,
    write_json,
)

DEMO = ROOT / "model_repository/engine/demo_model"
AUX_LAYERS = (1, 3, 5)  # hidden states before these layers
CHAIN = 4  # drafts of a chain
ROWS = (512, 512, 1024, 2048)  # tokens of a batch's rows, one of these each time; longer conversations are left out
MOST_STARTS = 32  # chains that begin in one reply, in one batch


@dataclass(frozen=True)
class HeadShape(Shape):
    """As of the demo model, under the names of config.json."""

    intermediate_size: int = 384
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    draft_vocab_size: int = 384


class HeadAttention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size = shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, shape.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, shape.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, shape.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * size, shape.hidden_size, bias=False)


class MidLayer(nn.Module):
    """The one layer, under its name in published checkpoints."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = HeadAttention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3)
        )


@dataclass
class Starts:
    """Where chains begin: positions whose hidden states the demo model has told, before a token that it has said."""

    row: Tensor  # [chains]
    position: Tensor  # [chains]
    length: Tensor  # [chains]  drafts that have an answer to be compared with, at most CHAIN


class Head(nn.Module):
    """Parameters are named as in published checkpoints."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=(0.1 if out else 0.5) / parameter.shape[1] ** 0.5)

    def chain(self, states: Tensor, embeds: Tensor, number: Tensor, starts: Starts) -> Iterator[Tensor]:
        """Logits [chains, draft_vocab_size] of each draft, where all drafts before it are what the row has.

        states [rows, tokens, 3 * hidden]: of the demo model; embeds [rows, tokens, hidden]: of the token behind each;
        number [rows, tokens]: of each token's conversation.
        """
        hidden = self.fc(states)
        position = torch.arange(states.shape[1])[None]
        _, keys, values = self._project(embeds, hidden, position)
        row, at = starts.row, starts.position
        seen = (number[row] == number[row, at][:, None]) & (position <= at[:, None])
        x, own = hidden[row, at], []
        for step in range(CHAIN):
            here = (at + step).clamp(max=states.shape[1] - 1)
            q, k, v = (one[:, :, 0] for one in self._project(embeds[row, here][:, None], x[:, None], here[:, None]))
            if step:
                own.append((k, v))
            x = x + self.midlayer.self_attn.o_proj(self._attend(q, keys, values, row, seen, own))
            x = x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))
            yield self.lm_head(self.norm(x))

    def _project(self, embeds: Tensor, hidden: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: each [rows, heads, tokens, head_dim]."""
        layer, size = self.midlayer, self.shape.head_dim
        x = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(hidden)], dim=-1)
        angle = position[:, None, :, None] * self.shape.rope_theta ** (-torch.arange(0, size, 2) / size)
        attention = layer.self_attn
        weight = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        heads = F.linear(x, weight).unflatten(-1, (-1, size)).transpose(1, 2)
        kv_heads = self.shape.num_key_value_heads
        q, k, v = heads.split((self.shape.num_attention_heads, kv_heads, kv_heads), dim=1)
        return rotate(q, angle.cos(), angle.sin()), rotate(k, angle.cos(), angle.sin()), v

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, row: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attention of chains [chains, heads * head_dim].

        q [chains, heads, head_dim]; keys and values [rows, kv_heads, tokens, head_dim], of which a chain sees those of
        its `row` [chains] that `seen` [chains, tokens] says; `own`: keys and values of its own drafts, [chains,
        kv_heads, head_dim] each.
        """
        q = q.unflatten(1, (keys.shape[1], -1)) * self.shape.head_dim**-0.5
        parts = []
        for index in range(len(keys)):
            chosen = row == index
            score = torch.einsum("nhgd,htd->nhgt", q[chosen], keys[index])
            score = score.masked_fill(~seen[chosen][:, None, None], float("-inf"))
            own_scores = [(q[chosen] * k[chosen][:, :, None]).sum(-1, keepdim=True) for k, _ in own]
            share = torch.cat([score, *own_scores], dim=-1).softmax(-1)
            tokens = keys.shape[2]
            part = torch.einsum("nhgt,htd->nhgd", share[..., :tokens], values[index])
            for step, (_, v) in enumerate(own):
                part = part + share[..., tokens + step, None] * v[chosen][:, :, None]
            parts.append(part)
        order = torch.cat([torch.nonzero(row == index)[:, 0] for index in range(len(keys))])
        return torch.cat(parts)[order.argsort()].flatten(1)


# --- data -----------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows of conversations, with what the demo model says of them."""

    ids: Tensor  # [rows, tokens]
    number: Tensor  # [rows, tokens]  of the conversation in its row
    states: Tensor  # [rows, tokens, 3 * hidden]  at AUX_LAYERS
    probabilities: Tensor  # [rows, tokens, draft_vocab_size]  of the token behind
    starts: Starts  # all that there are


class Conversations:
    """Conversations of the gauge's kinds, each kind as often, of contents that it does not ask for."""

    def __init__(self, tokenizer: Tokenizer, rng: Random) -> None:
        self._tokenizer, self._rng = tokenizer, rng
        self._start, self._end = (tokenizer.token_to_id(text) for text in SPECIAL_TOKENS[1:])
        self._role = tokenizer.encode("assistant").ids
        self._drawn: list[list[dict[str, str]]] = []

    def next(self, most: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of one of at most `most` tokens, and where the assistant speaks: the first token, and the one
        behind its end marker."""
        while True:
            if not self._drawn:
                self._drawn = [self._messages(kind) for kind in demo_tasks.KINDS for _ in range(4)]
                self._drawn += [demo_tasks.training_conversation(self._rng) for _ in range(4)]
                self._rng.shuffle(self._drawn)
            ids = self._tokenizer.encode(render(self._drawn.pop())).ids
            if len(ids) <= most:
                return ids, list(self.replies(ids))

    def replies(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        head = [self._start, *self._role]
        for start in (i for i, token in enumerate(ids) if token == self._start):
            if ids[start : start + len(head)] == head:
                yield start + len(head) + 1, ids.index(self._end, start) + 1

    def _messages(self, kind: str) -> list[dict[str, str]]:
        (asked,) = demo_tasks.questions(kind, 1, self._rng.getrandbits(60), held_out=False)
        return [*asked.messages, {"role": "assistant", "content": asked.answer}]


def draw_rows(source: Conversations, num_tokens: int, rng: Random) -> tuple[Tensor, Tensor, Starts]:
    """ids and number, [rows, tokens] each, of `num_tokens` or a little less in all, and where chains begin."""
    size = rng.choice([size for size in ROWS if size <= num_tokens])
    rows = num_tokens // size
    ids, number = torch.zeros(rows, size, dtype=torch.long), torch.zeros(rows, size, dtype=torch.long)
    found: list[tuple[int, int, int]] = []
    for row in range(rows):
        filled, count = 0, 0
        while filled < size - 100:
            tokens, replies = source.next(size - filled)
            count += 1
            ids[row, filled : filled + len(tokens)] = torch.tensor(tokens)
            number[row, filled : filled + len(tokens)] = count
            for reply in replies:
                starts = list(chain_starts(*reply))
                for position, length in rng.sample(starts, min(MOST_STARTS, len(starts))):
                    found.append((row, filled + position, length))
            filled += len(tokens)
    return ids, number, Starts(*torch.tensor(found).unbind(1))


def chain_starts(first: int, end: int) -> Iterator[tuple[int, int]]:
    """For a reply of the tokens first to end - 1, its end marker among them: positions and lengths of chains."""
    for said in range(first, end - 1):
        yield said - 1, min(CHAIN, end - 1 - said)


@torch.inference_mode()
def tell(demo: DemoModel, ids: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """The demo model's hidden states [rows, tokens, 3 * hidden] and its logits [rows, tokens, vocab_size]."""
    index = torch.arange(ids.shape[1])
    fresh = torch.ones_like(number, dtype=torch.bool)
    fresh[:, 1:] = number[:, 1:] != number[:, :-1]
    positions = index - torch.where(fresh, index, 0).cummax(dim=1).values
    mask = ((number[:, :, None] == number[:, None, :]) & (index[:, None] >= index))[:, None]
    cos, sin = demo.angles(positions)
    x, states = demo.embed_tokens(ids), []
    for layer_index, layer in enumerate(demo.layers):
        if layer_index in AUX_LAYERS:
            states.append(x)
        x = layer(x, cos, sin, mask)
    return torch.cat(states, dim=-1), F.linear(demo.norm(x), demo.embed_tokens.weight)


def following(demo: DemoModel, ids: Tensor) -> Tensor:
    """The embedding of the token behind each, [rows, tokens, hidden]."""
    return F.embedding(ids.roll(-1, dims=1), demo.embed_tokens.weight).detach()


def draft_vocabulary(source: Conversations, size: int, conversations: int = 500) -> Tensor:
    """The tokens that replies have most often, ascending; replies of each conversation count alike."""
    counts = torch.zeros(Shape.vocab_size)
    for _ in range(conversations):
        ids, replies = source.next(1 << 20)
        said = torch.tensor([token for first, end in replies for token in ids[first:end]])
        counts += torch.bincount(said, minlength=len(counts)) / len(said)
    return counts.topk(size).indices.sort().values


# --- training -------------------------------------------------------------------------------------------------


class Budget:
    """The share of the run that is over, by the processor's time or the clock's."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._processor_s, self._wall_s = 60 * options.processor_minutes, 60 * options.wall_minutes
        self._began = time.process_time(), time.monotonic()

    def done(self) -> float:
        processor, wall = time.process_time() - self._began[0], time.monotonic() - self._began[1]
        return min(1.0, max(processor / self._processor_s, wall / self._wall_s))


def train(options: argparse.Namespace, demo: DemoModel, tokenizer: Tokenizer) -> None:
    """Writes the head now and then, and when the time is over."""
    torch.manual_seed(options.seed)
    rng, budget = Random(options.seed), Budget(options)
    source = Conversations(tokenizer, rng)
    vocabulary = draft_vocabulary(source, HeadShape.draft_vocab_size)
    head = Head(HeadShape())
    with torch.no_grad():
        head.lm_head.weight.copy_(demo.embed_tokens.weight[vocabulary])
        head.norm.weight.copy_(0.3 * demo.norm.weight)  # unsure at first
    named = list(head.named_parameters())
    others = [p for name, p in named if p.ndim != 2 or "lm_head" in name]
    muon = Muon([p for name, p in named if p.ndim == 2 and "lm_head" not in name])
    adam = torch.optim.AdamW(others, lr=options.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    recent: list[Batch] = []
    losses: list[list[float]] = []
    step, shown_at, done = 0, time.monotonic(), 0.0
    while done < 1:
        if step % options.reuse == 0:
            recent = [*recent[-options.recent + 1 :], new_batch(demo, source, vocabulary, options.tokens, rng)]
        batch = recent[-1] if step % options.reuse == 0 else rng.choice(recent)
        losses.append(gradients(head, demo, batch))
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        done = budget.done()
        scale = min(1.0, (step + 1) / 20) * min(1.0, (1 - done) / (1 - options.decay_from))
        muon.step(options.muon_lr * scale)
        for group in adam.param_groups:
            group["lr"] = options.adam_lr * scale
        adam.step()
        head.zero_grad(set_to_none=True)
        step += 1
        if time.monotonic() - shown_at > options.show_every or done >= 1:
            means = torch.tensor(losses).mean(0).tolist()
            print(f"step {step:6d}  {done:5.1%}  loss {' '.join(f'{one:.3f}' for one in means)}", flush=True)
            losses, shown_at = [], time.monotonic()
            write_head(head, vocabulary, options.out)


def new_batch(demo: DemoModel, source: Conversations, vocabulary: Tensor, num_tokens: int, rng: Random) -> Batch:
    ids, number, starts = draw_rows(source, num_tokens, rng)
    states, logits = tell(demo, ids, number)
    return Batch(ids, number, states, logits.softmax(-1)[..., vocabulary], starts)


def gradients(head: Head, demo: DemoModel, batch: Batch) -> list[float]:
    """Adds those of one batch; returns the loss of each draft of a chain."""
    starts, losses = batch.starts, []
    total = torch.zeros(())
    chain = head.chain(batch.states.clone(), following(demo, batch.ids), batch.number, starts)
    for step, logits in enumerate(chain):
        at = (starts.position + step + 1).clamp(max=batch.ids.shape[1] - 1)
        said = batch.probabilities[starts.row, at].clone()
        loss = -(said * logits.log_softmax(-1)).sum(-1)[starts.length > step].mean()
        total = total + 0.8**step * loss
        losses.append(loss.item())
    total.backward()
    return losses


# --- the folder -----------------------------------------------------------------------------------------------


def write_head(head: Head, vocabulary: Tensor, folder: Path) -> None:
    """config.json and model.safetensors (bfloat16), as heads are published."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **asdict(head.shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    write_json(folder / "config.json", config)
    tensors = {name: value.detach().bfloat16() for name, value in head.state_dict().items()}
    is_drafted = torch.zeros(head.shape.vocab_size, dtype=torch.bool)
    is_drafted[vocabulary] = True
    tensors |= {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": is_drafted}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # save_file leaves it to its owner alone


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=DEMO.with_name("demo_eagle3"), help="folder to write")
    add("--processor-minutes", type=float, default=15.0, help="of all threads; the learning rate falls to 0 over them")
    add("--wall-minutes", type=float, default=60.0, help="at most so long on the clock, where others compute, too")
    add("--threads", type=int, default=2)
    add("--tokens", type=int, default=2048, help="of a batch")
    add("--reuse", type=int, default=4, help="steps for each new batch")
    add("--recent", type=int, default=64, help="batches of which others are drawn")
    add("--muon-lr", type=float, default=0.02, help="peak learning rate of the matrices")
    add("--adam-lr", type=float, default=3e-3, help="peak learning rate of norms and output projection")
    add("--decay-from", type=float, default=0.3, help="share of the run after which the learning rate falls")
    add("--show-every", type=float, default=20.0, help="seconds; the head so far is written then, too")
    add("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    demo, tokenizer = load_folder(DEMO).float().eval(), Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    demo.requires_grad_(False)
    train(options, demo, tokenizer)


if __name__ == "__main__":
    main()
