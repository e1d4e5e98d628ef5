"""Words of the command line to a command: one parser for all of them, with help and errors that teach.

tyro makes the parser and the help from a command's dataclass. What a person can get wrong is looked at here first, so
that it ends in one sentence that names the option, the word and the remedy.
"""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from deeprnn.errors import UserError, nearest

Command = TypeVar("Command")

METAVARS = {int: "N", float: "NUMBER", Path: "PATH"}
"""what stands for a value in the help; a text is named after its field"""
TrackOption = tyro.conf.UseAppendAction[tuple[Literal["tensorboard", "mlflow", "wandb", "trackio"], ...]]
"""`--track NAME`, which may be given several times: those of `training.tracking.TRACKERS`, without importing them"""
NUMBERS = {int: "a whole number", float: "a number"}


def parse(
    command: type[Command],
    words: Sequence[str],
    prog: str = "",
    *,
    other_options: Sequence[str] = (),
    suggestions: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Command:
    """The command that the words ask for.

    For an unknown option the error suggests what `suggestions` has for it, or the nearest of the command's own and of
    `other_options`, which were taken out before. `quiet` prints nothing where the words do not fit.
    """
    if {"-h", "--help"} & {*words}:
        print(_description(command), end="\n\n")  # tyro would join the lines of a paragraph and not fill them
    else:
        _check(command, words, prog, other_options, suggestions or {})
    parsed = tyro.cli(
        _with_metavars(command), prog=prog, args=[*words], description="", console_outputs=not quiet
    )
    return _of_class(command, parsed)


@dataclass(frozen=True)
class Argument:
    """One field of a command as the command line sees it."""

    field: dataclasses.Field[Any]
    kind: Any
    """int, float, str, Path, bool, or a Literal"""
    many: bool
    positional: bool
    metavar: str
    """what stands for its value in the help"""

    @property
    def names(self) -> list[str]:
        """The option as it is typed; of a switch that is on also the one that turns it off."""
        name = self.field.name.replace("_", "-")
        return [f"--{name}"] if self.field.default is not True else [f"--{name}", f"--no-{name}"]

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.field.default is dataclasses.MISSING

    def complaint(self, text: str) -> str | None:
        """Why a text cannot be its value."""
        shown = repr(text if len(text) <= 40 else f"{text[:37]}...")
        if self.kind in NUMBERS:
            try:
                self.kind(text)
            except ValueError:  # also a number of more digits than Python converts
                return f"takes {NUMBERS[self.kind]}, got {shown}"
        if typing.get_origin(self.kind) is Literal and text not in (choices := typing.get_args(self.kind)):
            near = nearest(text, choices)
            hint = f" (did you mean {near[0]}?)" if near else ""
            return f"takes {' or '.join(choices)}, got {shown}{hint}"
        return None


def arguments(command: type) -> list[Argument]:
    """Every field that can be given on the command line, those of a group of options too."""
    listed = []
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        hint, extras = _unwrapped(hints[field.name])
        if tyro.conf.Suppress in extras:
            continue
        if dataclasses.is_dataclass(hint):
            listed += arguments(hint)  # type: ignore[arg-type]
            continue
        kind, many = _kind(hint)
        metavar = next((extra.metavar for extra in extras if getattr(extra, "metavar", None)), None)
        listed.append(
            Argument(
                field, kind, many, tyro.conf.Positional in extras, metavar or _metavar(field.name, kind, many)
            )
        )
    return listed


def _unwrapped(hint: Any) -> tuple[Any, list[Any]]:
    """A type without what is annotated, and that."""
    if typing.get_origin(hint) is not Annotated:
        return hint, []
    inner, *extras = typing.get_args(hint)
    return inner, extras


def _kind(hint: Any) -> tuple[Any, bool]:
    """The type of one value, without None, and whether several can be given."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _kind(next(part for part in inner if part is not type(None)))
    return (inner[0], True) if typing.get_origin(hint) is tuple else (hint, False)


def _metavar(name: str, kind: Any, many: bool) -> str:
    if typing.get_origin(kind) is Literal:
        word = f"{{{','.join(map(str, typing.get_args(kind)))}}}"
    else:
        word = METAVARS.get(kind, (name.removesuffix("s") if many else name).replace("_", "-").upper())
    return f"{word} ..." if many else word


def _check(
    command: type,
    words: Sequence[str],
    prog: str,
    other_options: Sequence[str],
    suggestions: Mapping[str, str],
) -> None:
    """Refuse words that are no option or no value of one."""
    known = arguments(command)
    options = {name: argument for argument in known if not argument.positional for name in argument.names}
    free = []
    for name, values in _grouped(words, options):
        if not name:
            free += values
        elif name not in options:
            names = (
                [suggestions[name]]
                if name in suggestions
                else _nearest(name, [*options, "--help", *other_options])
            )
            hint = f" (did you mean {' or '.join(names)}?)" if names else ""
            raise UserError(f"unknown option {name}{hint}: `{prog} --help` lists them all")
        elif options[name].kind is not bool:
            if not values and not options[name].many:
                raise UserError(f"{name} needs a value: {options[name].metavar}")
            for complaint in filter(None, map(options[name].complaint, values)):
                raise UserError(f"{name} {complaint}")
    places = [argument for argument in known if argument.positional]
    missing = [argument.metavar for argument in places if argument.required][len(free) :]
    if missing:
        raise UserError(f"{missing[0]} is missing: `{prog} --help` says what it is")
    if len(free) > len(places) and not any(argument.many for argument in places):
        raise UserError(
            f"{free[len(places)]!r} is one word too many for `{prog}`: its --help shows what it takes"
        )


def _grouped(words: Sequence[str], options: Mapping[str, Argument]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words that are its values; words of no option with an empty name."""
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if not name.startswith("--") or name == "--":
            yield "", [name + equals + value]
            continue
        name = name.replace("_", "-")
        values = [value] if equals else []
        argument = options.get(name)
        while argument and argument.kind is not bool and rest and not rest[0].startswith("--"):
            if values and not argument.many:
                break
            values.append(rest.pop(0))
        yield name, values


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    names = dict.fromkeys(k.strip("-") for k in known)  # some options are recipe fields too
    return [f"--{other}" for other in nearest(name.strip("-"), list(names), count=2)]


def _description(command: type) -> str:
    """The class's docstring, its paragraphs filled to the terminal's width."""
    width = min(100, shutil.get_terminal_size().columns)
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(p.split()), width, break_on_hyphens=False) for p in paragraphs)


def _with_metavars(command: type[Command]) -> type[Command]:
    """The command's class with a metavar for every value in its help, and no default shown that says nothing."""
    annotations = typing.get_type_hints(command, include_extras=True)
    settings = {argument.field.name: _settings(argument) for argument in arguments(command)}
    body: dict[str, Any] = {"__doc__": command.__doc__, "__module__": command.__module__}
    for field in dataclasses.fields(command):  # type: ignore[arg-type]
        hint, extras = _unwrapped(annotations[field.name])
        if dataclasses.is_dataclass(hint):  # a group of options, all of which have defaults
            worded = _with_metavars(hint)  # type: ignore[type-var]
            annotations[field.name] = Annotated[worded, *extras]
            body[field.name] = dataclasses.field(default_factory=worded)
            continue
        if field.name in settings:
            annotations[field.name] = Annotated[hint, *extras, *settings[field.name]]
        if field.default is not dataclasses.MISSING:
            body[field.name] = field.default
    body["__annotations__"] = annotations
    return dataclass(frozen=True)(type(command.__name__, (command,), body))  # type: ignore[return-value]


def _of_class(command: type[Command], parsed: Any) -> Command:
    """What tyro parsed, as an instance of the command's own class, groups of options too."""
    hints = typing.get_type_hints(command)
    values = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(command)}  # type: ignore[arg-type]
    groups = {
        name: _of_class(hints[name], value)
        for name, value in values.items()
        if dataclasses.is_dataclass(value)
    }
    return command(**{**values, **groups})


def _settings(argument: Argument) -> list[Any]:
    """What tyro is told of a field besides its type."""
    default = argument.field.default

    def hint(label: str) -> str:
        return "" if default in ("", None, (), False) else f"(default: {label})"

    word = argument.metavar if argument.kind is not bool else None
    settings: list[Any] = [tyro.conf.arg(metavar=word, help_behavior_hint=hint)]
    return [*settings, tyro.conf.FlagCreatePairsOff] if default is False else settings
