"""Token ids of real tokenizers, and of small ones with any files beside them, against transformers 4.57's."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from minisgl_backend.text.tokenizer import load_tokenizer
from tests.environments import environment_behind
from tests.real.models import PLAIN_TOKENIZERS, TOKENIZERS, tokenizer
from tests.tokenizer_folders import BOS, END, EOS, POST_PROCESSORS, UNK, byte_level, sentencepiece, write_folder

TEXTS = (
    "a 12345 cab",
    "<s>a b</s> <|endoftext|>  c<new> d<x><y> e<z>ab <old> x",
    " 12",
    "Hello world, it's 12345.67 naïve Straße 你好世界 🙂\n\n\tdef f(x):  return x<=y",
    "<|im_start|>user\nhi<|im_end|> <bos>x<｜end▁of▁sentence｜> x",
    "",
)
BYTE_LEVEL = ("GPTNeoXTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "BloomTokenizer", "CodeGenTokenizer")
ANY = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "PreTrainedTokenizer")
REFERENCE = """
import json, sys
from transformers import AutoTokenizer, __version__
assert __version__.startswith("4.57"), __version__
folders, texts = json.load(sys.stdin)
found = []
for folder in folders:
    one = AutoTokenizer.from_pretrained(folder)
    ids = [one(text, add_special_tokens=flag)["input_ids"] for text in texts for flag in (True, False)]
    pair = one.backend_tokenizer.encode(texts[0], texts[2]).ids
    found.append([ids, pair, one.bos_token, one.eos_token])
json.dump(found, sys.stdout)
"""
PER_CLASS = 60


def make(folder: Path, name: str, choose: random.Random) -> None:
    """A folder of this class whose other files say anything."""
    is_byte_level = name in BYTE_LEVEL or choose.random() < 0.5
    if is_byte_level:
        backend = byte_level(digits=choose.random() < 0.5, prefix_space=choose.random() < 0.3)
    else:
        backend = sentencepiece(metaspace=choose.random() < 0.5)

    def token(text: str) -> Any:
        attributes = {key: choose.random() < 0.3 for key in ("lstrip", "rstrip", "normalized")}
        return choose.choice([text, {"__type": "AddedToken", "content": text, "single_word": False, **attributes}])

    special = (BOS, EOS, UNK, END)[: choose.choice([3, 4])]
    options: dict[str, tuple[Any, ...]] = {
        "add_bos_token": (True, False, None),
        "add_eos_token": (True, False, None),
        "pad_token": (EOS, END, None),
        # Llama's class would read tokenizer.model anew.
        "add_prefix_space": (True, False, None) if name != "LlamaTokenizer" else (None,),
        "legacy": (True, False, None),
        "split_special_tokens": (True, False),
        "padding_side": ("left", "right"),
        "additional_special_tokens": (["<x>", "<y>"], ["ab", EOS]),
    }
    config: dict[str, Any] = {key: choose.choice(values) for key, values in options.items() if choose.random() < 0.5}
    config |= {"tokenizer_class": name + choose.choice(["", "Fast"]), "unk_token": UNK}
    config |= {"bos_token": token(BOS), "eos_token": token(choose.choice([EOS, END]))}
    if name in ("GemmaTokenizer", "BloomTokenizer"):
        config.setdefault("pad_token", EOS)  # its own is no token of these
    if name == "CodeGenTokenizer":
        config.pop("add_bos_token", None)  # refused
    if choose.random() < 0.4:
        new = choose.sample([BOS, EOS, "<new>", "<x>"], 2)
        tokens = {
            text: backend.token_to_id(text) or backend.get_vocab_size() + i for i, text in enumerate(new, start=9)
        }
        config["added_tokens_decoder"] = {
            str(i): {"content": text, "special": choose.random() < 0.7, "normalized": choose.random() < 0.5}
            for text, i in tokens.items()
        }
    if choose.random() < 0.3:
        backend.enable_truncation(5)
    if choose.random() < 0.3:
        backend.enable_padding(length=20, pad_token=EOS, pad_id=backend.token_to_id(EOS))
    write_folder(folder, backend, config, post_processor=choose.choice(list(POST_PROCESSORS)), special=special)
    if choose.random() < 0.3:
        older = {"eos_token": {"content": END, "lstrip": False}, "additional_special_tokens": ["<z>"]}
        (folder / "special_tokens_map.json").write_text(json.dumps(older))
        (folder / "added_tokens.json").write_text(json.dumps({"<old>": backend.get_vocab_size() + 3}))


@pytest.mark.full
def test_the_tokens_of_transformers_4(tmp_path: Path) -> None:
    folders = [tokenizer(name) for name in (*TOKENIZERS, *PLAIN_TOKENIZERS)]
    choose = random.Random(5)
    for name in (*BYTE_LEVEL, *ANY):
        for number in range(PER_CLASS):
            folders.append(tmp_path / f"{name}-{number}")
            make(folders[-1], name, choose)
    python = environment_behind(tmp_path / "behind", "transformers==4.57.6", "tokenizers==0.22.2")
    given = json.dumps([[str(folder) for folder in folders], TEXTS])
    done = subprocess.run(
        [python, "-c", REFERENCE], input=given, capture_output=True, text=True, check=True, timeout=600
    )
    for folder, expected in zip(folders, json.loads(done.stdout), strict=True):
        one = load_tokenizer(folder)
        ids = [one(text, add_special_tokens=flag)["input_ids"] for text in TEXTS for flag in (True, False)]
        pair = one.backend_tokenizer.encode(TEXTS[0], TEXTS[2]).ids
        assert [ids, pair, one.bos_token, one.eos_token] == expected, folder
