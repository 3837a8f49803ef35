"""The options of the OpenAI-compatible endpoint on the server's command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from minisgl_backend.host.openai_endpoint import TENANTS, EndpointSettings, api_keys_of, files_folder_of
from minisgl_backend.host.option_arguments import tcp_port_or_none
from minisgl_backend.parsers.names import REASONING_PARSERS, TOOL_PARSERS


def add_endpoint_options(parser: argparse.ArgumentParser) -> None:
    """Adds the endpoint's options to the server's command line; `endpoint_of` reads them."""
    group = parser.add_argument_group("OpenAI-compatible endpoint", "docs/openai.md")
    default = EndpointSettings()
    group.add_argument(
        "--openai-port",
        type=tcp_port_or_none,
        default=default.port,
        metavar="PORT",
        help="0: no endpoint [%(default)s]",
    )
    group.add_argument(
        "--openai-workers", type=int, default=1, metavar="N", help="processes, for many streams at once [%(default)s]"
    )
    add_serving_options(group)


def add_serving_options(group: Any) -> None:
    """Adds the options that the endpoint has however it is started."""
    group.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="what clients call the model [the model's name]"
    )
    group.add_argument(
        "--api-key", nargs="+", metavar="KEY", help="keys that clients need one of; also MINISGL_API_KEY [none]"
    )
    group.add_argument(
        "--tenants",
        choices=TENANTS,
        default="none",
        help="with --fair-shares: whose request it is, by its API key (key-1 for the first) or its user [%(default)s]",
    )
    group.add_argument(
        "--tool-call-parser", choices=TOOL_PARSERS, default="auto", help="how the model writes tool calls [%(default)s]"
    )
    group.add_argument(
        "--reasoning-parser", choices=REASONING_PARSERS, default="auto", help="how it marks its thoughts [%(default)s]"
    )
    group.add_argument(
        "--otlp-endpoint",
        default="",
        metavar="URL",
        help="of an OpenTelemetry collector (OTLP over HTTP), which gets the spans of requests [none]",
    )
    group.add_argument("--ssl-certfile", default="", metavar="FILE", help="serves https with this certificate")
    group.add_argument("--ssl-keyfile", default="", metavar="FILE", help="and its key")
    group.add_argument(
        "--allowed-origins", nargs="+", metavar="ORIGIN", help="whose pages browsers let in (CORS); *: all [none]"
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="names in Host, as a proxy passes them on, beside this machine's own; *: all [on a loopback host: none]",
    )
    group.add_argument(
        "--max-body-bytes", type=int, default=EndpointSettings().max_body_bytes, metavar="N", help="[%(default)s]"
    )
    group.add_argument(
        "--response-store-bytes",
        type=int,
        default=EndpointSettings().response_store_bytes,
        metavar="N",
        help="of responses that are kept for previous_response_id; 0: none are [%(default)s]",
    )
    group.add_argument(
        "--files-dir",
        metavar="DIR",
        help="where files and batches are kept [minisgl/files-PORT in XDG_STATE_HOME or ~/.local/state]",
    )
    group.add_argument(
        "--max-files-bytes",
        type=int,
        default=EndpointSettings().max_files_bytes,
        metavar="N",
        help="of all of them; 0: no files and no batches [%(default)s]",
    )
    group.add_argument(
        "--max-batch-requests",
        type=int,
        default=EndpointSettings().max_batch_requests,
        metavar="N",
        help="requests of batches at a time, below all others by priority [%(default)s]",
    )
    group.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="requests may have fields that this server does not know; the log names each once [refused by name]",
    )


def endpoint_of(
    values: Mapping[str, Any], *, host: str, grpc_address: str, metrics_address: str
) -> EndpointSettings | None:
    """The endpoint's settings by these options; None for port 0. Raises ConfigError."""
    if not values["openai_port"]:
        return None
    settings = EndpointSettings(
        host=host,
        port=values["openai_port"],
        grpc_address=grpc_address,
        metrics_address=metrics_address,
        workers=values["openai_workers"],
        served_model_names=tuple(values["served_model_name"] or ()),
        api_keys=api_keys_of(values["api_key"]),
        tenants=values["tenants"],
        tool_call_parser=values["tool_call_parser"],
        reasoning_parser=values["reasoning_parser"],
        otlp_endpoint=values["otlp_endpoint"],
        allowed_origins=tuple(values["allowed_origins"] or ()),
        allowed_hosts=tuple(values["allowed_hosts"] or ()),
        ssl_certfile=values["ssl_certfile"],
        ssl_keyfile=values["ssl_keyfile"],
        max_body_bytes=values["max_body_bytes"],
        ignore_unknown_fields=values["ignore_unknown_fields"],
        response_store_bytes=values["response_store_bytes"],
        files_folder=files_folder_of(values["files_dir"], values["openai_port"], values["max_files_bytes"]),
        max_files_bytes=values["max_files_bytes"],
        max_batch_requests=values["max_batch_requests"],
    )
    settings.check()
    return settings
