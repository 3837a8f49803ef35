"""Real tokenizers: streams cut at every token over texts of many languages, and templates over histories, against
transformers."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import transformers

from minisgl_backend.text.detokenizer import new_detokenizer
from minisgl_backend.text.tokenizer import Tokenizer
from minisgl_backend.text.vocabulary import Vocabulary, load_vocabulary
from tests.real.models import TOKENIZERS, tokenizer

pytestmark = pytest.mark.full

CORPUS = (
    "The quick brown fox can't jump over 12,345.67 lazy dogs; e.g. U.S.A.'s   three  spaces.",
    "Zürich, Straße, naïve café, Ångström, Łódź, İstanbul, Đà Nẵng, žluťoučký kůň.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Їжак і ґанок.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. ᾿Αθῆναι.",
    "السلام عليكم ورحمة الله وبركاته، كيف حالك؟ ١٢٣ فارسی: می‌خواهم",
    "שלום עולם, מה שלומך? עִבְרִית",
    "नमस्ते दुनिया, क्या हाल है? संस्कृतम् ज्ञानम्। বাংলা ভাষা, தமிழ் மொழி, తెలుగు, ಕನ್ನಡ, മലയാളം, ગુજરાતી, ਪੰਜਾਬੀ.",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง ลาว: ສະບາຍດີ ខ្មែរ: សួស្តី မြန်မာ: မင်္ဂလာပါ བོད་ཡིག བཀྲ་ཤིས།",
    "你好，世界！今天天气怎么样？𠮷野家、㊙️、「繁體中文」與简体中文。",
    "こんにちは世界。カタカナとひらがな、漢字が混ざった文章です。ﾊﾝｶｸ",
    "안녕하세요 세계! 한국어 문장입니다. 각 (각)",
    "አማርኛ ሰላም ለዓለም። ქართული ენა. Հայերեն լեզու. ᏣᎳᎩ ᚠᚢᚦ 𐌲𐌿𐍄 𒀭 𓀀",
    "🙂👍🏽👩‍👩‍👧‍👦🏳️‍🌈🇨🇭 ❤️‍🔥 e\u0301 a\u0308\u0323 Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, ∫₀^∞ e^{−x²}dx = √π⁄2 ≠ ½, ℵ₀, ½, ①, Ⅷ, ﬁ ﷽",
    "def f(x):\n\treturn {'a': [1, 2], \"b\": x ** 2}  # naïve\n\n\n    if x != 3:\r\n        pass\n",
    "<|im_start|>user</s><think> [INST] {{ messages }} <tool_call> \\n \\u00e9 &amp; \u200b\u2060\ufeff.",
    " leading,  double  and trailing spaces   ",
    "\n\n\t tabs\t\tand\n\n\nlines \n",
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WITH_TOOLS = ("qwen3", "gptoss")  # the templates of the other packages have no words for them
MOST_TURNS = 5


@cache
def loaded(name: str) -> tuple[Tokenizer, Vocabulary, Any]:
    """This project's tokenizer and vocabulary, and transformers' tokenizer."""
    folder = tokenizer(name)
    return Tokenizer(folder), load_vocabulary(folder), transformers.AutoTokenizer.from_pretrained(folder)


def histories() -> list[list[dict[str, Any]]]:
    """30: of 1 to 5 turns with texts of the corpus, half of them behind a system message."""
    found = []
    for index in range(30):
        turns = index % MOST_TURNS + 1
        system = [{"role": "system", "content": f"Be brief. {CORPUS[index % len(CORPUS)]}"}] if index % 2 else []
        texts = [CORPUS[(3 * index + turn) % len(CORPUS)] for turn in range(2 * turns - 1)]
        roles = ("user", "assistant")
        found.append([*system, *({"role": roles[turn % 2], "content": text} for turn, text in enumerate(texts))])
    return found


def with_a_call(history: list[dict[str, Any]], arguments: Any) -> list[dict[str, Any]]:
    """The last question is answered by a call of a tool, whose result follows."""
    call = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    asks: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [*history, asks, {"role": "tool", "tool_call_id": "abcdef123", "content": "22 degrees"}]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_stream_cut_anywhere_has_the_text_of_the_whole(name: str) -> None:
    """In two parts at every token, and token by token."""
    ours, vocabulary, theirs = loaded(name)
    for text in CORPUS:
        ids = ours.encode(text, add_special_tokens=False)
        whole = theirs.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"]
        cuts = [[ids[:cut], ids[cut:]] for cut in range(len(ids) + 1)]
        for parts in (*cuts, [[token] for token in ids]):
            stream = new_detokenizer(vocabulary)
            assert "".join(map(stream.feed, parts)) + stream.finish() == vocabulary.decode(ids)
        assert ours.decode(ids) == whole


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_template_makes_what_transformers_makes_of_it(name: str) -> None:
    ours, _, theirs = loaded(name)
    arguments = {"city": "Zürich"}
    for history in histories():
        for more in ({}, {"enable_thinking": False}):
            expected = theirs.apply_chat_template(history, tokenize=False, add_generation_prompt=True, **more)
            assert ours.render(history, **more) == expected
        if name in WITH_TOOLS:
            options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "tools": [WEATHER]}
            expected = theirs.apply_chat_template(with_a_call(history, arguments), **options)
            assert ours.render(with_a_call(history, json.dumps(arguments)), tools=[WEATHER]) == expected
