"""Which node of several a process is: the command line, and what launchers say."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.server import parse_arguments
from minisgl_backend.host.server_supervisor import main
from minisgl_backend.process.node_options import SECRET, SECRET_FILE, fill_in, read_launcher, read_secret

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-006,010]-ib,login1",
}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "minisgl-0.minisgl.default"}
NOT_GIVEN = {"nodes": "2", "node_rank": None, "rendezvous": None}
SEVERAL = ["--nodes", "2", "--tp", "2"]
PLACED = [*SEVERAL, "--node-rank", "1", "--rendezvous", "127.0.0.1:29600"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SLURM, *LWS, SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SECRET, "s" * 16)


@pytest.mark.parametrize(
    ("environ", "address"),
    [(TORCHRUN, "node0:29501"), (SLURM, "gpu003-ib:29600"), (LWS, "minisgl-0.minisgl.default:29600")],
)
def test_a_launcher_says_where_a_process_is(environ: dict[str, str], address: str) -> None:
    launched = read_launcher(environ)
    assert launched is not None
    assert (launched.nodes, launched.node_rank, launched.address) == (2, 1, address)
    assert fill_in(NOT_GIVEN, environ) == {"nodes": "2", "node_rank": 1, "rendezvous": address}


def test_the_command_line_goes_before_the_launcher() -> None:
    assert fill_in({**NOT_GIVEN, "rendezvous": "other:1"}, LWS)["rendezvous"] == "other:1"
    given = {"nodes": "3", "node_rank": 0, "rendezvous": "other:1"}
    assert fill_in(given, LWS) == given


@pytest.mark.parametrize("environ", [TORCHRUN, SLURM, LWS, {}])
def test_a_launcher_does_not_make_one_server_a_node(environ: dict[str, str]) -> None:
    for nodes in (None, "1"):
        given = {**NOT_GIVEN, "nodes": nodes}
        assert fill_in(given, environ) == given


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "GROUP_WORLD_SIZE": "3"}, "nodes is 2; allowed under torchrun, which has 3: 3"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "torchrun's --nproc-per-node is 8; allowed: 1"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "16"}, "srun's --ntasks is 16; allowed with 2 nodes: 2"),
        ({**TORCHRUN, "MASTER_PORT": "auto"}, "MASTER_PORT is 'auto'; torchrun sets it to a number"),
        ({**LWS, "LWS_WORKER_INDEX": ""}, "LWS_WORKER_INDEX is ''; LeaderWorkerSet sets it to a number"),
        ({}, "--node-rank is unset; allowed with nodes 2: 0 on the machine that serves"),
    ],
)
def test_what_does_not_fit_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        fill_in(NOT_GIVEN, environ)
    assert message in str(refused.value)


def test_the_secret_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("f" * 20 + "\n", encoding="utf-8")
    assert read_secret({SECRET: "s" * 16}) == b"s" * 16
    assert read_secret({SECRET: "s" * 16 + "\n"}) == b"s" * 16
    assert read_secret({SECRET_FILE: str(file)}) == b"f" * 20
    with pytest.raises(ConfigError, match="is unset, and so is"):
        read_secret({})
    with pytest.raises(ConfigError, match=f"{SECRET} is no UTF-8"):
        read_secret({SECRET: 16 * b"\xff".decode(errors="surrogateescape")})
    with pytest.raises(ConfigError, match=r"cannot be read"):
        read_secret({SECRET_FILE: str(tmp_path / "none")})
    with pytest.raises(ConfigError) as refused:
        read_secret({SECRET: "short one"})
    assert "has 9 characters; allowed" in str(refused.value)
    assert "short one" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0", "--tp", "2"], "nodes is 0; allowed: 1 to 64"),
        (["--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1"], "nodes is 2; allowed with tp 1: a number that"),
        ([*SEVERAL, "--dp", "2", "--node-rank", "0", "--rendezvous", "a:1"], "dp is 2; allowed with nodes 2: 1"),
        ([*SEVERAL, "--node-rank", "0"], "rendezvous is unset; allowed with nodes 2: HOST:PORT"),
        (
            [*SEVERAL, "--node-rank", "0", "--rendezvous", "a:1", "--max-adapter-tasks", "2"],
            "max_adapter_tasks is 2; allowed with nodes 2: 0, since",
        ),
        ([*SEVERAL, "--node-rank", "0", "--rendezvous", "node0"], "rendezvous is 'node0'; allowed: HOST:PORT"),
        ([*SEVERAL, "--node-rank", "2", "--rendezvous", "a:1"], "--node-rank is 2; allowed with nodes 2: 0 to 1"),
        (["--node-rank", "1"], "--node-rank is 1; allowed with nodes 1: 0, or more with --nodes above 1"),
    ],
)
def test_wrong_options_end_in_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--health-port", "0"]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("[serve] error: ")
    assert message in said
    assert "\n" not in said


def test_several_nodes_need_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_arguments(PLACED).server.node_rank == 1
    monkeypatch.delenv(SECRET)
    with pytest.raises(ConfigError, match=f"{SECRET} is unset"):
        parse_arguments(PLACED)
