"""Every figure of docs/performance.md that one GPU gives, by one command.

    python -m benchmarks.gpu [--only PART,PART,...] [--tp 2] [--out FILE] [--json]

Each part runs in a process of its own and lands in FILE when it is done; parts that FILE already holds are skipped,
so an interrupted run goes on where it stopped (delete FILE for a fresh one). The parts `tp`, `tp_nccl` and `tp_gauge`
need as many GPUs as --tp says and run only where they are asked for. The workloads are those of Mini-SGLang's offline
benchmark and the others named in docs/performance.md; weights are random in real shapes.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.model_shapes import make_folder
from minisgl_backend.request import Grammar

ONE_GPU = ("q06", "q14", "q30", "sampling", "grammar", "start", "start14", "online", "parity", "gauge", "kv8")
SEVERAL_GPUS = ("tp", "tp_nccl", "tp_gauge")
PARTS = (*ONE_GPU, *SEVERAL_GPUS)
MODELS = Path(os.environ.get("MINISGL_BENCH_MODELS", Path(tempfile.gettempdir()) / "minisgl-bench-models"))
GAUGE_PROCESSES = 8
ENGINE_OPTIONS: dict[str, Any] = {}  # headline figures are those of default options
PROMPTS_FIRST: dict[str, Any] = {"max_prefill_length": 16384, "mixed_prefill_length": 0}
DECODE_CONTEXT = 1024  # tokens that a step sees whose time is told, unless a row says so
DECODE_BEFORE, DECODE_TOKENS = 134, 264  # how much shorter a prompt is, and its answer: 256 steps around the context
ONLINE_RATE = 3.3  # requests a second of the Poisson load: 60% of what a Qwen3-14B on one H200 serves


def offline_load() -> list[tuple[list[int], int]]:
    """256 prompts and output lengths, uniform in 100..1,024; 142,827 and 133,966 tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return [(prompt, rng.randint(100, 1024)) for prompt in prompts]


def part_q06() -> dict[str, float]:
    """Qwen3-0.6B: offline, single stream, decode by batch size, prefill by prompt length."""
    driver = _driver("qwen3-0.6b")
    results = {f"q06_{name}": value for name, value in _throughput(driver).items()}
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        results |= _decode_row(driver, f"q06_bs{batch}_ms", batch)
    for length, count in ((1000, 64), (8000, 8), (32000, 2)):
        results[f"q06_prefill_{length}_tok_s"] = _prefill(driver, length, count)
    results["q06_prefill_tok_s"] = _prefill(driver, 4000, 16)
    results |= {f"q06_split_{name}": value for name, value in _time_split(driver, 64).items()}
    results |= {f"ttft_{length}_ms": _first_token_ms(driver, length) for length in (512, 1024, 2048, 4096, 8000)}
    driver.close()
    driver = _driver("qwen3-0.6b", **PROMPTS_FIRST)
    results["q06_prompts_first_offline_tok_s"] = _offline(driver)
    results["q06_offline_over_prompts_first"] = round(
        results["q06_offline_tok_s"] / results["q06_prompts_first_offline_tok_s"], 3
    )
    driver.close()
    return results


def part_q14() -> dict[str, float]:
    """Qwen3-14B: offline, single stream, decode by batch size, prefill."""
    return _large_model("qwen3-14b", "q14")


def part_q30() -> dict[str, float]:
    """Qwen3-30B-A3B (128 experts, 8 a token): the same."""
    return _large_model("qwen3-30b-a3b", "q30")


def part_kv8() -> dict[str, float]:
    """An FP8 KV cache: Qwen3-0.6B and 14B offline, decode of 256 sequences, and the demo gauge, 500 of each kind."""
    results: dict[str, float] = {}
    for name, prefix in (("qwen3-0.6b", "q06_kv8"), ("qwen3-14b", "q14_kv8")):
        driver = _driver(name, kv_cache_dtype="fp8_e4m3")
        results |= {f"{prefix}_{figure}": value for figure, value in _throughput(driver).items()}
        results |= _decode_row(driver, f"{prefix}_bs256_ms", 256)
        driver.close()
    for backend in ("triton", "fi", "fa", "fa,trtllm"):
        options = {"attention_backend": backend, "kv_cache_dtype": "fp8_e4m3"}
        results[f"gauge_kv8_{backend}"] = _gauge_cell((f"kv8_{backend}", options, 500 if backend == "triton" else 50))
    return results


# What a request of the part `sampling` asks for beside temperature 0.6; the values are those of vLLM's benchmark too.
SAMPLING_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.95},
    "qwen3": {"top_k": 20, "top_p": 0.95},
    "min_p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.1},
    "presence": {"presence_penalty": 0.5},
    "logprobs": {"logprobs": 5},
    "bias": {"logit_bias": {5: 1.0}},
}
SAMPLING_LOADS = ((1, 256), (64, 128))  # streams and tokens of each, after prompts of 128 tokens


def part_sampling() -> dict[str, float]:
    """Qwen3-0.6B, tokens a second by sampling option and under JSON schemas: the better of two runs after a warm-up."""
    driver = _driver("qwen3-0.6b")
    results: dict[str, float] = {}
    for name, options in SAMPLING_OPTIONS.items():
        for count, tokens in SAMPLING_LOADS:
            seconds = [_sampling_run(driver, f"{name} {turn}", count, tokens, [options] * count) for turn in range(3)]
            results[f"sampling_{name}_{count}_tok_s"] = round(count * tokens / min(seconds[1:]))
    for count, tokens in SAMPLING_LOADS:
        schemas = [{"grammar": Grammar(kind="json_schema", text=json_schema(index))} for index in range(count)]
        for index in range(count):
            driver.submit([index], 1, 0.6, **schemas[index])
        results[f"grammar_{count}_compile_s"] = round(driver.wait_for_grammars(), 3)
        driver.run()
        seconds = [_sampling_run(driver, f"grammar {turn}", count, tokens, schemas) for turn in range(3)]
        results[f"grammar_{count}_tok_s"] = round(count * tokens / min(seconds[1:]))
    driver.close()
    return results


def _sampling_run(driver: Any, seed: str, count: int, tokens: int, options: list[dict[str, Any]]) -> float:
    """Seconds; grammars are compiled, from the compiler's cache, before the clock starts."""
    rng = random.Random(f"{seed} {count}")
    driver.clear()
    for one in options:
        driver.submit([rng.randint(0, 10000) for _ in range(128)], tokens, **{"temperature": 0.6, **one})
    driver.wait_for_grammars()
    elapsed = driver.run()
    given = [len(timeline.tokens) for timeline in driver.timelines.values()]
    if given != [tokens] * count:
        raise RuntimeError(f"answers have {min(given)} to {max(given)} tokens; expected: {tokens}")
    return float(elapsed)


def json_schema(index: int) -> str:
    """A schema of its own for each index: a long array of objects with enumerations, integers and short texts."""
    fields = {
        f"kind_{index}": {"enum": [f"option {index} {choice}" for choice in range(5)]},
        "count": {"type": "integer"},
        f"name_{index}": {"type": "string", "maxLength": 12},
        "done": {"type": "boolean"},
    }
    item = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return json.dumps({"type": "array", "items": item, "minItems": 200})


def part_grammar() -> dict[str, float]:
    """Qwen3-0.6B: what the first JSON schema takes that comes when the engine is ready, then 64 others at once; and the
    start, with compilers that start beside it and without, the quickest of three each."""
    from benchmarks.driver import Driver

    starts = [[_core_start_seconds(warm) for warm in ("True", "False")] for _ in range(3)]
    results = dict(zip(("grammar_ready_s", "grammar_ready_without_s"), map(min, *starts), strict=True))
    driver = Driver(make_folder("qwen3-0.6b", MODELS), owns_process=True)
    for name, schemas in (("grammar_first_schema_s", [0]), ("grammar_64_schemas_s", list(range(1, 65)))):
        for index in schemas:
            grammar = Grammar(kind="json_schema", text=json_schema(index))
            driver.submit([index], 1, 0.6, grammar=grammar)
        results[name] = round(driver.wait_for_grammars(), 3)
        driver.run()
    driver.close()
    return results


def _core_start_seconds(warm: str) -> float:
    folder = make_folder("qwen3-0.6b", MODELS)
    code = f"""
from pathlib import Path
from benchmarks.driver import Driver
from minisgl_backend.grammar.compiling.compilers import GrammarCompilers
if not {warm}:
    GrammarCompilers.warm_up = lambda self: None
driver = Driver(Path({str(folder)!r}), owns_process=True)
print(driver.start_seconds)
driver.close()
"""
    process = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    return round(float(process.stdout.split()[-1]), 2)


def part_tp(tp: int) -> dict[str, float]:
    """Sums over several GPUs, then Qwen3-32B on them and on one."""
    from benchmarks import collectives

    sums = collectives.run(tp)
    collectives.print_table(sums, hidden=5120)
    batches = (1, 8, 64)
    return {
        **sums,
        **_large_model("qwen3-32b", f"q32_tp{tp}", batches, tp=tp),
        **_large_model("qwen3-32b", "q32_tp1", batches),
    }


def part_tp_nccl(tp: int) -> dict[str, float]:
    """Qwen3-32B on several GPUs, with all sums by NCCL."""
    return _large_model("qwen3-32b", f"q32_tp{tp}_nccl", (1, 8, 64), tp=tp, disable_pynccl=True)


def part_tp_gauge(tp: int) -> dict[str, float]:
    """The demo gauge on several GPUs: default options, sums by NCCL, prompts kernel by kernel."""
    cells: dict[str, dict[str, Any]] = {
        f"tp{tp}": {},
        f"tp{tp}_nccl": {"disable_pynccl": True},
        f"tp{tp}_no_pieces": {"cuda_graph_max_tokens": 0},
    }
    return {f"gauge_{name}": _gauge_cell((name, {"tp": tp, **options}, 50)) for name, options in cells.items()}


def part_parity() -> dict[str, float | None]:
    """Logits against transformers, same weights, in real shapes: see benchmarks/parity.py."""
    from benchmarks.parity import BACKENDS, run_parity
    from benchmarks.parity import MODELS as PARITY_MODELS

    return run_parity(PARITY_MODELS, BACKENDS, MODELS)


def part_start() -> dict[str, float]:
    """Process start of `LLM` on a saved random Qwen3-0.6B checkpoint to its first token, caches deleted and warm."""
    cold, *warm = _start_seconds("qwen3-0.6b")
    return {"q06_cold_start_s": cold, "q06_warm_start_s": max(warm)}


def part_start14() -> dict[str, float]:
    """The same with Qwen3-14B: 28 GB on disk, in the page cache since they were written there a moment ago."""
    cold, *warm = _start_seconds("qwen3-14b")
    return {"q14_cold_start_s": cold, "q14_warm_start_s": max(warm)}


def _start_seconds(name: str) -> list[float]:
    """To the first token of three starts, without the process's end; for the first, every compiler's cache is empty."""
    folder = make_folder(name, MODELS, weights=True)
    code = f"import time; from minisgl_backend import LLM; llm = LLM(model={str(folder)!r})"
    code += "; llm.generate([[1, 2, 3]], max_tokens=1); print(time.time())"
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            **os.environ,
            "TRITON_CACHE_DIR": f"{caches}/triton",
            "FLASHINFER_WORKSPACE_BASE": caches,
            "CUDA_CACHE_PATH": f"{caches}/cuda",
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            # Bytecode is a cache too. Installers leave it beside the sources, but not all, nor in every image.
            "PYTHONPYCACHEPREFIX": f"{caches}/bytecode",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        seconds = []
        for _ in range(3):
            started = time.time()
            process = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE)
            seconds.append(round(float(process.stdout.split()[-1]) - started, 1))
    return seconds


def part_online() -> dict[str, float]:
    """Poisson arrivals: time to first token and between tokens, prompts beside streams (the default) and first."""
    results: dict[str, float] = {"online_arrivals_per_s": ONLINE_RATE}
    for name, options in (("mixed", {}), ("unmixed", {"mixed_prefill_length": 0})):
        driver = _driver("qwen3-14b", **options)
        load = online_load(seed=2)
        results |= {f"online_{name}_{key}": value for key, value in _poisson(driver, load, ONLINE_RATE).items()}
        driver.close()
    return results


def online_load(seed: int) -> list[tuple[list[int], int]]:
    """120 prompts of 100 to 4,000 tokens and output lengths of 100 to 500.

    Lengths are the same for every seed, tokens are not: a load that ran before is in the prefix cache, and of a cached
    prompt nothing is left to compute beside the streams.
    """
    lengths, tokens = random.Random(1), random.Random(f"tokens {seed}")
    sizes = [(lengths.randint(100, 4000), lengths.randint(100, 500)) for _ in range(120)]
    return [([tokens.randint(0, 10000) for _ in range(prompt)], length) for prompt, length in sizes]


def part_gauge() -> dict[str, float]:
    """The demo gauge on every backend, hybrid, page size and graph setting: the worst kind of each, and of all.

    Cells run in processes of their own, several at a time: the demo model leaves most of a GPU idle.
    """
    with concurrent.futures.ThreadPoolExecutor(GAUGE_PROCESSES) as pool:
        shares = list(pool.map(_gauge_cell, _gauge_cells()))
    cells = {f"gauge_{name}": share for (name, _, _), share in zip(_gauge_cells(), shares, strict=True)}
    return {**cells, "demo_gauge_worst": min(cells.values())}


def _gauge_cell(cell: tuple[str, dict[str, Any], int]) -> float:
    name, options, per_kind = cell
    command = [sys.executable, "-m", "benchmarks.gauge", "--json", "--per-kind", str(per_kind), "--in-process"]
    # Each process takes only what it needs, so that several fit.
    pages = {"num_pages": 400_000 // int(options.get("page_size", 64))}
    command += [f"{option}={value}" for option, value in {**pages, **options}.items()]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        print(f"gauge {name} failed: {process.stderr.strip().splitlines()[-1:]}", file=sys.stderr, flush=True)
        return 0.0
    result = json.loads(process.stdout.strip().splitlines()[-1])
    print(f"gauge {name}: {result['demo_gauge']}", file=sys.stderr, flush=True)
    return float(result["worst"])


def _gauge_cells() -> list[tuple[str, dict[str, Any], int]]:
    cells: list[tuple[str, dict[str, Any], int]] = [("defaults", {}, 500)]
    for backend in ("triton", "fa", "fi", "torch", "fa,triton", "fa,fi", "fa,trtllm", "triton,fi"):
        for page_size in (1, 16, 64):
            if "trtllm" in backend and page_size == 1:
                continue
            cells.append((f"{backend}_page{page_size}", {"attention_backend": backend, "page_size": page_size}, 50))
    cells.append(("eager", {"cuda_graph_max_bs": 0}, 50))
    cells.append(("decode_graphs_only", {"cuda_graph_max_tokens": 0}, 50))
    cells.append(("naive_cache", {"cache_type": "naive"}, 50))
    cells.append(("chunks_of_64", {"max_prefill_length": 64, "mixed_prefill_length": 32}, 50))
    return cells


def _driver(name: str, **options: Any) -> Any:
    from benchmarks.driver import Driver

    driver = Driver(make_folder(name, MODELS), **{**ENGINE_OPTIONS, **options})
    print(driver.engine.welcome.description, file=sys.stderr, flush=True)
    # Libraries load kernels at the first GEMM of a size; what is measured is the engine after that.
    for length, count in ((64, 1), (600, 1), (558, 64), (4000, 8)):
        for index in range(count):
            driver.submit([index] * length, 4, 0.6)
        driver.run()
    driver.clear()
    return driver


def _large_model(
    name: str, prefix: str, batches: tuple[int, ...] = (1, 8, 64, 256), **options: Any
) -> dict[str, float]:
    driver = _driver(name, **options)
    results = {f"{prefix}_{figure}": value for figure, value in _throughput(driver).items()}
    results[f"{prefix}_prefill_tok_s"] = _prefill(driver, 4000, 16)
    for batch in batches:
        results |= _decode_row(driver, f"{prefix}_bs{batch}_ms", batch)
    driver.close()
    return results


def _throughput(driver: Any) -> dict[str, float]:
    offline = _offline(driver)
    rng = random.Random(2)
    driver.submit([rng.randint(0, 10000) for _ in range(128)], 512)
    single = 512 / driver.run()
    driver.clear()
    return {"offline_tok_s": offline, "single_tok_s": round(single, 1)}


def _offline(driver: Any) -> float:
    """Tokens a second of 256 requests that come at once."""
    load = offline_load()
    for prompt, length in load:
        driver.submit(prompt, length, 0.6)
    tokens_per_second = sum(length for _, length in load) / driver.run()
    driver.clear()
    return round(tokens_per_second)


def _first_token_ms(driver: Any, length: int, repeats: int = 10) -> float:
    """Median from submitting a lone prompt to its first token. Every prompt is new to the prefix cache."""
    rng = random.Random(f"first token {length}")  # no prompt of another part, which the prefix cache may hold
    taken = []
    for _ in range(repeats + 2):  # libraries load kernels for this size
        uid = driver.submit([rng.randint(0, 10000) for _ in range(length)], 1)
        driver.run()
        timeline = driver.timelines[uid]
        taken.append(timeline.tokens[0] - timeline.submitted)
    driver.clear()
    return round(1000 * statistics.median(taken[2:]), 2)


def _decode_row(driver: Any, name: str, batch: int, context: int = DECODE_CONTEXT) -> dict[str, float]:
    """Milliseconds a step under this name; nothing where the cache has no room for all sequences at once: some would
    wait, and the steps of the others are those of a smaller batch."""
    pages = batch * -(-(context - DECODE_BEFORE + DECODE_TOKENS) // driver.engine.welcome.page_size)
    if pages > driver.engine.welcome.num_pages:
        print(
            f"{name}: left out, since {batch} sequences need {pages} pages of the KV cache and "
            f"{driver.engine.welcome.num_pages} fit",
            file=sys.stderr,
            flush=True,
        )
        return {}
    return {name: _decode_ms(driver, batch, context)}


def _decode_ms(driver: Any, batch: int, context: int) -> float:
    """Mean step over 256 tokens of context, of which `context` is the middle."""
    rng = random.Random(batch)
    prompts = [[rng.randint(0, 10000) for _ in range(context - DECODE_BEFORE)] for _ in range(batch)]
    # The second time prompts are cached, so that all sequences decode at the same time.
    for num_tokens in (1, DECODE_TOKENS):
        driver.clear()
        for prompt in prompts:
            driver.submit(prompt, num_tokens)
        driver.run()
    stamps = sorted({stamp for timeline in driver.timelines.values() for stamp in timeline.tokens})
    driver.clear()
    return round(1000 * (stamps[-2] - stamps[-258]) / 256, 3)


def _prefill(driver: Any, length: int, count: int) -> float:
    rng = random.Random(length)
    seconds = 0.0
    for _ in range(2):  # the first time, libraries load kernels for these sizes
        for _ in range(count):
            driver.submit([rng.randint(0, 10000) for _ in range(length)], 1)
        seconds = driver.run()
        driver.clear()
    return round(length * count / seconds)


def _time_split(driver: Any, batch: int) -> dict[str, float]:
    """Milliseconds a step: the whole, the device with a kernel running or idle, and the host at work (not waiting)."""
    import torch

    rng = random.Random(3)
    steps = 50
    for _ in range(batch):
        driver.submit([rng.randint(0, 10000) for _ in range(500)], 60 + 3 * steps)
    for _ in range(40):
        driver.step()
    started, waited = time.perf_counter(), 0.0
    wait_for = torch.cuda.Event.synchronize

    def wait(event: torch.cuda.Event) -> None:
        nonlocal waited
        began = time.perf_counter()
        wait_for(event)
        waited += time.perf_counter() - began

    with mock.patch.object(torch.cuda.Event, "synchronize", wait):
        for _ in range(steps):
            driver.step()
    whole = time.perf_counter() - started
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            driver.step()
        torch.cuda.synchronize()
    on_device = [e.time_range for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy, idle = busy_and_idle([(time_range.start, time_range.end) for time_range in on_device])
    driver.run()
    driver.clear()
    parts = {"whole_ms": whole, "busy_ms": busy / 1e6, "gaps_ms": idle / 1e6, "host_ms": whole - waited}
    return {f"bs{batch}_{name}": round(1000 * value / steps, 3) for name, value in parts.items()}


def busy_and_idle(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """How long at least one of the intervals (start, end) runs, and how long none does between the first and last."""
    busy, covered = 0.0, min((start for start, _ in intervals), default=0.0)
    first = covered
    for start, end in sorted(intervals):
        busy += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return busy, covered - first - busy


def _poisson(driver: Any, load: list[tuple[list[int], int]], rate: float) -> dict[str, float]:
    rng = random.Random(4)
    due, now = [], 0.0
    for _ in load:
        now += rng.expovariate(rate)
        due.append(now)
    started, sent = time.perf_counter(), 0
    while sent < len(load) or not all(timeline.done for timeline in driver.timelines.values()):
        while sent < len(load) and time.perf_counter() - started >= due[sent]:
            driver.submit(*load[sent], 0.6)
            sent += 1
        if not driver.step():
            time.sleep(0.001)
    first = sorted(t.tokens[0] - t.submitted for t in driver.timelines.values())
    between = sorted(b - a for t in driver.timelines.values() for a, b in zip(t.tokens, t.tokens[1:], strict=False))
    driver.clear()

    def at(values: list[float], share: float) -> float:
        return round(1000 * values[min(len(values) - 1, int(share * len(values)))], 2)

    return {
        "ttft_p50_ms": at(first, 0.5),
        "ttft_p99_ms": at(first, 0.99),
        "itl_p50_ms": at(between, 0.5),
        "itl_p99_ms": at(between, 0.99),
        "itl_p99_over_p50": round(at(between, 0.99) / at(between, 0.5), 2),
    }


def describe_machine() -> dict[str, str]:
    """What the figures were made on."""
    import torch

    commit = os.environ.get("MINISGL_COMMIT", "")  # for copies of the checkout without its history
    if not commit:
        with contextlib.suppress(OSError):
            command = ["git", "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_cores": str(os.cpu_count()),
        "options": json.dumps(ENGINE_OPTIONS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ONE_GPU), help="parts to run, of: " + ", ".join(PARTS))
    parser.add_argument("--tp", type=int, default=2, help="GPUs of the parts " + ", ".join(SEVERAL_GPUS))
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"))
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object, last line")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        run: Callable[..., dict[str, Any]] = globals()[f"part_{arguments.part}"]
        print(json.dumps(run(arguments.tp) if arguments.part in SEVERAL_GPUS else run()))
        return
    if shutil.which("nvidia-smi") is None:
        raise SystemExit("benchmarks.gpu needs an NVIDIA GPU")
    results: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.is_file() else {}
    for part in arguments.only.split(","):
        if part in results:
            print(f"{part}: already in {arguments.out}")
            continue
        started = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--tp", str(arguments.tp)]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = process.stdout.strip().splitlines()
        if process.returncode or not lines:
            print("\n".join(lines[-20:]))
            print(f"{part}: failed with exit code {process.returncode}", flush=True)
            continue
        results[part] = json.loads(lines[-1])
        results["machine"] = describe_machine()
        arguments.out.write_text(json.dumps(results, indent=1))
        print(f"{part} ({time.perf_counter() - started:.0f} s)")
        for name, value in results[part].items():
            print(f"    {name:36} {value}", flush=True)
    if arguments.json:
        flat = {name: value for part in PARTS for name, value in results.get(part, {}).items()}
        print(json.dumps({**flat, "machine": results.get("machine", {})}))


if __name__ == "__main__":
    main()
