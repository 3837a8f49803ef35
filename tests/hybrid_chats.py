"""A small random model with states, a template of chats that renders an answer's beginning otherwise later, and chats
for it."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.parity.checkpoint_options import VOCAB_SIZE
from tests.parity.checkpoints import save_checkpoint, save_tokenizer

BEGINNING = 3  # tokens of an answer's that a later turn renders otherwise, and those before its end that it leaves out
TEMPLATE = (
    "{% for m in messages %}{{ 'w1 ' if m.role == 'user' else 'w2 ' if m.role == 'system' else 'w3 w4 ' }}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}w3 w4 w5 {% endif %}"
)


def save_hybrid(folder: Path) -> Path:
    """Writes the checkpoint, with words as its tokens, and returns its folder."""
    save_checkpoint("qwen3_5", folder)
    save_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    words = json.loads((folder / "tokenizer.json").read_text())
    words["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "w[0-9]+ "},
        "behavior": "Isolated",
        "invert": False,
    }
    # Single letters are what short chats ask with.
    words["model"]["vocab"] = {
        {"w8 ": "x", "w9 ": "7"}.get(word, word): at for word, at in words["model"]["vocab"].items()
    }
    (folder / "tokenizer.json").write_text(json.dumps(words))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": TEMPLATE}))
    return folder


def words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10, VOCAB_SIZE) for _ in range(count)]


def text_of(tokens: list[int]) -> str:
    return "".join(f"w{token} " for token in tokens)


def text(draw: random.Random, count: int) -> str:
    return text_of(words(draw, count))
