"""What Triton's front door costs: the offline load as text through the ensemble against the engine alone, in one run.

    python -m benchmarks.front_door [--model qwen3-0.6b | FOLDER] [--requests 256] [--clients 4] [--dp 1] [--json]

The same 256 prompts and output lengths as benchmarks.gpu, sent as text over gRPC streaming by several client processes;
the tokenizer is a byte-level one of the model's full vocabulary, made on the spot. Then the same lengths through an
engine in this process. With `--dp N` the server has N engines and N times the load, and the ratio is over one of them.
The last line with --json holds both figures and their ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritonclient.grpc import service_pb2

from benchmarks.gpu import ENGINE_OPTIONS, MODELS, describe_machine, offline_load
from benchmarks.model_shapes import SHAPES, make_folder
from benchmarks.path_client import run_exchanges
from benchmarks.served import Served

LETTERS = "abcdefghijklmnopqrstuvwxyz"
GIVE_UP_SECONDS = 60.0


def main() -> int:
    options = _parse_arguments()
    known = options.model in SHAPES
    model = make_folder(options.model, MODELS) if known else Path(options.model)
    one_load = [(len(prompt), length) for prompt, length in offline_load()[: options.requests]]
    if options.shorter > 1:
        one_load = [(max(1, a // options.shorter), max(1, b // options.shorter)) for a, b in one_load]
    load = one_load * options.dp
    engine_options = {**ENGINE_OPTIONS, "dummy_weights": known}
    server_options = {**engine_options, "dp": options.dp}
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in server_options.items()]
        with Served("--model", str(model), *flags, log=Path(folder) / "server.log") as server:
            port = server.grpc_port
            _through_server(load, port, options.clients, round_=0)  # kernels, connections, first allocations
            time.sleep(1.5)  # the counters of the server are up to a second old
            before = server.value("minisgl_generated_tokens_total")
            rates = [_through_server(load, port, options.clients, round_=1 + k) for k in range(options.rounds)]
            time.sleep(1.5)  # the counters of the server are up to a second old
            counted = server.value("minisgl_generated_tokens_total") - before
    report: dict[str, Any] = {"front_door_tok_s": round(min(rate["tok_s"] for rate in rates), 1)}
    report |= {"responses": rates[-1]["responses"], "tokens_per_response": rates[-1]["tokens_per_response"]}
    report["unfinished"] = sum(rate["unfinished"] for rate in rates)
    report["tokens_counted"] = counted
    report["tokens_expected"] = options.rounds * sum(length for _, length in load)
    report["engine_tok_s"] = round(_engine_alone(model, one_load, engine_options, options.rounds), 1)
    report["share_of_engine"] = round(report["front_door_tok_s"] / report["engine_tok_s"], 4)
    report["machine"] = describe_machine()
    for name, value in report.items():
        print(f"{name:22} {value}")
    if options.json:
        print(json.dumps(report))
    return 1 if report["unfinished"] else 0


def _through_server(load: Sequence[tuple[int, int]], port: int, clients: int, round_: int) -> dict[str, float]:
    """The whole load at once, by processes that start together."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(clients)
    results = context.Queue()
    shares = [[(index, *load[index]) for index in range(k, len(load), clients)] for k in range(clients)]
    processes = [
        context.Process(target=_client, args=(share, port, round_, barrier, results), daemon=True) for share in shares
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    seconds = max(answer[1] for answer in answers) - min(answer[0] for answer in answers)
    tokens, responses = sum(length for _, length in load), sum(answer[2] for answer in answers)
    return {
        "tok_s": tokens / seconds,
        "responses": responses,
        "tokens_per_response": round(tokens / max(1, responses), 2),
        "unfinished": sum(answer[3] for answer in answers),
    }


def _client(share: list[tuple[int, int, int]], port: int, round_: int, barrier: Any, results: Any) -> None:
    slots = [[_request(index, prompt_len, length, round_)] for index, prompt_len, length in share]
    barrier.wait()
    exchanges = run_exchanges("127.0.0.1", port, slots, connections=min(8, len(slots)), give_up_s=GIVE_UP_SECONDS)
    responses, unfinished = 0, 0
    for exchange in exchanges:
        last = None
        for _, packed in exchange.messages():
            responses += 1
            last = packed
        final = service_pb2.ModelStreamInferResponse.FromString(last or b"")
        ended = final.infer_response.parameters["triton_final_response"].bool_param
        if not (ended and exchange.done and not final.error_message):
            unfinished += 1
            print(f"request {exchange.slot}: {final.error_message if last else 'no answer'}", file=sys.stderr)
    done = max(exchange.done for exchange in exchanges)
    results.put((min(exchange.sent for exchange in exchanges), done, responses, unfinished))


def _request(index: int, prompt_len: int, length: int, round_: int) -> bytes:
    rng = random.Random(f"{round_}/{index}")  # every prompt is new: no prefix is found cached
    message = service_pb2.ModelInferRequest(model_name="ensemble", id=f"{round_}-{index}")
    text = message.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    text.contents.bytes_contents.append("".join(rng.choices(LETTERS, k=prompt_len)).encode())
    message.inputs.add(name="max_tokens", datatype="INT32", shape=[1, 1]).contents.int_contents.append(length)
    message.inputs.add(name="temperature", datatype="FP32", shape=[1, 1]).contents.fp32_contents.append(0.6)
    flags = {"stream": True, "ignore_eos": True, "apply_chat_template": False}
    for name, value in flags.items():
        message.inputs.add(name=name, datatype="BOOL", shape=[1, 1]).contents.bool_contents.append(value)
    message.outputs.add(name="text_output")
    return bytes(message.SerializeToString())


def _engine_alone(model: Path, load: Sequence[tuple[int, int]], options: dict[str, Any], rounds: int) -> float:
    from benchmarks.driver import Driver

    driver = Driver(model, **options)
    seconds = []
    for round_ in range(1 + rounds):
        for index, (prompt_len, length) in enumerate(load):
            rng = random.Random(f"alone/{round_}/{index}")
            driver.submit([ord(letter) for letter in rng.choices(LETTERS, k=prompt_len)], length, 0.6)
        seconds.append(driver.run())
        driver.clear()
    driver.close()
    return sum(length for _, length in load) / max(seconds[1:])


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="one of " + ", ".join(SHAPES) + ", or a folder")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--shorter", type=int, default=1, help="divide all lengths by this, for slow machines")
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--dp", type=int, default=1, help="engines in the server")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds; the slowest counts")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
