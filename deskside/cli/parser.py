"""How every command reads its own options: tyro cuts the line and writes the help, pydantic makes the values.

A command's options are one dataclass. tyro sees a copy in which every value is optional text, so that a wrong value, a
missing one and an unknown option are all ours to report: one line, as a UsageError. Flags (bool) and lists of words
(tuple[str, ...]) stay as they are.
"""

import contextlib
import dataclasses
import difflib
import inspect
import io
import re
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from pydantic import ConfigDict, TypeAdapter, ValidationError

from deskside.utils.errors import UsageError

Options = TypeVar("Options")
_WORDS = tuple[str, ...]
_FINITE = ConfigDict(allow_inf_nan=False)
MAY_BE_EMPTY = "may be empty"  # marks text that means something when it is empty, as a path does not


def parse(kind: type[Options], argv: Sequence[str], prog: str) -> Options:
    """The options of one command, an instance of the dataclass `kind`, whose docstring is the help's head.

    Raises UsageError with one line; --help ends the program with 0.
    """
    parsed, unknown = split(text_options(kind), argv, prog, inspect.cleandoc(kind.__doc__ or ""))
    if unknown:
        raise unexpected(unknown[0], options(kind), prog)
    return values(kind, parsed, prog)


def options(kind: type) -> list[str]:
    """The options of a command as they are written, the positional ones left out."""
    hints = get_type_hints(kind, include_extras=True)
    return [f"--{f.name}" for f in dataclasses.fields(kind) if not _is_positional(hints[f.name])]


def choose(commands: Mapping[str, str], argv: Sequence[str], prog: str, description: str) -> str:
    """The subcommand that argv begins with, out of name -> what it does. Raises UsageError; prints the help."""
    if argv and argv[0] in ("-h", "--help"):
        width = max(len(name) for name in commands)
        lines = "\n".join(
            textwrap.fill(f"  {name:<{width}}  {what}", 80, subsequent_indent=" " * (width + 4))
            for name, what in commands.items()
        )
        print(f"usage: {prog} COMMAND [options]\n\n{description}\n\n{lines}\n")
        print(f"{prog} COMMAND --help tells about one, with an example.")
        raise SystemExit(0)
    name = prog.removeprefix("deskside ")
    if not argv:
        raise UsageError(f"{name}: which command? one of {', '.join(commands)}")
    if argv[0] not in commands:
        raise UsageError(f"{name} {argv[0]}: there is no such command; {nearest(argv[0], commands)}")
    return argv[0]


def nearest(given: str, names: Mapping[str, Any]) -> str:
    """The hint that follows an unknown command."""
    near = difflib.get_close_matches(given, names, n=1)
    return f"did you mean {near[0]}?" if near else f"commands are {', '.join(names)}"


def text_options(kind: type) -> type:
    """The dataclass `kind` as tyro shall see it: every value is optional text, every default stands in the help."""
    fields: list[tuple[str, Any, Any]] = []
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        plain = hints[field.name]
        metadata: tuple[Any, ...] = ()
        if get_origin(plain) is Annotated:
            plain, metadata = plain.__origin__, plain.__metadata__
        if field.default is dataclasses.MISSING:
            hint = "(required)"
        else:
            hint = "" if field.default in (None, False, ()) else f"(default: {field.default})"
        argument = tyro.conf.arg(metavar=metavar(plain), help_behavior_hint=hint)
        if plain is bool:
            argument, default = tyro.conf.arg(help_behavior_hint=""), field.default
        elif plain == _WORDS:
            default = ()
        else:
            plain, default = str | None, None
        # The command's own tyro.conf.arg comes last and wins.
        fields.append((field.name, Annotated[(plain, argument, *metadata)], default))
    return dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), kw_only=True)


def split(options: type, argv: Sequence[str], prog: str, description: str) -> tuple[Any, list[str]]:
    """Let tyro cut argv: (an instance of `options`, what it did not know). Raises UsageError for a missing value."""
    errors = io.StringIO()
    parsed: Any
    try:
        with contextlib.redirect_stderr(errors):
            parsed, unknown = tyro.cli(
                options,
                args=list(argv),
                prog=prog,
                description=_filled(description),
                return_unknown_args=True,
                use_underscores=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as end:
        if not end.code:
            raise
        raise _from_box(errors.getvalue(), prog) from None
    return parsed, unknown


def values(kind: type[Options], parsed: Any, prog: str) -> Options:
    """Make `kind` from the text that `split` found. Raises UsageError for a value that is missing or wrong."""
    given: dict[str, Any] = {}
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        value = getattr(parsed, field.name)
        if value is None or value == ():
            if field.default is dataclasses.MISSING:
                raise UsageError(f"{_label(field.name, hints[field.name])} is missing; see {prog} --help")
            continue
        label = _label(field.name, hints[field.name])
        if (value == "" or (isinstance(value, tuple) and "" in value)) and not _may_be_empty(
            hints[field.name]
        ):
            raise UsageError(f"{label} '': is empty; give a value, or leave it out")
        try:
            given[field.name] = TypeAdapter(hints[field.name], config=_FINITE).validate_python(value)
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise UsageError(f"{label}: {message[0].lower()}{message[1:]}, not {value!r}") from None
    return kind(**given)


def unexpected(argument: str, known: Sequence[str], prog: str) -> UsageError:
    """The error for an argument that no option takes, naming the nearest of `known` (written --name)."""
    if not argument.startswith("-"):
        return UsageError(f"'{argument}': unexpected argument; options are written --key value")
    option = re.sub(r"^-+", "--", argument.split("=")[0]).replace("-", "_").replace("__", "--", 1)
    near = difflib.get_close_matches(option, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"see {prog} --help"
    return UsageError(f"{argument.split('=')[0]}: there is no such option; {hint}")


def metavar(annotation: Any) -> str:
    """How the help writes the kind of value that an annotation takes."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return metavar(inner[0])
    if origin is Literal:
        return "{" + ",".join(str(choice) for choice in inner) + "}"
    if origin in (tuple, list):
        return "[...]"
    if origin is dict:
        return "{...}"
    if origin in (Union, types.UnionType):
        return "|".join(dict.fromkeys(metavar(a) for a in inner if a is not type(None)))
    name = getattr(annotation, "__name__", "value")
    return {"int": "INT", "float": "NUMBER", "str": "TEXT", "bool": "true|false"}.get(name, name.upper())


def _filled(text: str) -> str:
    """Lines folded at 80 columns. What is folded hangs, since tyro joins lines that begin with a letter."""
    return "\n".join(textwrap.fill(line, 80, subsequent_indent="  ") for line in text.splitlines())


def _may_be_empty(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and MAY_BE_EMPTY in annotation.__metadata__


def _is_positional(annotation: Any) -> bool:
    return get_origin(annotation) is Annotated and tyro.conf.Positional in annotation.__metadata__


def _label(name: str, annotation: Any) -> str:
    """A positional's metavar, or --option."""
    if not _is_positional(annotation):
        return f"--{name}"
    shown = [getattr(item, "metavar", None) for item in annotation.__metadata__]
    return next((str(s) for s in shown if s), name)


def _from_box(box: str, prog: str) -> UsageError:
    """tyro draws its errors as a box; its first paragraph is the message."""
    missing = re.search(r"Missing value for argument\W+'(-[^']+)'", re.sub(r"[\s│|]+", " ", box))
    if missing:
        return UsageError(f"{missing[1]}: its value is missing; see {prog} --help")
    lines = [line.strip("│|╭╮╰╯─+- ") for line in box.splitlines()[1:]]
    message = " ".join(lines[: lines.index("")] if "" in lines else lines)
    return UsageError(f"{message or 'the options cannot be read'}; see {prog} --help")
