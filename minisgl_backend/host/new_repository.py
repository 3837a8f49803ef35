"""`minisgl init`: writes a model repository for a model and engine options, which a plain tritonserver serves."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from minisgl_backend.config import EngineConfig
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.arguments import INFER_HELP, add_engine_options, given_parameters
from minisgl_backend.host.options.parser import OptionParser
from minisgl_backend.host.repository import add_infer_models, render_repository
from minisgl_backend.host.triton_server import check_ascii, is_plain_path
from minisgl_backend.installation import model_repository
from minisgl_backend.models.choose import load_model_config
from minisgl_backend.models.folder import DEMOS, find_model_dir, is_local


def write_repository(target: Path, parameters: Mapping[str, str], *, infer: bool = False) -> None:
    """Writes a new model repository to `target`, a folder that is empty or does not exist yet.

    `parameters` are the engine's, as `parse_options` returns them. They are checked against the model if that is a
    local folder, but not against the machine, since another one may serve. `infer`: adds the model `infer`. Raises
    ConfigError.
    """
    _check_target(target)
    _check_model(EngineConfig.from_parameters(parameters))
    try:
        target.mkdir(parents=True, exist_ok=True)
        # The folder next to a model's versions is the demo model, which every installation has.
        render_repository(model_repository(), target, parameters, link_folders=False)
        if infer:
            add_infer_models(target)
    except OSError as error:
        raise ConfigError(f"--out is {str(target)!r}, which cannot be written: {error.strerror or error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. Exit codes: 0 written, 2 something is wrong with the arguments."""
    parser = init_parser()
    values = vars(parser.parse_args(arguments))
    target: Path = values["out"].expanduser()
    try:
        parameters = given_parameters(parser, values)
        check_ascii("the model", parameters.get("model", ""))
        write_repository(target, parameters, infer=values["infer"])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options = ", ".join(f"{name} {value or 'unset'}" for name, value in parameters.items()) or "every option's default"
    print(f"wrote {target}: {options}")
    print(f"serve it: tritonserver --model-repository {target}, or watched over: minisgl serve --repository {target}")
    return 0


def init_parser() -> OptionParser:
    """The command's options."""
    parser = OptionParser(
        prog="minisgl init",
        usage="%(prog)s [MODEL] --out DIR [OPTION ...]",
        description="Write a model repository for a model and engine options.",
        epilog="Any tritonserver serves it whose Python has this package: tritonserver --model-repository DIR.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder, or an empty one")
    parser.add_argument("--infer", action="store_true", help=INFER_HELP)
    add_engine_options(parser)
    return parser


def _check_target(target: Path) -> None:
    check_ascii("--out", target.absolute())
    if not is_plain_path(target.absolute()):
        raise ConfigError(
            f"--out is {str(target)!r}; allowed: a path without spaces or signs of the shell, since Triton's Python "
            "backend starts no model from one"
        )
    if target.is_dir():
        if any(target.iterdir()):
            raise ConfigError(f"--out is {str(target)!r}, which is not empty; allowed: a new folder, or an empty one")
    elif target.exists() or target.is_symlink():
        raise ConfigError(f"--out is {str(target)!r}, which is no folder; allowed: a new folder, or an empty one")


def _check_model(config: EngineConfig) -> None:
    if config.model in DEMOS or is_local(config.model):
        folder, trusted = find_model_dir(config.model), config.trust_remote_code
        load_model_config(folder, config.model_impl, trust_remote_code=trusted).check_tensor_parallel(config.tp)


if __name__ == "__main__":
    sys.exit(main())
