"""Adapters through the whole engine: tokens are those of merged weights, in mixed batches, under captured graphs, on
two ranks, with n, preemption and cached prefixes."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from minisgl_backend import LLM
from minisgl_backend.environment import Environment
from minisgl_backend.errors import ConfigError, InvalidRequestError
from minisgl_backend.ipc.messages import Done, ReadAdapter, ServeAdapter
from minisgl_backend.request import FinishReason, Request
from minisgl_backend.serving.adapter_fields import AdapterTasks
from tests.adapter_folders import factors, merge, save_adapter, save_for
from tests.fakes import Records
from tests.gauge.harness import expect_short_answers
from tests.parity.checkpoints import reference_model, save_checkpoint

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
OPTIONS: dict[str, Any] = {"num_pages": 64, "page_size": 4, "dtype": "float32", "max_running_requests": 8}


class Served:
    def __init__(self, folder: Path) -> None:
        self.base = folder / "base"
        save_checkpoint("qwen3-tied-sharded", self.base)
        model = reference_model(self.base)
        self.folders = {
            "all": save_for(folder / "all", model, "_proj$"),
            "few": save_for(folder / "few", model, "(k|down)_proj$|lm_head", rank=7, seed=2, use_rslora=True),
        }
        self.models = {None: model}
        for name, adapter in self.folders.items():
            self.models[name] = reference_model(self.base)
            merge(self.models[name], adapter)

    def llm(self, eager_graphs: bool = False, **options: Any) -> LLM:
        environment = Environment(
            overlap=True, log_level="WARNING", flashinfer_tensor_cores=None, eager_graphs=eager_graphs
        )
        adapters = ",".join(f"{name}={folder}" for name, folder in self.folders.items())
        return LLM(str(self.base), environment=environment, **{"adapters": adapters, **OPTIONS, **options})

    @torch.no_grad()
    def greedy(self, name: str | None, prompt: list[int], count: int = GREEDY["max_tokens"]) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.models[name](torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("adapters"))


def prompts(count: int) -> list[list[int]]:
    dice = random.Random(count)
    return [[dice.randrange(256) for _ in range(3 + 4 * index % 17)] for index in range(count)]


def params(name: str | None) -> dict[str, Any]:
    return GREEDY if name is None else {**GREEDY, "lora_name": name}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eager_graphs": True, "cuda_graph_max_tokens": 64},
        {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}', "eager_graphs": True},
        {"num_pages": 70, "page_size": 1},  # some are preempted
        {"max_adapters": 1},
        {"max_adapters": 1, "tp": 2, "eager_graphs": True},
    ],
    ids=["plain", "graphs", "drafts", "preemption", "one-slot", "one-slot-tp"],
)
def test_tokens_are_those_of_merged_weights(served: Served, options: dict[str, Any]) -> None:
    asked = list(zip(prompts(10), itertools.cycle([None, "all", "few", "all"]), strict=False))
    with served.llm(**options) as llm:
        expect_short_answers(llm)
        found = llm.generate([prompt for prompt, _ in asked], [params(name) for _, name in asked])
        assert llm.stats.pages_leased == 0
        assert "num_pages" not in options or llm.stats.total_preempted > 0
    for (prompt, name), answer in zip(asked, found, strict=True):
        tokens = answer.completions[0].token_ids  # some end early
        assert tokens == served.greedy(name, prompt)[: len(tokens)], name


def test_prefixes_are_shared_within_an_adapter_alone(served: Served) -> None:
    prompt = list(range(30, 50))
    with served.llm() as llm:
        for name in (None, "all", "few"):
            for cached in (0, 16):
                (answer,) = llm.generate([prompt], params(name))
                assert (answer.num_cached_tokens, answer.completions[0].token_ids) == (
                    cached,
                    served.greedy(name, prompt),
                )
        (several,) = llm.generate([prompt], {**params("all"), "n": 3, "cache_salt": "other"})
        assert several.num_cached_tokens == 0
        assert [one.token_ids for one in several.completions] == [served.greedy("all", prompt)] * 3


def test_log_probabilities_of_a_prompt_are_those_of_merged_weights(served: Served) -> None:
    prompt = [3, 1, 4, 1, 5, 9]
    with served.llm() as llm:
        params = [
            {"max_tokens": 1, "prompt_logprobs": 0, **({"lora_name": name} if name else {})} for name in (None, "few")
        ]
        found = llm.generate([prompt] * 2, params)
    for name, answer in zip((None, "few"), found, strict=True):
        with torch.no_grad():
            expected = served.models[name](torch.tensor([prompt])).logits[0].log_softmax(-1)
        told = [one.logprob for one in answer.prompt_logprobs if one is not None]
        assert told == pytest.approx([float(expected[at, token]) for at, token in enumerate(prompt[1:])], abs=1e-3)


def test_an_adapter_as_in_vllm(served: Served) -> None:
    asked, few = [[5, 6, 7], [8, 9]], SimpleNamespace(lora_name="few", lora_int_id=1, lora_path="")
    with served.llm() as llm:
        for given, names in ((few, ["few"] * 2), (["all", None], ["all", None]), (None, [None] * 2)):
            found = llm.generate(asked, GREEDY, lora_request=given)
            expected = [served.greedy(name, prompt) for name, prompt in zip(names, asked, strict=True)]
            for answer, tokens in zip(found, expected, strict=True):
                assert answer.completions[0].token_ids == tokens[: len(answer.completions[0].token_ids)]
        for wrong, words in ((["all"], "has 1 entries"), (7, "lora_request is 7; allowed: an adapter's name")):
            with pytest.raises(InvalidRequestError, match=words):
                llm.generate(asked, GREEDY, lora_request=wrong)


def test_a_name_that_is_not_served_is_refused(served: Served) -> None:
    with served.llm() as llm, pytest.raises(InvalidRequestError, match=r"lora_name is 'none'.*allowed: all, few"):
        llm.generate([[1, 2]], lora_name="none")
    with LLM(str(served.base), **OPTIONS) as llm, pytest.raises(InvalidRequestError, match="adapters are off"):
        llm.generate([[1, 2]], lora_name="all")


def serve(llm: LLM, name: str, folder: Path) -> None:
    """As `load_adapter`, while answers are computed."""
    core = llm.engine.core
    core.obey(ReadAdapter(front=0, id=1, folder=str(folder)))
    answers = []
    while not answers:
        core.step()
        answers = core.take_answers()
    assert isinstance(answers[0][1], Done)
    core.obey(ServeAdapter(front=0, id=2, read=1, name=name, folder=str(folder), digest=answers[0][1].result))
    assert core.take_answers() == [(0, Done(id=2))]


@pytest.mark.parametrize("options", [{}, {"max_adapters": 1}, {"tp": 2, "eager_graphs": True}], ids=str)
def test_a_name_loaded_again_in_mid_stream(served: Served, options: dict[str, Any]) -> None:
    """Who has asked before ends with what the name stood for, also who has not begun; who asks later gets the new one,
    and no prefix of the old."""
    prompt, few, everything = list(range(30, 50)), served.folders["few"], served.folders["all"]
    with served.llm(adapters="", max_lora_rank=8, max_running_requests=2, **options) as llm:
        core, records = llm.engine.core, Records()
        expect_short_answers(llm)
        llm.load_adapter("x", everything)

        def ask(uid: int) -> None:
            params = llm.sampling_params(**GREEDY, lora_name="x", ignore_eos=True)
            core.submit(Request(uid=uid, token_ids=np.array(prompt, "<i4").tobytes(), params=params))

        for uid in range(3):  # the third one waits for a row
            ask(uid)
        for _ in range(3):
            core.step()
        serve(llm, "x", few)
        ask(3)
        core.abort([1], FinishReason.CANCELLED)
        llm.unload_adapter("x")
        ask(4)
        assert [one.uid for one in core.take_rejected()] == [4]
        for _ in range(80):
            core.step()
            records.take(core)
        assert llm.stats.pages_leased == 0
    for uid, name in ((0, "all"), (2, "all"), (3, "few")):
        assert records.tokens[uid] == served.greedy(name, prompt), uid
    assert records.details[3][0].cached_tokens == 0
    assert records.details[2][0].cached_tokens == 16


def test_adapters_are_loaded_and_unloaded(served: Served, tmp_path: Path) -> None:
    wrong = save_adapter(tmp_path / "wrong", factors("model.layers.0.self_attn.q_proj"))
    model = served.models[None]
    large = save_for(tmp_path / "large", model, "q_proj$", rank=9)
    twice = [factors(f"{name}layers.0.self_attn.q_proj", 64, 128) for name in ("model.", "")]
    same = save_adapter(tmp_path / "same", twice[0] | twice[1])
    with served.llm(adapters="", max_lora_rank=8, max_loaded_adapters=2, max_adapters=1) as llm:
        for folder, words in ((wrong, "it is of another base"), (tmp_path, "has no adapter_config.json"), (
            same, "layers.0.self_attn.q_proj and model.layers.0.self_attn.q_proj are the same module here",
        ), (
            large, "has rank 9 for .*; there is room for 8; allowed: a server that is started with a max_lora_rank as",
        )):  # fmt: skip
            with pytest.raises(ConfigError, match=words):
                llm.load_adapter("x", folder)
        for name, folder in (("x", "all"), ("y", "few"), ("z", "all"), ("x", "few")):
            llm.load_adapter(name, served.folders[folder])
            (answer,) = llm.generate([[5, 6, 7]], params(name))
            assert answer.completions[0].token_ids == served.greedy(folder, [5, 6, 7])
        # The host has two of them; others are read again, unless they are other ones now.
        (answer,) = llm.generate([[5, 6, 7]], params("y"))
        assert answer.completions[0].token_ids == served.greedy("few", [5, 6, 7])
        llm.unload_adapter("y")
        for unloaded in ("y", "unknown"):
            with pytest.raises(InvalidRequestError, match=f"lora_name is '{unloaded}', which is not served"):
                llm.generate([[1, 2]], params(unloaded))
            with pytest.raises(InvalidRequestError, match="is not loaded"):
                llm.unload_adapter(unloaded)
        request = SimpleNamespace(lora_name="v", lora_int_id=1, lora_path=str(served.folders["few"]))
        (answer,) = llm.generate([[5, 6, 7]], GREEDY, lora_request=request)
        assert answer.completions[0].token_ids == served.greedy("few", [5, 6, 7])
    with LLM(str(served.base), **OPTIONS) as llm, pytest.raises(ConfigError, match="started with max_lora_rank"):
        llm.load_adapter("x", served.folders["all"])


def test_an_adapter_as_tensors(served: Served, tmp_path: Path) -> None:
    """`lora_weights` and `lora_config` of what a folder of PEFT's has, as TensorRT-LLM's converter writes them."""
    numbers = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
    tensors, rows, config = load_file(served.folders["all"] / "adapter_model.safetensors"), [], []
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")] * 2.0  # lora_alpha / r
            rows.append(torch.cat([a.flatten(), b.flatten()]).half())
            layer, leaf = re.search(r"layers\.(\d+)\..*\.(\w+)\.lora_A", name).groups()  # type: ignore[union-attr]
            config.append((numbers[leaf], int(layer), len(a)))
    weights = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).numpy()
    tasks = AdapterTasks(tmp_path, 2, most_bytes=1 << 24)
    name = tasks.name_of(7, weights[None], np.array([config], np.int32))
    assert tasks.name_of(7, None, None) == name
    with served.llm(adapters="", max_lora_rank=8) as llm:
        llm.load_adapter("x", tmp_path / name)
        (answer,) = llm.generate([[5, 6, 7]], params("x"))
        assert answer.completions[0].token_ids == served.greedy("all", [5, 6, 7])
        for wrong, words in (
            ((9, 0, 4), None), ((1, 99, 4), "model.layers.99.self_attn.q_proj is no linear layer"),
            ((1, 0, 400), r"lora_weights has \d+ numbers for module 1 of layer 0; allowed for rank 400"),
        ):  # fmt: skip
            given = np.array([wrong], np.int32)
            if words is None:
                with pytest.raises(InvalidRequestError, match="lora_config has module 9"):
                    tasks.name_of(8, weights[:1], given)
                continue
            name = tasks.name_of(wrong[1] + 100, weights[:1], given)
            with pytest.raises(ConfigError, match=words):
                llm.load_adapter("y", tmp_path / name)
        wide = np.pad(weights[:1], ((0, 0), (0, 1 << 14)))
        name = tasks.name_of(9, wide, np.array([(1, 0, 64)], np.int32))
        with pytest.raises(ConfigError, match=r"^lora_weights has rank 64 for .*; there is room for 8"):
            llm.load_adapter("y", tmp_path / name)  # without the server's path


def test_adapters_of_a_folder_are_found_by_name(served: Served, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("one", "two", "three"):
        shutil.copytree(served.folders["all" if name == "two" else "few"], root / name)
    (root / "link").symlink_to(served.folders["all"])
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")
    with served.llm(adapters="", adapter_dir=str(root), max_loaded_adapters=2, max_adapters=2) as llm:
        asked = [("one", "few"), ("two", "all"), ("three", "few"), ("one", "few"), ("two", "all")]
        found = llm.generate([[5, 6, 7]] * 2, [params(name) for name, _ in asked[:2]])
        found += [llm.generate([[5, 6, 7]], params(name))[0] for name, _ in asked[2:]]
        for (_, same), answer in zip(asked, found, strict=True):
            assert answer.completions[0].token_ids == served.greedy(same, [5, 6, 7])
        for outside in ("link", "../root/one", "/one", str(root / "one"), ".", "..", "", "one/", "one\0", "none"):
            with pytest.raises(InvalidRequestError, match="which is not served"):
                llm.generate([[5, 6, 7]], params(outside))
        with pytest.raises(InvalidRequestError, match="'broken', which cannot be read: the server's log says why"):
            llm.generate([[5, 6, 7]], params("broken"))


def test_an_adapter_that_cannot_be_served_ends_the_start(served: Served, tmp_path: Path) -> None:
    wrong = save_adapter(tmp_path / "wrong", factors("model.layers.0.self_attn.q_proj"))
    with pytest.raises(ConfigError, match="it is of another base"):
        LLM(str(served.base), adapters=f"wrong={wrong}", **OPTIONS)
    with pytest.raises(ConfigError, match=r"allowed for .*, which runs on transformers' code: none"):
        LLM(str(served.base), model_impl="transformers", adapters=f"wrong={wrong}", **OPTIONS)
