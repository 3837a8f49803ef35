"""Small tokenizer folders: tokenizer.json of two kinds, with any tokenizer_config.json beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS, UNK = "<s>", "</s>", "<unk>"
END = "<|endoftext|>"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,'!<>/|_"
POST_PROCESSORS: dict[str, Any] = {
    "none": None,
    "byte_level": processors.ByteLevel(trim_offsets=False),
    "bos": ("<s> $A", "<s> $A <s> $B"),
    "eos": ("$A </s>", "$A </s> $B </s>"),
    "both": ("<s> $A </s>", "<s> $A </s> <s> $B </s>"),
    "end": ("$A <|endoftext|>", "$A <|endoftext|> $B <|endoftext|>"),
}


def byte_level(*, digits: bool = False, prefix_space: bool = False) -> Tokenizer:
    """Letters are single tokens. `digits`: numbers are cut into groups of three, which GPT-2's split does not do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([BOS, EOS, UNK, END, *alphabet, "12", "Ġa", "45"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2"), ("Ġ", "a"), ("4", "5")]))
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    if digits:
        cut = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
        words = pre_tokenizers.Sequence([cut, words])
    backend.pre_tokenizer = words
    backend.decoder = decoders.ByteLevel()
    return backend


def sentencepiece(*, metaspace: bool = False) -> Tokenizer:
    """As Llama 2's. `metaspace`: as newer files write the space in front."""
    tokens = [UNK, BOS, EOS, END, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS, "12", "▁a", "45"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("1", "2"), ("▁", "a"), ("4", "5")],
            unk_token=UNK,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return backend


def write_folder(
    folder: Path,
    backend: Tokenizer,
    config: dict[str, Any],
    *,
    post_processor: str = "none",
    special: tuple[str, ...] = (BOS, EOS, UNK, END),
    model: dict[str, Any] | None = None,
) -> Path:
    """`config`: tokenizer_config.json; `model`: config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    made = POST_PROCESSORS[post_processor]
    if isinstance(made, tuple):
        single, pair = made
        named = [(token, backend.token_to_id(token)) for token in (BOS, EOS, END)]
        made = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)
    if made is not None:
        backend.post_processor = made
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(model or {"model_type": "llama"}), encoding="utf-8")
    return folder
