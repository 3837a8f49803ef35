"""Sampling parameters as people write them: one spelling inside, wrong types refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl_backend.errors import InvalidRequestError
from minisgl_backend.request import Grammar, SamplingParams


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "", "b"]}, {"stop": ("a", "b")}),
        ({"stop": None, "max_tokens": None, "temperature": None, "logit_bias": None, "n": None}, {}),
        ({"bad_words": "12"}, {"bad_words": ("12",)}),
        ({"bad_words_token_ids": [[1, 2], [3]]}, {"bad_words_token_ids": ((1, 2), (3,))}),
        ({"stop_token_ids": 7}, {"stop_token_ids": (7,)}),
        ({"stop_token_ids": np.array([7, 8])}, {"stop_token_ids": (7, 8)}),
        ({"logit_bias": {"77": 100}}, {"logit_bias": {77: 100.0}}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"cache_salt": "tenant 7 ä"}, {"cache_salt": "tenant 7 ä"}),
        ({"top_k": 50.0}, {"top_k": 50}),
        ({"top_p": 0}, {"top_p": 1.0}),
        ({"temperature": np.float32(0.5), "seed": np.int64(3)}, {"temperature": 0.5, "seed": 3}),
    ],
)
def test_one_spelling_inside(values: dict[str, Any], expected: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert params == SamplingParams(**expected)
    assert all(getattr(params, name) == value for name, value in expected.items())
    params.validate(1024)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens is '5'; allowed: an integer"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; allowed: an integer"),
        ({"n": True}, "n is True; allowed: an integer"),
        ({"temperature": "0"}, "temperature is '0'; allowed: a number"),
        ({"ignore_eos": 1}, "ignore_eos is 1; allowed: True or False"),
        ({"stop": 5}, "stop is 5; allowed: a text or a list of texts"),
        ({"stop": [b"x"]}, "stop is b'x'; allowed: a text or a list of texts"),
        ({"stop_token_ids": "7"}, "stop_token_ids is '7'; allowed: a list of token ids"),
        ({"logit_bias": [1]}, "logit_bias is .*; allowed: a mapping of token id to bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias is 'x'; allowed: an integer"),
        ({"grammar": "json"}, "grammar is 'json'; allowed: a Grammar"),
        ({"cache_salt": 5}, "cache_salt is 5; allowed: a text"),
        ({"cache_salt": "\ud800"}, "cache_salt is .*; allowed: Unicode text"),
    ],
)
def test_a_wrong_type_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**values)


def test_a_changed_copy_is_checked_too() -> None:
    params = SamplingParams(grammar=Grammar(kind="json"))
    assert msgspec.structs.replace(params, stop="x").stop == ("x",)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": 1e-38}, "repetition_penalty is 1e-38; allowed: 0.01 to 100"),
        (
            {"bad_words_token_ids": [[1] * 129]},
            "bad_words is a word of 129 tokens; allowed: words of at most 128 tokens",
        ),
        ({"cache_salt": ""}, "cache_salt is 0 bytes; allowed: a text of 1 to 1024"),
        ({"cache_salt": "ä" * 513}, "cache_salt is 1026 bytes; allowed: a text of 1 to 1024"),
        ({"bad_words_token_ids": [[1] * 128] * 65}, "bad_words is 8320 tokens together; allowed: at most 8192"),
        ({"bad_words_token_ids": [[1]] * 2049}, "bad_words is 2049 entries; allowed: at most 2048"),
    ],
)
def test_what_would_cost_others_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**values).validate(1024)


def test_what_is_just_allowed() -> None:
    SamplingParams(repetition_penalty=float(np.float32(0.01))).validate()
    SamplingParams(bad_words_token_ids=[[1] * 128] * 64).validate(1024)
    SamplingParams(bad_words_token_ids=[[1]] * 2048).validate(1024)


@pytest.mark.parametrize(
    ("given", "seed"), [(-1, None), (-2, 2**64 - 2), (-(2**63), 2**63), (0, 0), (2**64 - 1, 2**64 - 1), (None, None)]
)
def test_seeds_are_64_bits_signed_or_not_and_minus_one_is_any(given: int | None, seed: int | None) -> None:
    params = SamplingParams(seed=given)
    params.validate()
    assert params.seed == seed


@pytest.mark.parametrize("given", [-(2**63) - 1, 2**64])
def test_seeds_beyond_64_bits_are_refused(given: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"seed is .*; allowed: -2"):
        SamplingParams(seed=given).validate()
