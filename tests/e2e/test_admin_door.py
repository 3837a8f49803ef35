"""`--admin-key`: adapters are loaded and unloaded over HTTP and by the Triton model `control`; without it neither is
there."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests
import tritonclient.grpc as triton
import tritonclient.utils as triton_utils
from safetensors.numpy import load_file

from tests.adapter_folders import merge, save_for
from tests.e2e.test_adapters_served import by_triton, greedy
from tests.e2e.test_families_served import PROMPT, ask_triton, save_words, served, text_of
from tests.parity.checkpoints import reference_model, save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.full]
KEY = "the-admin-key"


class Admin:
    def __init__(self, grpc: int, api: int) -> None:
        self.grpc, self.url = grpc, f"http://127.0.0.1:{api}"

    def post(self, path: str, body: Any, key: str | None = KEY) -> tuple[int, Any]:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        answer = requests.post(self.url + path, json=body, headers=headers, timeout=60)
        return answer.status_code, answer.text if answer.headers["content-type"].startswith("text/") else answer.json()

    def control(self, command: Any, key: str = KEY) -> dict[str, Any]:
        inputs = []
        for name, text in {"command": json.dumps(command), "key": key}.items():
            inputs.append(triton.InferInput(name, [1], "BYTES"))
            inputs[-1].set_data_from_numpy(np.array([text.encode()], dtype=object))
        with triton.InferenceServerClient(f"127.0.0.1:{self.grpc}") as client:
            return dict(json.loads(client.infer("control", inputs).as_numpy("result")[0]))

    def models(self) -> dict[str, Any]:
        headers = {"authorization": "Bearer none"}
        return {card["id"]: card for card in requests.get(f"{self.url}/v1/models", headers=headers).json()["data"]}


def test_adapters_are_loaded_over_each_door(tmp_path: Path) -> None:
    base, root = tmp_path / "base", tmp_path / "root"
    save_checkpoint("qwen3-tied-sharded", base)
    save_words(base)
    model = reference_model(base)
    expected = {None: greedy(model)}
    for seed, name in enumerate(("one", "two"), 1):
        save_for(root / name, model, "_proj$", seed=seed)
        merged = reference_model(base)
        merge(merged, root / name)
        expected[name] = greedy(merged)
    assert len(set(expected.values())) == 3
    outside = save_for(tmp_path / "outside", model, "_proj$")
    (root / "link").symlink_to(outside)
    options = ["--adapter-dir", str(root), "--admin-key", KEY, "--api-key", "none", "--served-model-name", "base"]
    with served(base, tmp_path / "log", *options) as (grpc, api):
        admin = Admin(grpc, api)
        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        body = {"lora_name": "x", "lora_path": str(root / "one")}
        for path in (load, unload, "/load_lora_adapter", "/unload_lora_adapter"):
            for key in (None, "none", KEY + "x", KEY[:-1], ""):
                status, answer = admin.post(f"{path}?key={KEY}&admin_key={KEY}", body, key)
                assert (status, answer["error"]["code"]) == (401, "invalid_admin_key")
            assert admin.post(path, {"wrong": 1}, "none")[0] == 401
        assert admin.control({"command": "list_adapters"}, "none")["status"] == 401
        assert by_triton(grpc, lora_name="two").strip() == expected["two"], "found by its name"
        assert admin.post(load, body) == (200, "Success: LoRA adapter 'x' added successfully.")
        assert by_triton(grpc, lora_name="x").strip() == expected["one"]
        deadline = time.monotonic() + 30
        while (card := admin.models()["x"])["state"] != "slot":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert card["parent"] == "base"
        assert admin.models()["one"]["state"] == "disk"
        status, answer = admin.post(load, body)
        assert (status, answer["error"]["message"]) == (
            400,
            "The lora adapter 'x' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
        )
        assert admin.post(load, {**body, "lora_path": "two", "load_inplace": True})[0] == 200
        assert by_triton(grpc, lora_name="x").strip() == expected["two"]
        for path in (outside, root / "link", "../outside", "/etc", root, root / ".." / "outside", "one/../../outside"):
            status, answer = admin.post(load, {"lora_name": "y", "lora_path": str(path)})
            assert (status, answer["error"]["code"]) == (403, "outside_roots"), path
        assert admin.post(load, {"lora_name": "y", "lora_path": "none"})[0] == 404
        status, answer = admin.post(load, {"lora_name": "base", "lora_path": "one"})
        assert (status, answer["error"]["message"]) == (
            400, "The lora adapter name 'base' conflicts with a served base model.",
        )  # fmt: skip
        assert admin.post(unload, {"lora_name": "x"}) == (200, "Success: LoRA adapter 'x' removed successfully.")
        status, answer = admin.post(unload, {"lora_name": "x"})
        assert (status, answer["error"]["message"]) == (404, "The lora adapter 'x' cannot be found.")
        with pytest.raises(Exception, match="lora_name is 'x', which is not served"):
            by_triton(grpc, lora_name="x")
        assert "x" not in admin.models()
        status, answer = admin.post("/load_lora_adapter", body)
        assert (status, answer) == (
            200, {"success": True, "error_message": "", "loaded_adapters": {"x": str(root / "one")}},
        )  # fmt: skip
        status, answer = admin.post("/load_lora_adapter", body)
        assert (status, answer["success"]) == (400, False)
        assert admin.post("/unload_lora_adapter", {"lora_name": "x"})[1]["loaded_adapters"] == {}
        found = admin.control({"command": "load_adapter", "name": "z", "path": "one"})
        assert (found["success"], found["adapters"]) == (True, {"z": str(root / "one")})
        assert admin.control({"command": "list_adapters"})["adapters"] == {"z": str(root / "one")}
        assert admin.control({"command": "burn"})["status"] == 400
        shutil.rmtree(root / "one")
        assert by_triton(grpc, lora_name="z").strip() == expected["one"], "the host has it"
        assert "minisgl_admin_refused_total" in requests.get(f"{admin.url}/metrics").text


def test_what_is_loaded_outlives_an_engine_core(tmp_path: Path) -> None:
    """Two engine cores have the same adapters, also once one of them has started again."""
    base, root = tmp_path / "base", tmp_path / "root"
    save_checkpoint("qwen3-tied-sharded", base)
    save_words(base)
    model = reference_model(base)
    at_start, later = save_for(root / "start", model, "_proj$"), save_for(root / "later", model, "_proj$", seed=2)
    merged = reference_model(base)
    merge(merged, later)
    options = [
        "--served-model-name",
        "base",
        "--dp",
        "2",
        "--adapters",
        f"old={at_start}",
        "--adapter-dir",
        str(root),
        "--admin-key",
        KEY,
    ]
    with served(base, tmp_path / "log", *options) as (grpc, api):
        admin = Admin(grpc, api)
        assert admin.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "later"})[0] == 200
        assert admin.post("/v1/unload_lora_adapter", {"lora_name": "old"})[0] == 200
        cores = [one for one in psutil.process_iter(["cmdline"]) if is_core(one, tmp_path)]
        assert len(cores) == 2
        for killed in (None, *cores):
            if killed is not None:
                killed.kill()
                deadline = time.monotonic() + 60
                while len([one for one in psutil.process_iter(["cmdline"]) if is_core(one, tmp_path)]) < 2:
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
                time.sleep(5)
            for _ in range(4):
                assert by_triton(grpc, lora_name="new").strip() == greedy(merged)
                with pytest.raises(Exception, match="lora_name is 'old', which is not served"):
                    by_triton(grpc, lora_name="old")
        assert set(admin.models()) - {"start", "later"} == {"base", "new"}


def is_core(process: psutil.Process, folder: Path) -> bool:
    command = process.info["cmdline"] or []
    return "minisgl_backend.engine.process" in command and any(str(folder) in one for one in command)


def test_a_request_brings_its_adapter_along(tmp_path: Path) -> None:
    """As tensorrtllm_backend's clients do: at first with its tensors, then by its id alone."""
    base = tmp_path / "base"
    save_checkpoint("qwen3-tied-sharded", base)
    save_words(base)
    model = reference_model(base)
    adapter = save_for(tmp_path / "adapter", model, "(q|o)_proj$")
    merged = reference_model(base)
    merge(merged, adapter)
    tensors, rows, config = load_file(adapter / "adapter_model.safetensors"), [], []
    for layer in range(model.config.num_hidden_layers):
        for number, leaf in ((1, "q_proj"), (4, "o_proj")):
            name = f"base_model.model.model.layers.{layer}.self_attn.{leaf}"
            a, b = (tensors[f"{name}.lora_{factor}.weight"] for factor in "AB")
            rows.append(np.concatenate([a.flatten(), 2 * b.flatten()]))  # lora_alpha / r
            config.append((number, layer, len(a)))
    weights = np.zeros((1, len(rows), max(map(len, rows))), np.float16)
    for row, values in zip(weights[0], rows, strict=True):
        row[: len(values)] = values
    arrays = (
        ("lora_task_id", np.array([[7]], np.uint64)), ("lora_weights", weights),
        ("lora_config", np.array([config], np.int32)),
    )  # fmt: skip
    inputs = []
    for name, array in arrays:
        inputs.append(triton.InferInput(name, list(array.shape), triton_utils.np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    with served(base, tmp_path / "log", "--max-adapter-tasks", "2", "--max-lora-rank", "4") as (grpc, _):
        with pytest.raises(AssertionError):  # it is not kept
            ask_triton(grpc, text_of(PROMPT), inputs[:1])
        for sent in (inputs, inputs[:1]):
            assert ask_triton(grpc, text_of(PROMPT), sent).strip() == greedy(merged)
        assert ask_triton(grpc, text_of(PROMPT)).strip() == greedy(model)


def test_without_a_key_there_is_no_door(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_checkpoint("qwen3-tied-sharded", base)
    save_words(base)
    with served(base, tmp_path / "log", "--adapter-dir", str(tmp_path)) as (grpc, api):
        admin = Admin(grpc, api)
        for path in ("/v1/load_lora_adapter", "/load_lora_adapter"):
            assert admin.post(path, {"lora_name": "x", "lora_path": "one"})[0] == 404
        with pytest.raises(Exception, match=r"unknown model|not found"):
            admin.control({"command": "list_adapters"})
