"""A mixer that is not attention, beside attention in the other layers: eager and captured, whole and in chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hand_made_plans import Driver
from tiny_runner import GREEDY, PROMPTS, MakeRunner, run

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.config import ModelConfig
from minisgl_backend.runner.model_runner import ModelRunner
from tests.toys.page_mixer import PageMixer, PageMixerConfig


@pytest.fixture
def config(tiny_model_dir: Path) -> ModelConfig:
    """Layers 0 and 2 of four have the toy."""
    read = ModelConfig.load(tiny_model_dir)
    attention, toy = read.layers[0], replace(read.layers[0], mixer=PageMixerConfig(size=32))
    return replace(read, layers=(toy, attention, toy, attention))


def answers(runner: ModelRunner, page_size: int, chunk: int) -> list[list[int]]:
    """Prompts in chunks, of which later ones have a row that decodes beside them."""
    driver = Driver(page_size)
    for row, prompt in enumerate(PROMPTS):
        driver.admit(row, prompt, GREEDY)
        for start in range(0, len(prompt), chunk):
            decode = (0,) if row else ()
            run(runner, driver, driver.plan(prefill={row: min(chunk, len(prompt) - start)}, decode=decode))
    for _ in range(6):
        run(runner, driver, driver.plan(decode=tuple(range(len(PROMPTS)))))
    return [driver.tokens[row][len(prompt) :][:7] for row, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("page_size", [4, 16])
def test_captured_it_gives_what_it_gives_eagerly(make_runner: MakeRunner, config: ModelConfig, page_size: int) -> None:
    expected = answers(make_runner(page_size, dummy=config), page_size, 64)
    assert len({tuple(one) for one in expected}) > 1
    captured = make_runner(page_size, pieces=(8, 17, 64), graph_sizes=(1, 2, 4), prompt_graphs=True, dummy=config)
    toys = [one for one in captured._model.modules() if isinstance(one, PageMixer)]  # type: ignore[attr-defined]
    assert answers(captured, page_size, 64) == answers(captured, page_size, 5) == expected
    assert len(toys) == 2
    assert min(toy.num_runs for toy in toys) > 0
    # Lone prompts are captured whole only where attention is all that would be outside.
    assert captured._pieces is not None
    assert captured._pieces.prompt_sizes == ()
    assert make_runner(page_size, pieces=(8, 17), prompt_graphs=True)._pieces.prompt_sizes == (8, 17)  # type: ignore[union-attr]


def test_only_attention_has_a_part_of_the_pages(make_runner: MakeRunner, config: ModelConfig) -> None:
    runner = make_runner(4, dummy=config)
    assert [group.layers for group in runner.attention.spec.groups] == [(0, 1)]
    assert runner.attention.spec.group_of_layer == (0, 0)


def test_its_config_answers_for_it(config: ModelConfig) -> None:
    config.check()
    assert config.layers[0].mixer.num_weights(64) == 2 * 32 * 64
    assert len(config.attentions) == 2
    with pytest.raises(ConfigError, match="page_mixer_size, which is 30"):
        config.layers[0].with_mixer(size=30).mixer.check_tp(4)


def test_what_is_behind_it_sees_what_it_mixed(make_runner: MakeRunner, config: ModelConfig) -> None:
    """Without the toy in the model other tokens come."""
    plain = replace(config, layers=(config.layers[1],) * 4)
    found = [answers(make_runner(4, dummy=one), 4, 64) for one in (config, plain)]
    assert found[0] != found[1]
