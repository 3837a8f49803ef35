"""Options of typer's commands from tables of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from minisgl_backend.option_table import Option

Parameters = Sequence[inspect.Parameter]
Read = Callable[[dict[str, Any]], Any]


def with_options(
    name: str, added: Parameters, read: Read = dict
) -> Callable[[Callable[..., None]], Callable[..., Any]]:
    """Decorates a command: its parameter `name` gets what `read` makes of the values of the options `added`, by name.

    The options stand behind the command's own in its help. See `table_options`.
    """

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            given = {one.name: values.pop(one.name) for one in added}
            function(**{name: read(given)}, **values)

        own = inspect.signature(function, eval_str=True).parameters.values()
        shown = [*(one for one in own if one.name != name), *added]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in shown}
        return command

    return decorated


def one_option(name: str, annotation: Any, declaration: Any, default: Any = None) -> inspect.Parameter:
    """An option that `with_options` adds; `declaration`: typer.Option(...)."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[annotation, declaration])


def declared_options(table: type) -> list[inspect.Parameter]:
    """The options that a dataclass declares by its fields, each Annotated[TYPE, typer.Option(...)]."""
    fields = inspect.signature(table, eval_str=True).parameters.values()
    return [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in fields]


def table_options(
    table: Mapping[str, Option], panel: str | None = None, flags: Mapping[str, str] | None = None
) -> list[inspect.Parameter]:
    """An option for every row, whose value is at `Option.dest`: as `host.options.arguments.values_of` reads it, text
    where the row has no `Argument`.

    `panel`: their heading; `flags`: other spellings, by the name of the row.
    """
    return [_parameter(row, panel, (flags or {}).get(name)) for name, row in table.items()]


def _parameter(option: Option, panel: str | None, flag: str | None) -> inspect.Parameter:
    flags = option.flags if flag is None else (flag,)
    shown: dict[str, Any] = {"rich_help_panel": panel, "show_default": False, "hidden": option.internal}
    if option.type is bool:
        if option.argument is not None:
            flags = (f"{flags[0]}/--no-{flags[0].removeprefix('--')}",)
        return one_option(option.dest, bool, typer.Option(*flags, help=option.help, **shown), False)
    default = f"default: {option.shown_default}" if option.shown_default else ""
    argument = option.argument
    if argument is None:
        text = f"{option.help} (allowed: {option.allowed}; {default})"
        metavar = option.type.__name__.upper()
        return one_option(option.dest, str | None, typer.Option(*flags, help=text, metavar=metavar, **shown))
    choices = f"allowed: {option.allowed}" if argument.choices else ""
    text = "; ".join(filter(None, (option.help, choices, default)))
    kind: Any = list[str] if option.many else option.type
    declaration = typer.Option(*flags, help=text, metavar=argument.metavar, **shown)
    return one_option(option.dest, kind, declaration, list(option.default) if option.many else option.default)
