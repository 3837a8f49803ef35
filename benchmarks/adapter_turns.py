"""More adapters than slots: how much throughput turns leave, and how long a first token is waited for.

    python -m benchmarks.adapter_turns MODEL [--adapters 8,16] [--slots 8] [--rank 16] [--rows 64] [--seconds 30]

Requests are always open, each for an adapter drawn evenly, with a prompt that shares nothing. For each number of
adapters it prints tokens a second, the longest wait for a first token, and that wait in units of the time that one
answer takes in that load. MODEL is a folder of a Llama or Qwen without experts; its adapters are random, on all linear
layers.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from minisgl_backend import LLM
from minisgl_backend.request import Request

OPEN, PROMPT, ANSWER = 64, 32, 64


@dataclass
class Load:
    """What is seen of one load."""

    asked: dict[int, float] = field(default_factory=dict)  # seconds, by uid
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    tokens: int = 0


def save_random_adapter(folder: Path, config: dict[str, Any], rank: int, seed: int) -> Path:
    """config: of the model, as in its config.json."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = head * config.get("num_key_value_heads", heads)
    sizes = {"self_attn.q_proj": (hidden, heads * head), "self_attn.k_proj": (hidden, kv)}
    sizes |= {"self_attn.v_proj": (hidden, kv), "self_attn.o_proj": (heads * head, hidden)}
    sizes |= {"mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden)}
    dice, tensors = np.random.default_rng(seed), {}
    for layer in range(config["num_hidden_layers"]):
        for name, (size_in, size_out) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = _noise(dice, rank, size_in)
            tensors[f"{module}.lora_B.weight"] = _noise(dice, size_out, rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def _noise(dice: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float16]:
    return (dice.standard_normal((rows, columns), np.float32) * 0.02).astype(np.float16)


def measure(llm: LLM, names: list[str], seconds: float) -> Load:
    """`OPEN` requests at a time for so long."""
    core, dice, load, uid = llm.engine.core, random.Random(1), Load(), 0
    vocab, began = llm.engine.welcome.vocab_size, time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        while len(load.asked) - len(load.ended) < OPEN:
            ids = np.array([dice.randrange(vocab) for _ in range(PROMPT)], "<i4").tobytes()
            params = llm.sampling_params(max_tokens=ANSWER, ignore_eos=True, lora_name=dice.choice(names))
            core.submit(Request(uid=uid, token_ids=ids, params=params))
            load.asked[uid], uid = now, uid + 1
        core.step()
        outputs = core.drain_outputs()
        if outputs is None:
            continue
        now = time.monotonic()
        load.tokens += len(outputs.uids)
        for one, reason in zip(outputs.uids.tolist(), outputs.reasons.tolist(), strict=True):
            load.first.setdefault(one, now)
            if reason:
                load.ended[one] = now
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", default="8,16", help="numbers of them")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="max_running_requests")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    config = json.loads((options.model / "config.json").read_text())
    counts = [int(count) for count in options.adapters.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            f"a{one}": save_random_adapter(Path(folder, f"a{one}"), config, options.rank, one)
            for one in range(max(counts))
        }
        for count in counts:
            names = [*paths][:count]
            adapters = ",".join(f"{name}={paths[name]}" for name in names)
            with LLM(
                str(options.model), adapters=adapters, max_adapters=options.slots, max_running_requests=options.rows
            ) as llm:
                measure(llm, names, min(5.0, options.seconds / 4))
                load = measure(llm, names, options.seconds)
            # Of a quarter at least the adapter has a slot when they come: they take what an answer takes.
            waits = [load.first.get(one, time.monotonic()) - asked for one, asked in load.asked.items()]
            alone = float(np.quantile([load.ended[one] - load.asked[one] for one in load.ended], 0.25))
            print(
                f"{count} adapters over {options.slots} slots: {load.tokens / options.seconds:.0f} tokens/s, longest "
                f"wait {max(waits):.2f} s = {max(waits) / alone:.2f} answers of {alone:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
