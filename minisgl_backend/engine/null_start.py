"""The start of an engine core that computes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from minisgl_backend.arrays import Int32Array
from minisgl_backend.config import EngineConfig
from minisgl_backend.engine.stages import StepRunner
from minisgl_backend.engine.start import Built, Start, scheduler_limits
from minisgl_backend.errors import ConfigError
from minisgl_backend.runner.stand_ins.null import NullRunner
from minisgl_backend.runner.stand_ins.scripted import ScriptedRunner
from minisgl_backend.runner.start.step_sizes import PREFILL_LENGTH
from minisgl_backend.text.tokenizer_file import TokenizerFiles

NULL_PAGE_SIZE = 16
NULL_MAX_PAGES = 1 << 16
NULL_MIXED_PREFILL = 512
NULL_ANSWER = "The null runner says this again and again, and computes nothing. "


def null_runner(start: Start) -> Built:
    """A runner that computes nothing. It needs no torch."""
    config, environment, model = start.config, start.environment, start.model
    if config.num_adapter_slots:
        raise ConfigError(
            "there is room for adapters (adapters, adapter_dir, max_lora_rank, max_adapter_tasks); allowed with runner "
            "null, which has no model: none"
        )
    encode = _encoder(config, start.model_dir)
    answer = encode(NULL_ANSWER)
    page_size = config.page_size or NULL_PAGE_SIZE
    max_seq_len = model.max_seq_len(config.max_seq_len_override)
    pages = config.num_pages or min(config.max_running_requests * -(-max_seq_len // page_size), NULL_MAX_PAGES)
    log_file = Path(environment.null_runner_log) if environment.null_runner_log else None
    runner: StepRunner
    if environment.null_runner_scripts:
        scripts = _read_scripts(Path(environment.null_runner_scripts), encode, model.eos_token_ids)
        runner = ScriptedRunner(scripts, config.null_runner_rate)
    else:
        runner = NullRunner(np.array(answer, dtype=np.int32), config.null_runner_rate, log_file)
    limits = scheduler_limits(
        config,
        model,
        page_size=page_size,
        num_pages=pages,
        max_seq_len=max_seq_len,
        max_prefill_length=config.max_prefill_length or PREFILL_LENGTH,
        mixed_prefill_length=NULL_MIXED_PREFILL if config.mixed_prefill_length is None else config.mixed_prefill_length,
    )
    return Built(runner, limits, f"null runner with the tokenizer of {config.model}", is_asynchronous=True)


def _read_scripts(path: Path, encode: Callable[[str], list[int]], eos_token_ids: Sequence[int]) -> list[Int32Array]:
    """The entries of a JSON list (texts or token ids) as token ids; each but the last gets an end token."""
    given = json.loads(path.read_text(encoding="utf-8"))
    scripts = [encode(script) if isinstance(script, str) else script for script in given]
    scripts[:-1] = [[*script, eos_token_ids[0]] for script in scripts[:-1]]
    return [np.array(script, dtype=np.int32) for script in scripts]


def _encoder(config: EngineConfig, model_dir: Path) -> Callable[[str], list[int]]:
    """Text -> token ids, without the tokenizer's special tokens; without transformers where possible."""
    files = TokenizerFiles(model_dir)
    if files.suffice(trust_remote_code=config.trust_remote_code):
        backend = files.backend
        return lambda text: list(backend.encode(text, add_special_tokens=False).ids)
    from minisgl_backend.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_dir, trust_remote_code=config.trust_remote_code)
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
