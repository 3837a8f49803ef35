"""How llama.cpp's pre-tokenizers, the values of tokenizer.ggml.pre, cut a text into words, within which merges apply:
all that a GGUF file has of it is that name. Needs no tokenizers.

Expressions are those of the models' own tokenizer.json, of which llama.cpp's are adaptations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LINES = r"\s*[\r\n]+"
_BLANKS = r"\s+(?!\S)|\s+"
_MANY_BLANKS = "|".join([rf"\s{{{1 << n}}}(?!\S)" for n in range(9, 1, -1)] + [r"\s{1,2}(?!\S)|\s{1}"])


def _any(*expressions: str, blanks: str = _BLANKS) -> str:
    return "|".join((*expressions, blanks))


def _by_case(end: str = "", but: str = "") -> str:
    """Words that end before a capital. `end`: what belongs to them; `but`: which of their letters do not count."""
    first, then = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    return "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}{end}" for word in (f"{first}*{then}+", f"{first}+{then}*"))


_LINE_BY_LINE = r"[^\n]+|[\n]+"
_GPT2 = _any(r"'s|'t|'re|'ve|'m|'ll|'d", r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+")
_LLAMA3 = _any(_CONTRACTIONS, _WORD, _DIGITS, _SIGNS, _LINES)
_QWEN2 = _any(_CONTRACTIONS, _WORD, _DIGIT, _SIGNS, _LINES)
_GPT4O = _any(_by_case(f"{_CONTRACTIONS}?"), _DIGITS, _SIGNS_AND_SLASHES, _LINES)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HAN_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_AFTER_A_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = _any(_AFTER_A_SIGN, _MARKED_WORD, r" ?[\p{P}\p{S}]+[\r\n]*", _LINES)
# Letters that have a case, as deepseek-llm's tokenizer.json lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_HAN_OR_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_HAN_OR_KANA}"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """One or more values of tokenizer.ggml.pre. `splits`: expressions; each cuts what the one before it left, into its
    matches and what lies between them."""

    splits: tuple[str, ...]
    add_bos: bool = False  # where tokenizer.ggml.add_bos_token is absent
    ignore_merges: bool = False  # a word that is a token is this token, whatever its merges give
    byte_level: bool = True  # tokens are spelled in GPT-2's letters for bytes; else in UTF-8, with U+2581 for blanks


def _pre(*splits: str, add_bos: bool = False, ignore_merges: bool = False, byte_level: bool = True) -> PreTokenizer:
    return PreTokenizer(splits=splits, add_bos=add_bos, ignore_merges=ignore_merges, byte_level=byte_level)


_LIKE_GPT2 = _pre(_GPT2)
_LIKE_STARCODER = _pre(_DIGIT, _GPT2)
_LIKE_LLAMA3 = _pre(_LLAMA3, add_bos=True, ignore_merges=True)
_LIKE_QWEN2 = _pre(_QWEN2)
_LIKE_DEEPSEEK3 = _pre(_DIGITS, _HAN_OR_KANA, _DEEPSEEK3)
_LIKE_GPT4O = _pre(_GPT4O)
_LIKE_BLOOM = _pre(_BLOOM)
_LIKE_BAILING = _pre(
    _any(r"'(?i:[sdmt]|ll|ve|re)", r"[^\r\n\p{L}\p{N}]?+\p{L}+", _DIGIT, r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]")
)
_LIKE_TINY_AYA = _pre(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)

# What llama.cpp takes, with a warning, where the key is absent.
DEFAULT = "default"
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    DEFAULT: _pre(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "jina-v1-en", "jina-v2-code"),
            *("roberta-bpe", "modern-bert", "gigachat", "a.x-4.0", "mellum", "mpt", "olmo", "jais", "trillion"),
            *("granite-docling", "exaone4"),
        ),
        _LIKE_GPT2,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _LIKE_STARCODER
    ),
    **dict.fromkeys(
        (
            *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
            "jina-v5-nano",
        ),
        _LIKE_LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _pre(_LLAMA3)),
    **dict.fromkeys(("glm4", "glm5"), _pre(_LLAMA3, ignore_merges=True)),
    **dict.fromkeys(
        (
            *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open"),
            "grok-2",
        ),
        _LIKE_QWEN2,
    ),
    "qwen35": _pre(
        _any(_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", _DIGIT, r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _LINES)
    ),
    "ufakzeka": _pre(_any(_WORD, _DIGIT, _SIGNS, _LINES)),
    "laguna": _pre(_LINE_BY_LINE, _QWEN2),
    "minicpm5": _pre(_DIGITS, _any(_CONTRACTIONS, _WORD, r"\p{N}+", _SIGNS, _LINES), ignore_merges=True),
    "seed-coder": _pre(_any(_CONTRACTIONS, _WORD, _DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+", _LINES)),
    "exaone-moe": _pre(
        _any(
            *(_CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", _DIGIT),
            *(r" ?[^\s\p{L}\p{N}]+[\r\n/]?", r"\s*[\r\n]"),
        )
    ),
    "jais-2": _pre(_any(_CONTRACTIONS, _WORD, _DIGITS, _SIGNS, _LINES, blanks=_MANY_BLANKS)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _LIKE_BAILING),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _LIKE_GPT4O),
    "granite-embed-multi-97m": _pre(_GPT4O, ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _LIKE_TINY_AYA),
    "tekken": _pre(_any(_by_case(), _DIGIT, _SIGNS_AND_SLASHES, _LINES), add_bos=True, ignore_merges=True),
    "youtu": _pre(
        _YOUTU_SCRIPTS, _any(_by_case(f"{_CONTRACTIONS}?"), _DIGIT, _SIGNS_AND_SLASHES, _LINES), ignore_merges=True
    ),
    "kimi-k2": _pre(_any(r"[\p{Han}]+", _by_case(f"{_CONTRACTIONS}?", r"&&[^\p{Han}]"), _DIGITS, _SIGNS, _LINES)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _LIKE_DEEPSEEK3),
    "spark2_5": _pre(_DIGITS, _HAN_OR_KANA, _any(_AFTER_A_SIGN, _MARKED_WORD, r" ?[\p{P}\p{S}]+", r"[\r\n]"), _DIGIT),
    "afmoe": _pre(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, _DEEPSEEK3),
    "deepseek-llm": _pre(
        *(r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        *(r"\s+$", _HAN_OR_HANGUL, r"\p{N}+"),
    ),
    "deepseek-coder": _pre(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_OR_HANGUL, _DIGIT),
    "falcon": _pre(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _LIKE_BLOOM),
    "viking": _pre(_BLOOM, _DIGIT),
    "superbpe": _pre(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "chameleon": _pre(
        *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", _DIGIT),
        *(r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        add_bos=True,
    ),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _pre(_LINE_BY_LINE, add_bos=True, byte_level=False)),
    "sarvam-moe": _pre(_LINE_BY_LINE, byte_level=False),
}
