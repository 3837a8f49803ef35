"""Stop strings: found at every split, nothing of them leaks, nothing else is lost."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from minisgl_backend.text.stop_strings import StopStrings

LETTERS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, bool]:
    search = StopStrings(stops, include=include)
    out = []
    for piece in pieces:
        text, found = search.feed(piece)
        out.append(text)
        if found:
            return "".join(out), True
    return "".join(out) + search.finish(), False


def cut(text: str, cuts: list[int]) -> list[str]:
    borders = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(borders)]


@given(STOPS, LETTERS, st.lists(st.integers(0, 30)))
def test_the_split_does_not_matter(stops: list[str], text: str, cuts: list[int]) -> None:
    assert run(stops, cut(text, cuts)) == run(stops, list(text)) == run(stops, [text])


@given(STOPS, LETTERS, st.lists(st.integers(0, 30)))
def test_nothing_of_a_stop_string_leaks(stops: list[str], text: str, cuts: list[int]) -> None:
    out, found = run(stops, cut(text, cuts))
    assert found == any(stop in text for stop in stops)
    assert text.startswith(out)
    assert not any(stop in out for stop in stops)
    if not found:
        assert out == text


@given(STOPS, LETTERS)
def test_included_it_is_the_end_of_the_text(stops: list[str], text: str) -> None:
    out, found = run(stops, [text], include=True)
    if found:
        assert any(out.endswith(stop) for stop in stops)


def test_text_that_cannot_become_a_stop_string_is_not_held_back() -> None:
    search = StopStrings(["\n\nUser:"])
    assert search.feed("hello\n") == ("hello", False)
    assert search.feed("you") == ("\nyou", False)


def test_the_first_complete_one_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", True)


def test_empty_strings_mean_nothing() -> None:
    assert run(["", ""], ["abc"]) == ("abc", False)
