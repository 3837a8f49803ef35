"""The settings of the OpenAI-compatible endpoint, and its options on the server's command line."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from minisgl_backend.config import is_media_domain
from minisgl_backend.errors import ConfigError
from minisgl_backend.host.options.arguments import tcp_port_or_none, values_of
from minisgl_backend.option_table import Argument, at_least, check_all, one_of, option, options_of
from minisgl_backend.parsers.table import REASONING_PARSERS, TOOL_PARSERS
from minisgl_backend.process.writable import is_full, write_error

FILES, BATCHES = "files", "batches"  # the parts of a folder of files

TENANTS = ("none", "key", "user")

_PACKAGES = ("fastapi", "uvicorn", "tritonclient")


def _is_name(text: str) -> bool:
    """False for undecodable bytes of an argument, or any non-ASCII ones if Python's encoding is ASCII."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """The endpoint's settings. Addresses are HOST:PORT. Options that are wrong are refused by `check`."""

    host: str = "127.0.0.1"
    grpc_address: str = "127.0.0.1:8001"
    grpc_secure: bool = False  # use TLS to the server
    metrics_address: str = ""  # of the server's metrics; "": there are none
    state_folder: str = ""  # shared by the workers; "": a folder that is removed with the endpoint
    takes_commands: bool = False  # of whoever has the server's admin key
    max_requests: int = 8192  # of one worker at a time; further ones are answered 429
    port: int = option(
        9000,
        "0: no endpoint",
        argument=Argument(flag="--openai-port", metavar="PORT", reads=tcp_port_or_none),
    )
    workers: int = option(
        1,
        "processes, for many streams at once",
        "1 or more",
        at_least(1),
        argument=Argument(flag="--openai-workers", metavar="N", reads=int),
    )
    served_model_names: tuple[str, ...] = option(
        (),
        "what clients call the model",
        "Unicode text of at least one character",
        _is_name,
        argument=Argument(flag="--served-model-name", metavar="NAME", default="the model's name"),
    )
    api_keys: tuple[str, ...] = option(
        (),
        "keys that clients need one of; also MINISGL_API_KEY",
        secret=True,
        argument=Argument(flag="--api-key", metavar="KEY", default="none"),
    )
    tenants: str = one_of(
        "none",
        "with --fair-shares: whose request it is, by its API key (key-1 for the first) or its user",
        TENANTS,
        argument=Argument(choices=TENANTS),
    )
    tool_call_parser: str = one_of(
        "auto", "how the model writes tool calls", TOOL_PARSERS, argument=Argument(choices=TOOL_PARSERS)
    )
    reasoning_parser: str = one_of(
        "auto", "how it marks its thoughts", REASONING_PARSERS, argument=Argument(choices=REASONING_PARSERS)
    )
    otlp_endpoint: str = option(
        "",
        "of an OpenTelemetry collector (OTLP over HTTP), which gets the spans of requests",
        "a URL, as http://127.0.0.1:4318",
        lambda text: not text or text.startswith(("http://", "https://")),
        argument=Argument(metavar="URL", default="none"),
    )
    ssl_certfile: str = option("", "serves https with this certificate", argument=Argument(metavar="FILE", default=""))
    ssl_keyfile: str = option("", "and its key", argument=Argument(metavar="FILE", default=""))
    allowed_origins: tuple[str, ...] = option(
        (), "whose pages browsers let in (CORS); *: all", argument=Argument(metavar="ORIGIN", default="none")
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "names in Host, as a proxy passes them on, beside this machine's own; *: all",
        argument=Argument(metavar="NAME", default="on a loopback host: none"),
    )
    media_domains: tuple[str, ...] = option(
        (),
        "hosts whose images are fetched for requests that give their URL; *.NAME: all below it, *: all public ones",
        "names in small letters, *.NAME or *",
        is_media_domain,
        argument=Argument(flag="--allowed-media-domains", metavar="HOST", default="none"),
    )
    max_body_bytes: int = option(16 << 20, "", "1 or more", at_least(1), argument=Argument(metavar="N", reads=int))
    response_store_bytes: int = option(
        256 << 20,
        "of responses that are kept for previous_response_id; 0: none are",
        "0 or more",
        at_least(0),
        argument=Argument(metavar="N", reads=int),
    )
    files_folder: str = option(
        "",
        "where files and batches are kept",
        argument=Argument(
            flag="--files-dir",
            metavar="DIR",
            default="minisgl/files-PORT in XDG_STATE_HOME or ~/.local/state",
        ),
    )
    max_files_bytes: int = option(
        4 << 30,
        "of all of them; 0: no files and no batches",
        "0 or more",
        at_least(0),
        argument=Argument(metavar="N", reads=int),
    )
    max_batch_requests: int = option(
        16,
        "requests of batches at a time, below all others by priority",
        "1 or more",
        at_least(1),
        argument=Argument(metavar="N", reads=int),
    )
    ignore_unknown_fields: bool = option(
        False,
        "requests may have fields that this server does not know; the log names each once",
        argument=Argument(default="refused by name"),
    )

    def check_packages(self) -> None:
        """Raises ConfigError naming packages that are not installed."""
        missing = [package for package in _PACKAGES if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"the OpenAI-compatible endpoint needs {', '.join(missing)}: pip install 'minisgl-backend[openai]', "
                "or do without it: --openai-port 0"
            )

    def check(self) -> None:
        """Raises ConfigError naming the option that is wrong."""
        check_all(self, ENDPOINT_OPTIONS)
        if self.otlp_endpoint and not _has_opentelemetry():
            raise ConfigError("--otlp-endpoint needs OpenTelemetry's packages: pip install 'minisgl-backend[otel]'")
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ConfigError("--ssl-certfile and --ssl-keyfile belong together; one of them is missing")
        for flag, file in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", self.ssl_keyfile)):
            if file and not Path(file).is_file():
                raise ConfigError(f"{flag} is {file!r}, which is no file")
        if not all(self.api_keys):
            raise ConfigError("--api-key is empty; allowed: at least one character")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EndpointSettings:
        """Decodes what `to_json` wrote."""
        values = json.loads(text)
        tuples = [field.name for field in fields(cls) if str(field.type).startswith("tuple")]
        return cls(**{**values, **{name: tuple(values[name]) for name in tuples}})

    @property
    def image_body_bytes(self) -> int:
        """Of a body, or a batch's line, that may have images: more than others, unless that was set."""
        default = ENDPOINT_OPTIONS["max_body_bytes"].default
        return 4 * self.max_body_bytes if self.max_body_bytes == default else self.max_body_bytes

    @property
    def url(self) -> str:
        """The URL from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"{'https' if self.ssl_certfile else 'http'}://{host}:{self.port}"


ENDPOINT_OPTIONS = options_of(EndpointSettings)


def endpoint_of(values: Mapping[str, Any], **others: Any) -> EndpointSettings:
    """The settings by the values of a command line, and its fields that are no options. Raises ConfigError."""
    given = values_of(ENDPOINT_OPTIONS, values)
    given["api_keys"] = api_keys_of(given["api_keys"])
    given["files_folder"] = files_folder_of(given["files_folder"], given["port"], given["max_files_bytes"])
    settings = EndpointSettings(**given, **others)
    settings.check()
    return settings


def _has_opentelemetry() -> bool:
    try:
        names = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        return all(importlib.util.find_spec(name) is not None for name in names)
    except ModuleNotFoundError:  # a parent package is missing
        return False


def api_keys_of(given: Sequence[str] | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The keys of the command line, otherwise those in MINISGL_API_KEY (separated by commas)."""
    if given:
        return tuple(given)
    return tuple(key.strip() for key in environment.get("MINISGL_API_KEY", "").split(",") if key.strip())


def files_folder_of(given: str, port: int, most_bytes: int) -> str:
    """Where files and batches are kept: in the folder that was given, otherwise the port's own. Raises ConfigError for
    one that was given and cannot be written; a full disk may have space later."""
    if not given:
        return default_files_folder(port)
    error = files_error(given) if most_bytes else None
    if error is not None:
        raise ConfigError(f"--files-dir is {given!r}, which cannot be written: {error.strerror}")
    return given


def files_error(folder: str) -> OSError | None:
    """What prevents uploads into `folder`, which the first of them makes."""
    errors = (write_error(Path(folder, part)) for part in (FILES, BATCHES))
    return next((error for error in errors if error is not None and not is_full(error)), None)


def default_files_folder(port: int, environment: Mapping[str, str] = os.environ) -> str:
    """A folder for each port, since each may serve another model. "" for a user without a home directory."""
    state = environment.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return str(Path(state, "minisgl", f"files-{port}").expanduser())
    except RuntimeError:
        return ""
