"""The in-process engine on the demo model."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from minisgl_backend.config import EngineConfig
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, EngineDeadError, InvalidRequestError
from minisgl_backend.llm import LLM
from minisgl_backend.models.folder import find_model_dir
from minisgl_backend.request import Grammar, Request, SamplingParams, ThinkingTags

# float32: the same answers in every way to run, whatever products this processor rounds to bfloat16.
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_pages": 256, "max_running_requests": 8, "max_waiting_requests": 4}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


def ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts: list[Any] = [f"prompt number {index}" for index in range(20)]  # more than the queue takes at once
    together = llm.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True)
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True)[0]
        assert (alone.text, alone.token_ids) == (output.text, output.token_ids)
        assert output.finish_reason == "length"
        assert len(output.token_ids) == 12
        assert output.num_prompt_tokens == len(llm.tokenizer.encode(prompt))


def test_texts_token_ids_and_chats(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello there")
    by_text, by_ids = llm.generate("hello there", max_tokens=5), llm.generate(ids, max_tokens=5)
    assert by_text[0].token_ids == llm.generate([ids], max_tokens=5)[0].token_ids == by_ids[0].token_ids
    one = llm.chat(ask("What is 2 + 3?"), max_tokens=20)
    two = llm.chat([ask("What is 2 + 3?"), ask("What is 2 + 4?")], max_tokens=20)
    assert len(one) == 1
    assert len(two) == 2
    assert one[0].text == two[0].text
    assert llm.generate([], max_tokens=5) == []


def test_the_callers_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with LLM("demo", **OPTIONS):
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_text_is_no_chat(llm: LLM) -> None:
    text: Any = "What is 2 + 3?"
    for wrong in (text, {"role": "user", "content": text}):
        with pytest.raises(InvalidRequestError, match=r"messages is a .*; allowed: a list of objects with role"):
            llm.chat(wrong)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_seq_len", "max_seq_len is TensorRT-LLM's; here max_seq_len_override"),
        ("max_model_len", "max_model_len is vLLM's; here max_seq_len_override"),
        ("tensor_parallel_size", "tensor_parallel_size is vLLM's and SGLang's and Mini-SGLang's; here tp"),
        ("gpu_memory_utilization", "gpu_memory_utilization is vLLM's; here memory_ratio: of the memory"),
        ("mem_fraction_static", "mem_fraction_static is SGLang's; here memory_ratio"),
        ("enforce_eager", "enforce_eager is vLLM's; here cuda_graph_max_bs 0"),
        ("quantisation", "no such option: quantisation; did you mean quantization?"),
        ("flux", "no such option: flux; allowed: model, model_impl, dtype, "),
    ],
)
def test_unknown_options_are_explained_as_on_the_command_line(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        LLM("demo", **{name: 2})
    with pytest.raises(ConfigError, match=re.escape(said)):
        EngineConfig.from_parameters({name: "2"})


def test_defaults_come_from_the_model(llm: LLM) -> None:
    assert llm.sampling_params().temperature == 0  # the demo model's generation_config.json says greedy
    assert llm.sampling_params(temperature=0.5, n=2) == SamplingParams(temperature=0.5, n=2)
    with pytest.raises(InvalidRequestError, match="'max_token'"):
        llm.sampling_params(max_token=5)


def test_stop_strings_end_the_text_before_them(llm: LLM) -> None:
    free = llm.generate("abc", max_tokens=30, temperature=0, ignore_eos=True)[0]
    stop = free.text[6:9]
    ended = llm.generate("abc", max_tokens=30, temperature=0, ignore_eos=True, stop=(stop,))[0]
    assert ended.text == free.text[: free.text.index(stop)]
    assert ended.finish_reason == "stop"
    assert len(ended.token_ids) < 30
    assert llm.stats.num_running == 0 or llm.generate("x", max_tokens=1)


def test_stop_strings_count_after_min_tokens(llm: LLM) -> None:
    values = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    free = llm.chat(ask("Count from 1 to 12."), **values)[0]
    late = llm.chat(ask("Count from 1 to 12."), stop="1", min_tokens=20, **values)[0]
    assert late.finish_reason == "stop"
    assert len(late.token_ids) > 20
    assert free.text.startswith(late.text)
    assert "1" in late.text


def test_the_text_of_a_stop_token_is_no_part_of_the_answer(llm: LLM) -> None:
    free = llm.chat(ask("Count from 1 to 12."))[0]
    token = llm.tokenizer.encode("1, 2, 3, 4", add_special_tokens=False)[-1]
    stopped = llm.chat(ask("Count from 1 to 12."), stop_token_ids=token)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids[-1] == token
    assert free.text.startswith(stopped.text)
    assert stopped.text == "1, 2, 3, "


def test_a_text_where_a_list_is_meant(llm: LLM) -> None:
    listed = llm.chat(ask("Count from 1 to 12."), stop=("9, 10",))[0]
    assert listed.text == "1, 2, 3, 4, 5, 6, 7, 8, "
    assert llm.chat(ask("Count from 1 to 12."), stop="9, 10")[0].text == listed.text
    banned = llm.chat(ask("Count from 1 to 12."), bad_words=("12",), max_tokens=60)[0]
    assert "1" in banned.text
    assert llm.chat(ask("Count from 1 to 12."), bad_words="12", max_tokens=60)[0].text == banned.text


def test_what_means_off_or_the_default(llm: LLM) -> None:
    plain = llm.chat(ask("What is 2 + 3?"))[0]
    assert llm.chat(ask("What is 2 + 3?"), top_k=-1, top_p=0, stop=None, max_tokens=None)[0] == plain
    with pytest.raises(InvalidRequestError, match="max_tokens is '5'; allowed: an integer"):
        llm.generate("x", max_tokens="5")
    with pytest.raises(InvalidRequestError, match="max_tokens is given together with sampling_params"):
        llm.generate("x", SamplingParams(), max_tokens=5)


def test_content_parts_are_one_text(llm: LLM) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 3?"}]}]
    assert llm.chat(parts)[0].text == llm.chat(ask("What is\n2 + 3?"))[0].text
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[0\] is no text; allowed: text.*no image"):
        llm.chat(image)


def test_a_folder_without_a_tokenizer_serves_token_ids(
    llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(find_model_dir("demo") / name, tmp_path / name)
    with LLM(str(tmp_path), **OPTIONS) as bare:
        assert "has no tokenizer: prompts must be token ids" in caplog.text
        [answer] = bare.generate([[5, 6, 7]], max_tokens=8, ignore_eos=True)
        assert answer.token_ids == llm.generate([[5, 6, 7]], max_tokens=8, ignore_eos=True)[0].token_ids
        assert answer.text == ""
        with pytest.raises(ConfigError, match="has no tokenizer") as caught:
            bare.generate("text")
        with pytest.raises(InvalidRequestError, match="this model has no tokenizer"):
            bare.generate([[5, 6, 7]], stop="x")
        assert "\n" not in str(caught.value)


def test_the_tokenizers_end_token_ends_an_answer(tmp_path: Path) -> None:
    """A fine-tune whose config files still name the base model's end token."""
    shutil.copytree(find_model_dir("demo"), tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        path = tmp_path / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 0}))
    with LLM(str(tmp_path / "model"), **OPTIONS) as llm:
        assert llm.engine.welcome.eos_token_ids == (0, 2)
        answer = llm.chat(ask("What is 17 + 25?"), max_tokens=40)[0]
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == 2


def test_several_answers_logprobs_and_cached_tokens(llm: LLM) -> None:
    ids = list(range(10, 60))
    params = SamplingParams(max_tokens=6, n=3, seed=1, temperature=20.0, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    first = llm.generate(ids, params)[0]
    again = llm.generate(ids, params)[0]
    assert [c.token_ids for c in first.completions] == [c.token_ids for c in again.completions]
    assert len({tuple(c.token_ids) for c in first.completions}) > 1
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 0), "the values of a prompt need all of it"
    assert llm.generate(ids, msgspec.structs.replace(params, prompt_logprobs=None))[0].num_cached_tokens > 0
    for completion in first.completions:
        assert completion.logprobs is not None
        assert [len(entry.top) for entry in completion.logprobs] == [2] * 6
    assert first.prompt_logprobs is not None
    assert [entry.token_id for entry in first.prompt_logprobs] == ids[1:]
    assert llm.generate(ids, max_tokens=2)[0].logprobs is None


def test_thoughts_end_after_their_budget_and_a_grammar_holds_behind_them(llm: LLM) -> None:
    opening, closing = (tuple(llm.tokenizer.encode(tag)) for tag in ("<think>", "</think>"))
    tags = ThinkingTags(opening=opening, closing=closing, is_open=True)
    options: dict[str, Any] = {"thinking_token_budget": 6, "thinking_tags": tags, "ignore_eos": True, "n": 2}
    free, guided = (
        llm.generate(prompt, max_tokens=40, grammar=grammar, **options)[0]
        for prompt, grammar in (("Count to 9.", None), ("Count to 9.", Grammar(kind="regex", text="[0-9]{3}")))
    )
    for answer in (free, guided):
        for one in answer.completions:
            assert one.token_ids[6 : 6 + len(closing)] == list(closing)
    assert all(one.text.split("</think>")[1].isdigit() for one in guided.completions)
    assert all(len(one.token_ids) == 40 for one in free.completions)
    with pytest.raises(InvalidRequestError, match="thinking_token_budget is 6; allowed: none"):
        llm.generate("x", thinking_token_budget=6)


def test_bad_words_do_not_appear(llm: LLM) -> None:
    free = llm.generate("abc", max_tokens=20, temperature=0, ignore_eos=True)[0]
    word = llm.tokenizer._tokenizer.decode([free.token_ids[0]])
    other = llm.generate("abc", max_tokens=20, temperature=0, ignore_eos=True, bad_words=(word,))[0]
    assert free.token_ids[0] not in other.token_ids


@pytest.mark.parametrize(
    ("prompt", "values", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([5] * 5000, {}, "the prompt has 5000 tokens"),
        ([10**6], {}, "the prompt holds token id 1000000; allowed: token ids 0 to 1023"),
        ("x", {"temperature": -1.0}, "temperature is -1"),
        ("x", {"stop_token_ids": (5000,)}, "stop_token_ids"),
    ],
)
def test_wrong_requests_raise_and_leave_nothing(llm: LLM, prompt: Any, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(["fine", prompt], max_tokens=500, **values) if not values else llm.generate(prompt, **values)
    assert llm.stats.num_running == llm.stats.num_waiting == llm.stats.pages_leased == 0
    assert llm.generate("x", max_tokens=3)[0].finish_reason in ("stop", "length")


def test_one_set_of_parameters_for_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 5)])
    assert [len(output.token_ids) for output in outputs] == [3, 5]
    with pytest.raises(InvalidRequestError, match="sampling_params has 1 entries"):
        llm.generate(["a", "b"], [SamplingParams()])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache_type", ["radix", "naive"])
def test_the_same_answers_with_every_way_to_run(llm: LLM, overlap: bool, cache_type: str) -> None:
    prompts = [list(range(5, 5 + length)) for length in (3, 40, 17, 64, 33)]
    expected = [o.token_ids for o in llm.generate(prompts, max_tokens=16, temperature=0, ignore_eos=True)]
    environment = Environment(overlap=overlap, log_level="INFO", flashinfer_tensor_cores=None)
    options = {**OPTIONS, "num_pages": 24, "page_size": 8, "max_prefill_length": 16, "mixed_prefill_length": 8}
    with LLM("demo", environment=environment, cache_type=cache_type, **options) as other:
        outputs = other.generate(prompts, max_tokens=16, temperature=0, ignore_eos=True)
        assert [output.token_ids for output in outputs] == expected
        assert other.stats.pages_leased == 0


def test_on_a_cpu_a_token_is_there_when_its_step_is(llm: LLM) -> None:
    """Overlap would only tell of it a step later."""
    assert llm.engine.welcome.description.endswith("sequential scheduling")
    core = llm.engine.core
    token_ids = np.arange(5, 9, dtype="<i4").tobytes()
    core.submit(Request(uid=1 << 40, token_ids=token_ids, params=SamplingParams(max_tokens=1)))
    core.step()
    outputs = core.drain_outputs()
    assert outputs is not None
    assert outputs.uids.tolist() == [1 << 40]


@pytest.mark.parametrize("stage", ["execute", "prepare"])
def test_an_interrupted_call_leaves_an_engine_that_serves(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    expected = llm.generate([[5, 6]], max_tokens=20, temperature=0)[0].token_ids
    runner: Any = llm.engine.core._runner  # type: ignore[attr-defined]
    real, calls = getattr(runner, stage), [0]

    def interrupted(given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            signal.raise_signal(signal.SIGINT)
        return real(given)

    with monkeypatch.context() as patch:
        patch.setattr(runner, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6], [7, 8, 9]], max_tokens=20, ignore_eos=True)
    assert calls[0] <= 7, "it ends with the step"
    assert (llm.stats.num_running, llm.stats.num_waiting, llm.stats.pages_leased) == (0, 0, 0)
    assert llm.generate([[5, 6]], max_tokens=20, temperature=0)[0].token_ids == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_interrupt_waits_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("demo", **OPTIONS) as llm:

        def hang(_: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(llm.engine.core._runner, "execute", hang)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6]], max_tokens=20)
        with pytest.raises(EngineDeadError, match="a step was broken off: KeyboardInterrupt"):
            llm.generate([[5, 6]], max_tokens=20)


def test_two_interrupts_are_two_for_a_program_that_counts_them(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio cancels its task at the first and raises at the second."""
    heard: list[int] = []
    runner: Any = llm.engine.core._runner  # type: ignore[attr-defined]
    real = runner.execute

    def interrupted(batch: Any) -> Any:
        if not heard:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return real(batch)

    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        monkeypatch.setattr(runner, "execute", interrupted)
        assert len(llm.generate([[5, 6]], max_tokens=5, ignore_eos=True)[0].token_ids) == 5
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(heard) == 2


def test_a_closed_engine_says_so() -> None:
    llm = LLM("demo", runner="null", num_pages=64)
    assert "null runner" in llm.generate("x", max_tokens=40)[0].text.lower()
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("x")


def test_wrong_options_are_told_by_name() -> None:
    with pytest.raises(ConfigError, match=r"dp is 2; allowed in one process: 1.*serve.sh --dp 2"):
        LLM("demo", dp=2)
    with pytest.raises(ConfigError, match=r"kv_events_endpoint is 'tcp://.*allowed in one process: unset"):
        LLM("demo", kv_events_endpoint="tcp://*:5557")
    with pytest.raises(ConfigError, match="page_size is 3"):
        LLM("demo", page_size=3)
    with pytest.raises(ConfigError, match="/nowhere"):
        LLM("/nowhere")


def test_a_stream_is_the_same_answer_in_pieces(llm: LLM) -> None:
    question = ask("Count from 1 to 30.")
    whole = llm.chat(question, temperature=0)[0]
    pieces = list(llm.stream_chat(question, temperature=0))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert len(pieces) > 10
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [whole.finish_reason]
    assert pieces[-1].num_prompt_tokens == whole.num_prompt_tokens
    assert pieces[-1].num_cached_tokens > 0  # the first answer left them


def test_a_stream_holds_back_what_may_become_a_stop_string(llm: LLM) -> None:
    values: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
    free = llm.generate("abc", **values)[0]
    stop = free.text[6:9]
    texts = [piece.text for piece in llm.stream("abc", stop=(stop,), **values)]
    assert "".join(texts) == free.text[: free.text.index(stop)]


def test_a_stream_that_is_left_leaves_nothing_behind(llm: LLM) -> None:
    stream = llm.stream("abc", max_tokens=500, ignore_eos=True)
    assert sum(len(next(stream).token_ids) for _ in range(10)) > 0
    with pytest.raises(InvalidRequestError, match="an answer is being streamed; allowed: one at a time"):
        llm.generate("abc", max_tokens=1)
    stream.close()
    assert llm.generate("abc", max_tokens=1)[0].finish_reason == "length"
    assert llm.stats.num_running == 0


def test_a_stream_is_checked_before_it_begins(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="n is 2; allowed in a stream: 1"):
        llm.stream("abc", n=2)
    with pytest.raises(InvalidRequestError, match="temperature"):
        llm.stream("abc", temperature=-1)


def test_a_batch_may_have_more_grammars_than_wait_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl_backend.grammar.manager.MAX_COMPILING", 3)
    guides = [Grammar(kind="regex", text=f"[a-c]{{{length}}}") for length in range(1, 9)]
    params = [SamplingParams(max_tokens=16, grammar=guide) for guide in guides]
    answers = llm.generate(["a"] * len(guides), params)
    assert [len(answer.text) for answer in answers] == list(range(1, 9))


def test_a_grammar_that_is_found_slow_midway_costs_no_other_answer() -> None:
    """Its later requests in the same call are refused, and end alone."""
    ambiguous = Grammar(kind="ebnf_grammar", text='root ::= [0-9]{60} e\ne ::= "" | [a-z] e [a-z] e | e e')
    slow = SamplingParams(temperature=1.0, seed=1, max_tokens=150, grammar=ambiguous)
    plain = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    with LLM("demo", max_waiting_requests=2, max_running_requests=2) as llm:
        grammars = llm.engine.core._grammars
        assert grammars is not None
        grammars._budget.call_limit_s = 0.02  # instead of 0.25, which takes longer to reach
        llm.generate([5, 6, 7], SamplingParams(temperature=1.0, seed=1, max_tokens=5, grammar=ambiguous))  # compiles it
        params = [plain, slow, *[plain] * 6, slow, plain]
        outputs = llm.generate([[5, 6, 7]] * len(params), params)
    reasons = [output.finish_reason for output in outputs]
    assert reasons == ["error" if one is slow else "length" for one in params]
    assert "takes too long to follow" in outputs[-2].completions[0].error


def test_a_batch_may_have_more_grammars_than_the_queue_takes(llm: LLM) -> None:
    """They leave the compilers together, and others wait already."""
    guided = SamplingParams(max_tokens=8, temperature=0, grammar=Grammar(kind="regex", text="[d-f]{3}"))
    params = [guided, SamplingParams(max_tokens=8, temperature=0)] * OPTIONS["max_waiting_requests"] * 2
    answers = llm.generate([f"prompt number {index}" for index in range(len(params))], params)
    assert all(len(answer.text) == 3 and set(answer.text) <= set("def") for answer in answers[::2])


def test_a_step_that_fails_behind_its_sampling_counts_no_penalty_twice(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come beside the stream and break their step, which is then computed without them."""
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    penalties = {"frequency_penalty": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.5}
    penalised, plain = llm.sampling_params(**options, **penalties), llm.sampling_params(**options)
    expected = llm.generate("Count from 1 to 20.", penalised)[0].token_ids
    reader: Any = llm.engine.core._runner._reader
    start = reader.start

    def fails_beside_prompts(computed: Any, sampled: Any) -> Any:
        if computed.step.prefill is not None and computed.step.decode is not None:
            raise MemoryError
        return start(computed, sampled)

    monkeypatch.setattr(reader, "start", fails_beside_prompts)
    prompts = ["Count from 1 to 20.", *(f"prompt number {index}" for index in range(20))]
    answers = llm.generate(prompts, [penalised, *[plain] * 20])
    assert "error" in [answer.finish_reason for answer in answers]
    assert answers[0].token_ids == expected


def test_prompts_in_every_form_that_vllm_and_torch_have(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello there")
    values: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    expected = llm.generate("hello there", **values)[0].token_ids
    forms: list[Any] = [
        {"prompt": "hello there"},
        {"prompt_token_ids": torch.tensor(ids), "prompt": None},
        torch.tensor(ids),
        tuple(ids),
        [{"prompt_token_ids": ids}],
        (prompt for prompt in ["hello there"]),
        torch.tensor([ids]),
    ]
    for form in forms:
        assert [one.token_ids for one in llm.generate(form, **values)] == [expected]
    assert [one.token_ids for one in llm.generate("hello there", values)] == [expected]
    assert [one.token_ids for one in llm.generate(["hello there"], [values])] == [expected]
    assert "".join(piece.text for piece in llm.stream({"prompt": "hello there"}, values))


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ({"text": "x"}, None, "the prompt has 'text'; allowed: prompt or prompt_token_ids"),
        (
            {"prompt": "x", "multi_modal_data": {"image": 1}},
            None,
            "image is no text; allowed: text, as this model has no image",
        ),
        ({}, None, "the prompt is {}; allowed"),
        (b"x", None, "the prompt is b'x'; allowed: a text, token ids"),
        (7, None, "the prompt is 7; allowed: a text, token ids"),
        ([1.5, 2], None, "the prompt holds 1.5; allowed: whole numbers"),
        (torch.tensor(3), None, "the prompt is tensor"),
        ("x", {"max_token": 3}, "unknown sampling parameter 'max_token'"),
        ("x", "fast", "sampling_params is 'fast'; allowed: SamplingParams or a mapping"),
        ("x", [7], "sampling_params is 7; allowed: SamplingParams or a mapping"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        llm.generate(prompts, params)
    assert str(error.value).startswith(message)


def test_threads_are_served_one_after_the_other(llm: LLM) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: llm.generate(text, max_tokens=8, temperature=0)[0].text, ["hello"] * 8))
    assert len(set(found)) == 1


def test_a_stop_text_that_is_a_special_token_ends_an_answer(llm: LLM) -> None:
    (token,) = llm.tokenizer.encode("<|im_start|>", add_special_tokens=False)
    values: dict[str, Any] = {"max_tokens": 5, "logit_bias": {token: 100.0}, "temperature": 0}
    assert llm.generate("abc", **values)[0].finish_reason == "length"
    ended = llm.generate("abc", stop="<|im_start|>", **values)[0]
    assert (ended.finish_reason, ended.token_ids, ended.text) == ("stop", [token], "")


def test_a_line_break_in_a_class_of_a_regex(llm: LLM) -> None:
    grammar = Grammar(kind="regex", text="[\nx]{3}")
    assert set(llm.generate("abc", grammar=grammar)[0].text) <= {"\n", "x"}
