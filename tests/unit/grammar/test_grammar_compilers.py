"""Where grammars are compiled: what takes long harms nobody but its sender."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl_backend.errors import MinisglError
from minisgl_backend.grammar.compiling import cache as grammar_cache
from minisgl_backend.grammar.compiling import compiler as grammar_process
from minisgl_backend.grammar.compiling import compilers as grammar_compilers
from minisgl_backend.grammar.compiling import processes as grammar_processes
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers, Job, Limits
from minisgl_backend.grammar.compiling.reply import CompilerReply
from minisgl_backend.grammar.compiling.tokenizer_info import TokenizerSource
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.process.processes import process_table
from minisgl_backend.request import Grammar

xgrammar = pytest.importorskip("xgrammar")

ENDLESS = "a?" * 20_000 + "a" * 20_000  # minutes, and 30 MB more each second


class Outcomes:
    """What came of grammars, by their texts."""

    def __init__(self, compilers: GrammarCompilers) -> None:
        self.compilers = compilers
        self.of: dict[str, tuple[Any, MinisglError | None]] = {}
        self.abandoned: set[str] = set()

    def limit(self, **changes: Any) -> Limits:
        self.compilers.limits = dataclasses.replace(self.compilers.limits, **changes)
        return self.compilers.limits

    def submit(self, text: str) -> None:
        def done(compiled: Any, error: MinisglError | None) -> None:
            self.of[text] = compiled, error

        grammar = Grammar(kind="regex", text=text)
        self.compilers.submit(Job(grammar=grammar, is_awaited=lambda: text not in self.abandoned, done=done))

    def wait(self, *texts: str) -> None:
        wait_for(lambda: all(text in self.of for text in texts))

    def error(self, text: str) -> str:
        self.wait(text)
        compiled, error = self.of[text]
        assert compiled is None
        assert error is not None
        return f"{type(error).__name__}: {error}"


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def compilers() -> Iterator[GrammarCompilers]:
    """With real processes."""
    folder = find_model_dir("demo")
    model = ModelConfig.load(folder)

    compilers = GrammarCompilers(TokenizerSource(str(folder), False, model.vocab_size, list(model.eos_token_ids)))
    yield compilers
    compilers.close()
    wait_for(lambda: not compiler_pids())


def compiler_pids() -> list[int]:
    """Of this process' children those that run a module of `minisgl_backend.grammar`: tests before may have left it
    engines, which are restarted when they are killed."""
    children = [one.pid for one in process_table().values() if one.parent == os.getpid() and not one.dead]
    return [pid for pid in children if "minisgl_backend.grammar." in command_line(pid)]


def command_line(pid: int) -> str:
    """Empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_grammar_that_never_ends_holds_nobody_up(compilers: GrammarCompilers) -> None:
    outcomes = Outcomes(compilers)
    outcomes.submit(ENDLESS)
    outcomes.submit("[a-c]{3}")
    outcomes.wait("[a-c]{3}")
    assert ENDLESS not in outcomes.of
    assert outcomes.of["[a-c]{3}"][1] is None
    outcomes.abandoned.add(ENDLESS)  # its client leaves
    assert outcomes.error(ENDLESS) == (
        "InvalidRequestError: guided_decoding_guide takes longer than 30 s to compile; allowed: a simpler one"
    )


def test_a_compiler_that_dies_takes_one_grammar_with_it(compilers: GrammarCompilers) -> None:
    outcomes = Outcomes(compilers)
    outcomes.submit("[x-z]{3}")
    outcomes.wait("[x-z]{3}")
    outcomes.submit(ENDLESS)
    wait_for(lambda: compilers.num_waiting == 0)
    time.sleep(0.3)
    for pid in compiler_pids():
        os.kill(pid, signal.SIGKILL)
    assert "InvalidRequestError: guided_decoding_guide cannot be compiled: the compiler died" in outcomes.error(ENDLESS)
    outcomes.submit("[u-w]{3}")
    outcomes.wait("[u-w]{3}")
    assert outcomes.of["[u-w]{3}"][1] is None


def test_a_compiler_that_dies_idle_is_replaced_once(compilers: GrammarCompilers) -> None:
    outcomes = Outcomes(compilers)
    outcomes.submit("[g-i]{2}")
    outcomes.wait("[g-i]{2}")
    for pid in compiler_pids():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not compiler_pids())
    time.sleep(0.5)  # until their last threads have gone
    outcomes.submit("[g-i]{3}")
    outcomes.wait("[g-i]{3}")
    assert outcomes.of["[g-i]{3}"][1] is None
    outcomes.submit("[g-i]{4}")  # a worker is back from whatever it did after the one before
    outcomes.wait("[g-i]{4}")
    assert len(compiler_pids()) <= len(compilers._threads)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_what_is_sent_and_what_is_compiled_once_more_allow_the_same(
    compilers: GrammarCompilers, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(grammar_process, "SERIALIZED_FROM_S", seconds)
    monkeypatch.setattr(grammar_process, "SERIALIZE_S_PER_BYTE", 0.0)
    tokenizer = compilers.processes.load_tokenizer()
    compiler = xgrammar.GrammarCompiler(tokenizer.info, max_threads=1)
    text = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
    grammar = Grammar(kind="json_schema", text=text)
    reply = grammar_process._compile(compiler, grammar_process.text_lengths(tokenizer.info), grammar)
    assert (reply.error, bool(reply.compiled)) == ("", seconds == 0.0)
    found = compilers.processes.load(reply)
    masks = np.zeros((2, -(-tokenizer.info.vocab_size // 32)), dtype=np.int32)
    for mask, one in zip(masks, (found, grammar_process.compile_grammar(compiler, grammar)), strict=True):
        matcher = xgrammar.GrammarMatcher(one)
        assert matcher.accept_string('{"n":')
        matcher.fill_next_token_bitmask(mask[None])
    assert masks[0].any()
    assert (masks[0] == masks[1]).all()


def test_the_library_keeps_no_grammar_of_its_own(compilers: GrammarCompilers) -> None:
    """Those that are remembered are: its cache counts no texts."""
    translated = Grammar(kind="ebnf_grammar", text="root ::= [0-9]+ # of its own")
    compilers.processes.load(CompilerReply(translated=translated))
    assert compilers.processes.load_tokenizer().compiler.get_cache_size_bytes() == 0


def test_a_compiler_has_a_bound_on_its_memory() -> None:
    program = """
import xgrammar
from minisgl_backend.grammar.compiling import compiler as module
from minisgl_backend.request import Grammar

module.MAX_ADDED_BYTES = 64 << 20
info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], stop_token_ids=[0])
compiler = xgrammar.GrammarCompiler(info, max_threads=1)
module._limit_memory()
for text in ("a?" * 20_000 + "a" * 20_000, "[a-c]{3}"):
    print(module._compile(compiler, module.text_lengths(info), Grammar(kind="regex", text=text)).error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "guided_decoding_guide takes too much memory to compile; allowed: a simpler one\n\n"


class FakeProcess:
    """Answers a text that is a number after as many seconds, others at once; "wrong" is refused."""

    at_work = 0
    most_at_work = 0
    fails = False
    compiled: list[str]
    may_reply = threading.Event()
    may_reply.set()

    def __init__(self) -> None:
        if type(self).fails:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self._ended = threading.Event()
        self._text = ""
        self._due = 0.0

    def wait_ready(self, tokenizer_info: str) -> None: ...

    def begin(self, grammar: Grammar) -> None:
        self._text = grammar.text
        type(self).compiled.append(grammar.text)
        seconds = float(grammar.text.split()[0]) if grammar.text[0].isdigit() else 0.0
        self._due = time.monotonic() + seconds

    def replies_within(self, seconds: float) -> bool:
        self.may_reply.wait()
        left = self._due - time.monotonic()
        if self._ended.wait(max(0.0, min(seconds, left))):
            return True
        return left <= seconds

    def reply(self) -> CompilerReply:
        if self._ended.is_set():
            raise EOFError
        return CompilerReply(error="too hard") if self._text == "wrong" else CompilerReply(compiled=self._text)

    def kill(self) -> None:
        self._ended.set()

    end = kill


class Compiled(str):
    memory_size_bytes = 1 << 40  # too much for the cache


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Outcomes]:
    """With processes that only pretend, and a hundredth of the times."""
    monkeypatch.setattr(grammar_processes, "CompilerProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "compiled", [], raising=False)
    limits = Limits(quick_s=0.05, deadline_s=0.4, poll_s=0.01)
    compilers = GrammarCompilers(TokenizerSource("", False, 8, []), limits=limits)
    monkeypatch.setattr(compilers.processes, "_describe_tokenizer", lambda: "")
    monkeypatch.setattr(compilers.processes, "load_tokenizer", lambda: None)
    monkeypatch.setattr(compilers.processes, "load", lambda reply: Compiled(reply.compiled))
    yield Outcomes(compilers)
    compilers.close()


def test_quick_ones_pass_slow_ones(outcomes: Outcomes) -> None:
    slow = ["9 a", "9 b", "9 c", "9 d"]
    for text in slow:
        outcomes.submit(text)
    outcomes.submit("quick")
    outcomes.wait("quick")
    assert outcomes.of == {"quick": ("quick", None)}
    for text in slow:  # those that found no room beside had their turn later
        assert "takes longer than 0.4 s" in outcomes.error(text)


def test_what_is_slow_yet_ends_is_compiled(outcomes: Outcomes) -> None:
    texts = [f"0.15 {number}" for number in range(6)]
    for text in texts:
        outcomes.submit(text)
    outcomes.wait(*texts)
    assert outcomes.of == {text: (text, None) for text in texts}


def test_where_many_wait_several_compile(outcomes: Outcomes) -> None:
    outcomes.limit(quick_s=60.0, max_quick=3, queue_per_worker=4)
    FakeProcess.may_reply.clear()
    texts = [f"quick {number}" for number in range(40)]
    for text in texts:
        outcomes.submit(text)
    wait_for(lambda: len(FakeProcess.compiled) == 3)
    FakeProcess.may_reply.set()
    outcomes.wait(*texts)
    assert len(outcomes.compilers._threads) == 3
    assert sorted(FakeProcess.compiled) == sorted(texts)


def test_too_many_slow_ones_are_refused(outcomes: Outcomes) -> None:
    limits = outcomes.limit(deadline_s=5.0)
    texts = [f"9 {number}" for number in range(limits.max_slow + limits.max_slow_waiting + 3)]
    for text in texts:
        outcomes.submit(text)
    outcomes.wait(*texts[-3:])
    for text in texts[-3:]:
        assert outcomes.error(text).startswith("CapacityError: guided_decoding_guide takes longer than 0.05 s")
    assert len(outcomes.of) == 3


def test_what_was_cancelled_is_not_compiled_and_frees_its_place(outcomes: Outcomes) -> None:
    outcomes.submit("9 slow")
    wait_for(lambda: bool(FakeProcess.compiled))
    outcomes.abandoned |= {"never", "9 slow"}
    outcomes.limit(deadline_s=60.0)
    outcomes.submit("never")
    outcomes.submit("last")
    outcomes.wait("last", "9 slow")
    assert FakeProcess.compiled == ["9 slow", "last"]


def test_a_machine_without_a_process_left_refuses_for_now(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(FakeProcess, "fails", True)
        outcomes.submit("one")
        assert "CapacityError: a grammar compiler cannot be started: " in outcomes.error("one")
    outcomes.submit("two")
    outcomes.wait("two")
    assert outcomes.of["two"] == ("two", None)


def submit_often(outcomes: Outcomes, text: str, times: int) -> list[Any]:
    """What was told to each who asked for the same."""
    told: list[Any] = []
    for _ in range(times):
        job = Job(
            grammar=Grammar(kind="regex", text=text),
            is_awaited=lambda: True,
            done=lambda compiled, error: told.append(compiled or str(error)),
        )
        outcomes.compilers.submit(job)
    return told


@pytest.mark.parametrize("text", ["0.02 quick", "0.15 slow", "wrong"])
def test_the_same_is_compiled_once(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Also where nothing of it is remembered."""
    monkeypatch.setattr(outcomes.compilers.cache, "get", lambda grammar: None)
    FakeProcess.may_reply.clear()  # before all have asked
    told = submit_often(outcomes, text, 20)
    FakeProcess.may_reply.set()
    wait_for(lambda: len(told) == 20)
    assert set(told) == {"too hard" if text == "wrong" else text}
    assert FakeProcess.compiled == [text]


def test_those_who_wait_for_the_same_hear_of_a_compiler_that_died(outcomes: Outcomes) -> None:
    told = submit_often(outcomes, "9 deadly", 5)
    wait_for(lambda: bool(FakeProcess.compiled))
    for process in set(outcomes.compilers.processes._running):
        process.kill()
    wait_for(lambda: len(told) == 5)
    assert set(told) == {"guided_decoding_guide cannot be compiled: the compiler died of it"}
    assert FakeProcess.compiled == ["9 deadly"]


def test_what_takes_too_long_is_refused_at_once_for_a_while(
    outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = submit_often(outcomes, "9 long", 20)
    outcomes.submit("quick")
    wait_for(lambda: len(told) == 20)
    assert all("takes longer than 0.4 s" in reason for reason in told)
    assert sorted(FakeProcess.compiled) == ["9 long", "quick"]
    monkeypatch.setattr(grammar_cache, "ENTRY_TTL_S", 0.0)
    outcomes.submit("9 long")
    assert "takes longer than 0.4 s" in outcomes.error("9 long")
    assert FakeProcess.compiled.count("9 long") == 2


def test_what_the_compiler_refused_is_not_compiled_again(outcomes: Outcomes) -> None:
    for _ in range(2):
        outcomes.submit("wrong")
        assert outcomes.error("wrong") == "InvalidRequestError: too hard"
        outcomes.of.clear()
    assert FakeProcess.compiled == ["wrong"]


def test_what_is_known_or_refused_waits_for_nothing(outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a worker: it is told before `submit` returns."""
    known, refused = Grammar(kind="regex", text="known"), Grammar(kind="regex", text="refused")
    outcomes.compilers.cache.note_compiled(known, "compiled", 8)
    outcomes.compilers.cache.note_refused(refused, "too hard")
    monkeypatch.setattr(grammar_compilers, "Worker", None)  # none is started
    assert submit_often(outcomes, "known", 2) == ["compiled", "compiled"]
    assert submit_often(outcomes, "refused", 1) == ["too hard"]


def test_what_was_slow_costs_no_quick_worker_a_second_time(outcomes: Outcomes) -> None:
    outcomes.limit(deadline_s=60.0, max_slow_waiting=0)
    for text in ("9 a", "9 b"):
        outcomes.submit(text)
    wait_for(lambda: len(FakeProcess.compiled) == 2)
    for turn in range(3):
        outcomes.submit("9 c")
        assert "CapacityError" in outcomes.error("9 c")
        outcomes.of.clear()
        outcomes.submit(f"quick {turn}")
        outcomes.wait(f"quick {turn}")
    assert FakeProcess.compiled.count("9 c") == 1


def test_what_was_slow_on_a_busy_machine_is_quick_again(outcomes: Outcomes) -> None:
    grammar = Grammar(kind="regex", text="quick")
    outcomes.compilers.cache.note_slow(grammar, True)
    outcomes.submit("quick")
    outcomes.wait("quick")
    assert not outcomes.compilers.cache.is_slow(grammar)


def test_what_was_cancelled_is_not_refused_to_others(outcomes: Outcomes) -> None:
    outcomes.submit("0.3 slow")
    wait_for(lambda: bool(FakeProcess.compiled))
    outcomes.abandoned.add("0.3 slow")
    outcomes.error("0.3 slow")
    told = submit_often(outcomes, "0.3 slow", 1)
    wait_for(lambda: told == ["0.3 slow"])


def test_whoever_asks_while_a_cancelled_one_ends_has_a_turn(outcomes: Outcomes) -> None:
    told: list[list[Any]] = []
    first = Job(
        grammar=Grammar(kind="regex", text="0.3 slow"),
        is_awaited=lambda: not FakeProcess.compiled,  # it leaves once it is at work
        done=lambda compiled, error: told.append(submit_often(outcomes, "0.3 slow", 1)),
    )
    outcomes.compilers.submit(first)
    wait_for(lambda: told == [["0.3 slow"]])


def test_whoever_waits_goes_on_when_the_first_leaves(outcomes: Outcomes) -> None:
    outcomes.submit("0.3 slow")
    told = submit_often(outcomes, "0.3 slow", 1)
    wait_for(lambda: bool(FakeProcess.compiled))
    outcomes.abandoned.add("0.3 slow")
    wait_for(lambda: told == ["0.3 slow"])


def test_one_worker_stays_beside_the_slow_ones(outcomes: Outcomes) -> None:
    outcomes.limit(deadline_s=60.0, idle_s=0.05)
    outcomes.submit("90 a")
    outcomes.submit("90 b")
    wait_for(lambda: len(FakeProcess.compiled) == 2)
    time.sleep(0.4)
    outcomes.submit("quick")
    wait_for(lambda: "quick" in outcomes.of, seconds=5.0)


def test_those_who_ask_for_the_same_and_leave_are_forgotten(outcomes: Outcomes) -> None:
    outcomes.submit("9 slow")
    grammar = Grammar(kind="regex", text="9 slow")
    for _ in range(50):
        outcomes.compilers.submit(Job(grammar=grammar, is_awaited=lambda: False, done=lambda compiled, error: None))
    outcomes.submit("quick")
    outcomes.wait("quick")
    assert len(outcomes.compilers._in_flight[grammar].followers) <= 1
