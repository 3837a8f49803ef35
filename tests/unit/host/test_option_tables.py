"""One table of options serves files, the command line of argparse and commands of typer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.arguments import add_options, values_of
from minisgl_backend.host.options.commands import declared_options, table_options, with_options
from minisgl_backend.host.options.endpoint import ENDPOINT_OPTIONS, EndpointSettings, endpoint_of
from minisgl_backend.host.options.parser import OptionParser
from minisgl_backend.host.options.server import SERVER_OPTIONS, ServerSettings, server_parser
from minisgl_backend.option_table import Argument, at_least, check_all, one_of, option, options_of


@dataclass(frozen=True)
class Toy:
    size: int = option(3, "a size", "1 or more", at_least(1), argument=Argument(metavar="N", reads=int))
    names: tuple[str, ...] = option((), "names", argument=Argument(flag="--name", metavar="NAME", default="none"))
    word: str = one_of("a", "a word", ("a", "b"), "--letter", argument=Argument(choices=("a", "b")))
    loud: bool = option(False, "is loud", argument=Argument())
    inner: int = 5  # no option


TABLE = options_of(Toy)
GIVEN = ["--size", "7", "--name", "x", "--letter", "b", "--loud"]


def test_a_command_line_is_read_by_the_table() -> None:
    parser = OptionParser(prog="toy")
    add_options(parser, TABLE)
    assert Toy(**values_of(TABLE, vars(parser.parse_args([])))) == Toy()
    read = Toy(**values_of(TABLE, vars(parser.parse_args(GIVEN))))
    assert read == Toy(size=7, names=("x",), word="b", loud=True)
    text = " ".join(parser.format_help().split())
    assert "--size N a size [3]" in text
    assert "names [none]" in text


def test_a_command_is_made_of_the_same_table() -> None:
    got: list[Any] = []
    app = typer.Typer()

    @dataclass(frozen=True)
    class Declared:
        seed: Annotated[int | None, typer.Option(help="A seed.")] = None

    @app.command()
    @with_options("toy", table_options(TABLE, flags={"word": "--word"}), lambda values: Toy(**values_of(TABLE, values)))
    @with_options("declared", declared_options(Declared))
    def run(toy: Toy, declared: dict[str, Any], path: str) -> None:
        got.extend([toy, declared, path])

    done = CliRunner().invoke(app, ["here", "--size", "7", "--name", "x", "--word", "b", "--loud", "--seed", "2"])
    assert done.exit_code == 0, done.output
    assert got == [Toy(size=7, names=("x",), word="b", loud=True), {"seed": 2}, "here"]
    assert CliRunner().invoke(app, ["there", "--no-loud"]).exit_code == 0
    assert got[3] == Toy()
    text = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output.split())
    assert "a size; default: 3" in text
    assert "a word; allowed: a, b; default: a" in text


def test_a_value_is_refused_by_its_flag() -> None:
    check_all(Toy(), TABLE)
    with pytest.raises(ConfigError, match=r"^--size is 0; allowed: 1 or more$"):
        check_all(Toy(size=0), TABLE)
    with pytest.raises(ConfigError, match=r"^--word is 'c'; allowed: a, b$"):
        check_all(Toy(word="c"), TABLE)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": 0}, "--openai-workers is 0; allowed: 1 or more"),
        ({"tenants": "all"}, "--tenants is 'all'; allowed: none, key, user"),
        ({"otlp_endpoint": "here:4318"}, "--otlp-endpoint is 'here:4318'; allowed: a URL, as http://127.0.0.1:4318"),
        ({"max_body_bytes": 0}, "--max-body-bytes is 0; allowed: 1 or more"),
        ({"max_batch_requests": 0}, "--max-batch-requests is 0; allowed: 1 or more"),
        ({"response_store_bytes": -1}, "--response-store-bytes is -1; allowed: 0 or more"),
        ({"served_model_names": ("",)}, "--served-model-name is ''; allowed: Unicode text of at least one character"),
        ({"api_keys": ("k", "")}, "--api-key is empty; allowed: at least one character"),
        ({"ssl_certfile": "a"}, "--ssl-certfile and --ssl-keyfile belong together; one of them is missing"),
    ],
)
def test_the_endpoint_refuses_by_flag(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EndpointSettings(**values).check()
    assert str(refused.value) == said


def test_tables_of_one_command_line_do_not_meet() -> None:
    flags = [flag for table in (SERVER_OPTIONS, ENDPOINT_OPTIONS) for row in table.values() for flag in row.flags]
    assert len({*flags}) == len(flags)
    values = vars(server_parser("minisgl serve").parse_args(["--openai-port", "9100", "--http-port", "8100"]))
    assert ServerSettings(**values_of(SERVER_OPTIONS, values)) == ServerSettings(http_port=8100)
    assert endpoint_of(values, grpc_address="h:1") == EndpointSettings(
        port=9100, grpc_address="h:1", files_folder=endpoint_of(values).files_folder
    )
