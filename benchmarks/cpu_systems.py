"""One system of `benchmarks.cpu`, in a process of its own: loads a model once, then measures whenever it is asked.

`PYTHON -m benchmarks.cpu_systems own|transformers|llama.cpp FOLDER '{"threads": 2, ...}'` answers each JSON line on
standard input, `{"streams": 8, "prompt": 32, "answer": 64}`, by one on standard output, `{"first_s": [...], "end_s":
s, "processor_s": s}`: seconds from the start to the first token of each stream and to the last token of all, and what
all threads computed meanwhile. Before the first question it says `{"ready": "what it is"}` or `{"missing": "what to
install"}`. PYTHON needs that system's packages alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu_files import SHAPE, MissingPackage, gguf_file

MAX_STREAMS = 8
MAX_TOKENS = 1024  # of a prompt and its answer


class System(ABC):
    """`format`: the number format of weights, "" for the system's own choice."""

    description: str

    @abstractmethod
    def answer(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[float], float]:
        """Seconds to each prompt's first token, and to the last of `num_tokens` greedy tokens of all of them."""


class Own(System):
    """This project's engine, scheduler and sampler included, with its default options."""

    def __init__(self, folder: Path, format: str, threads: int, file: str = "", shape: str = SHAPE) -> None:
        """file: a GGUF file in place of random weights in that shape."""
        from minisgl_backend.process.resources import set_torch_defaults

        os.environ["OMP_NUM_THREADS"] = str(threads)
        set_torch_defaults()
        from benchmarks.driver import Driver
        from benchmarks.model_shapes import make_folder
        from minisgl_backend.models.folder import find_model_dir

        model = find_model_dir(file) if file else make_folder(shape, folder)
        self._driver = Driver(
            model,
            max_running_requests=MAX_STREAMS,
            max_seq_len_override=MAX_TOKENS,
            cache_type="naive",
            dtype=format or "auto",
            dummy_weights=not file,
        )
        # Figures are published: a folder of this machine is nothing to tell.
        self.description = self._driver.engine.welcome.description.replace(str(model), Path(file).name or shape)

    def answer(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[float], float]:
        self._driver.clear()
        started = time.perf_counter()
        for prompt in prompts:
            self._driver.submit(prompt, num_tokens)
        self._driver.run()
        timelines = self._driver.timelines.values()
        return [one.tokens[0] - started for one in timelines], max(one.tokens[-1] for one in timelines) - started


class Transformers(System):
    """`generate` of transformers: one static batch."""

    def __init__(self, folder: Path, format: str, threads: int) -> None:
        import torch

        try:
            import transformers
        except ImportError as error:
            raise MissingPackage(f"pip install transformers ({error})") from None
        from benchmarks.model_shapes import make_folder

        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        config = transformers.AutoConfig.from_pretrained(make_folder(SHAPE, folder))
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, format or "float32"))
        self._model.eval()
        self._model.generation_config.eos_token_id = None
        self._torch, self._transformers = torch, transformers
        self.description = f"transformers {transformers.__version__}, torch {torch.__version__}, {format or 'float32'}"

    def answer(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[float], float]:
        times: list[float] = []

        def note(input_ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter())
            return scores

        started = time.perf_counter()
        self._model.generate(
            self._torch.tensor(prompts),
            attention_mask=self._torch.ones(len(prompts), len(prompts[0]), dtype=self._torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            logits_processor=self._transformers.LogitsProcessorList([note]),
        )
        return [times[0] - started] * len(prompts), times[-1] - started


class LlamaCpp(System):
    """llama.cpp by its C interface: all sequences in one batch, the likeliest tokens found by NumPy."""

    def __init__(self, folder: Path, format: str, threads: int, flash_attention: bool, file: str = "") -> None:
        try:
            import llama_cpp
        except ImportError as error:
            raise MissingPackage(f"pip install llama-cpp-python, which compiles for this processor ({error})") from None
        import numpy as np

        path = Path(file) if file else gguf_file(folder, SHAPE, format or "bf16")
        self._lib, self._np = llama_cpp, np
        llama_cpp.llama_backend_init()
        with _quiet():
            self._model = llama_cpp.llama_model_load_from_file(
                str(path).encode(), llama_cpp.llama_model_default_params()
            )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._threads, self._flash = threads, flash_attention
        self._contexts: dict[int, Any] = {}
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        flash = "with" if flash_attention else "without"
        self.description = (
            f"llama-cpp-python {llama_cpp.__version__}, {Path(file).name or format}, {flash} flash attention"
        )

    def answer(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[float], float]:
        lib, np, streams = self._lib, self._np, len(prompts)
        context = self._context(streams)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        length = len(prompts[0])
        batch = lib.llama_batch_init(streams * length, 0, streams)
        try:
            started = time.perf_counter()
            tokens = [(token, p, s) for s, prompt in enumerate(prompts) for p, token in enumerate(prompt)]
            found = self._decode(context, batch, tokens, length - 1)
            first = time.perf_counter() - started
            for position in range(length, length + num_tokens - 1):
                found = self._decode(context, batch, [(int(t), position, s) for s, t in enumerate(found)], position)
            assert np.isfinite(found).all()
            return [first] * streams, time.perf_counter() - started
        finally:
            lib.llama_batch_free(batch)

    def _decode(self, context: Any, batch: Any, tokens: list[tuple[int, int, int]], last: int) -> list[int]:
        """Computes (token, position, sequence)s and returns the next token of those at position `last`."""
        wanted = []
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = position == last
            if position == last:
                wanted.append(i)
        batch.n_tokens = len(tokens)
        if self._lib.llama_decode(context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = (self._lib.llama_get_logits_ith(context, i) for i in wanted)
        return [int(self._np.ctypeslib.as_array(one, (self._vocab_size,)).argmax()) for one in logits]

    def _context(self, streams: int) -> Any:
        if streams not in self._contexts:
            params = self._lib.llama_context_default_params()
            params.n_ctx = streams * MAX_TOKENS
            params.n_batch = params.n_ubatch = MAX_TOKENS
            params.n_seq_max = streams
            params.n_threads = params.n_threads_batch = self._threads
            params.flash_attn_type = int(self._flash)  # LLAMA_FLASH_ATTN_TYPE_DISABLED is 0, ENABLED 1
            params.no_perf = True
            with _quiet():
                context = self._lib.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError("llama.cpp makes no context")
            self._contexts[streams] = context
        return self._contexts[streams]


@contextlib.contextmanager
def _quiet() -> Any:
    """llama.cpp writes pages about every model to standard error."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


def _make(name: str, folder: Path, options: dict[str, Any]) -> System:
    kinds: dict[str, Callable[..., System]] = {"own": Own, "transformers": Transformers, "llama.cpp": LlamaCpp}
    return kinds[name](folder, **options)


def main(name: str, folder: Path, options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        system = _make(name, folder, options)
    except MissingPackage as missing:
        print(json.dumps({"missing": str(missing)}), file=answers)
        return
    print(json.dumps({"ready": system.description}), file=answers)
    draw = random.Random(0)
    for line in sys.stdin:
        wanted = json.loads(line)
        prompts = [[draw.randrange(10000) for _ in range(wanted["prompt"])] for _ in range(wanted["streams"])]
        before = time.process_time()
        first, end = system.answer(prompts, wanted["answer"])
        processor = time.process_time() - before
        print(json.dumps({"first_s": first, "end_s": end, "processor_s": processor}), file=answers)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
