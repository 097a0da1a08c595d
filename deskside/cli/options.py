"""Parsing of command-line options with argparse, and validation of their values with pydantic.

The options of a command are a dataclass whose fields are made by `option`. A command that trains also accepts every key
of the configuration as `--part.key`. To argparse, all values are optional text. Its result therefore contains only the
options that were given, and pydantic's error for a wrong value becomes a UsageError of one line. The help is generated
from the same fields. Names are written with hyphens; underscores are accepted.
"""

import argparse
import dataclasses
import difflib
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from deskside.config.base import Part
from deskside.config.merge import LENGTH_ALIASES, KeyPath, config_fields, parts_of
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, toml_table

Options = TypeVar("Options")
_FINITE = ConfigDict(allow_inf_nan=False)
_TEXTS = tuple[str, ...]  # type of an option that takes several values
_WIDEST_METAVAR = 40  # longer choices are listed in the help text instead
_OBJECTIVE_ARGUMENTS = ("name", "data", "val")  # keys that the command sets from its own options
GENERAL = "general"  # the help group of configuration keys outside every part, such as seed

# Option names of other programs, and ours. They are suggested, not accepted.
SYNONYMS = {
    "learning-rate": "optim.lr",
    "optimizer": "optim.name",
    "max-steps": "steps",
    "num-steps": "steps",
    "iterations": "steps",
    "num-train-epochs": "epochs",
    "batch-size": "batch.tokens",
    "seq-len": "batch.sequence-length",
    "max-length": "batch.sequence-length",
    "context-length": "batch.sequence-length",
    "dtype": "precision.name",
    "fp8": "precision.name",
    "bf16": "precision.name",
    "gradient-checkpointing": "compute.activation-checkpointing",
    "lora-rank": "adapter.rank",
    "lora-r": "adapter.rank",
    "output-dir": "out",
    "dataset": "data",
    "model-name": "model",
}


def option(
    help: str = "",
    default: Any = dataclasses.MISSING,
    *,
    name: str | None = None,
    metavar: str | None = None,
    positional: bool = False,
    may_be_empty: bool = False,
) -> Any:
    """Return a dataclass field that is a command-line option; without a default it is required.

    Args:
        help: Text of the help; the default is added to it.
        default: The value when the option is not given.
        name: Name on the command line, if it differs from the field's.
        metavar: Name of the value in the help.
        positional: Whether the value is given without the option's name.
        may_be_empty: Whether an empty string is accepted. An empty path, for example, is a mistake.
    """
    metadata = {
        "help": help,
        "name": name,
        "metavar": metavar,
        "positional": positional,
        "empty": may_be_empty,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Command(Generic[Options]):
    """A command: its name, its options, and whether it takes the configuration's keys as options too.

    Attributes:
        name: Name after `deskside`, such as "train" or "data prepare".
        options: Dataclass of the command's own options. Its docstring is shown at the top of the help.
        configuration: Whether `--part.key` is accepted for every key of `RunConfig`.
        align: The training objective, whose options are written --align.KEY.
        common: Configuration keys shown in the short help.
    """

    name: str
    options: type[Options]
    configuration: bool = False
    align: type[Part] | None = None
    common: tuple[str, ...] = ()

    @property
    def prog(self) -> str:
        return f"deskside {self.name}"

    def parse(self, argv: Sequence[str]) -> Options:
        """Return the command's own options.

        Raises UsageError for a missing value, an unknown option or a wrong value. --help prints the help and exits.
        """
        return self.parse_config(argv)[0]

    def parse_config(self, argv: Sequence[str]) -> tuple[Options, dict[str, Any]]:
        """Return the command's own options and the given configuration keys, as a nested dict of unvalidated values.

        Raises UsageError like `parse`.
        """
        words, typed = _hyphenated(argv)
        try:
            parsed, unknown = self.parser().parse_known_intermixed_args(words)
        except argparse.ArgumentError as error:
            if error.message.startswith("expected"):  # argparse: "expected one argument"
                raise UsageError(
                    f"{error.argument_name}: its value is missing; see {self.prog} --help"
                ) from None
            raise UsageError(f"{error.argument_name}: {error.message}; see {self.prog} --help") from None
        if hasattr(parsed, "help"):
            print(self.help(parsed.help), end="")
            raise SystemExit(0)
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0])
            raise self._unexpected(word, typed)
        return self._own_values(parsed), self._config_values(parsed)

    def parser(self) -> argparse.ArgumentParser:
        """Return the argparse parser of all options. Values are text, and options that are not given are absent."""
        parser = _Parser(prog=self.prog, add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("-h", "--help", nargs="?", const="", default=argparse.SUPPRESS, metavar="GROUP")
        _add_groups(parser, self._groups())
        return parser

    def help(self, group: str = "") -> str:
        """Return the help: the command's own and its common options, one group of the configuration, or "all"."""
        groups = self._groups()
        own = groups.pop("options")
        if group and group != "all" and group not in groups:
            raise UsageError(
                f"--help {group}: there is no such group of options; groups are {', '.join([*groups, 'all'])}"
            )
        shown: Groups = {}
        description = epilog = None
        if group in ("", "all"):
            shown["options"] = own
            text = inspect.cleandoc(self.options.__doc__ or "").splitlines()
            description = "\n".join(textwrap.fill(line, _columns(), subsequent_indent="  ") for line in text)
        else:
            shown[f"{group} ({_about(group, self.align)})"] = groups[group]
        if group == "all":
            shown |= groups
        if not group and self.common:
            by_flag = {flags[0]: (flags, settings) for group in groups.values() for flags, settings in group}
            shown["common configuration options"] = [by_flag[_flag(key)] for key in self.common]
        if not group and groups:
            epilog = f"More options: {self.prog} --help GROUP. Groups: {', '.join(groups)}, all."
            epilog = textwrap.fill(epilog, _columns())
        words = [self.prog]
        for own_field in _ordered_fields(self.options):
            name = own_field.metadata["metavar"]
            if own_field.metadata["positional"]:
                words.append(name if own_field.default is dataclasses.MISSING else f"[{name}]")
        parser = argparse.ArgumentParser(
            usage=" ".join([*words, "[options]"]).replace("%", "%%"),
            description=description,
            epilog=epilog,
            add_help=False,
            formatter_class=_Formatter,
        )
        _add_groups(parser, shown)
        return parser.format_help()

    # The options

    def _groups(self) -> "Groups":
        """Return all options: the command's own, then those of each configuration part."""
        hints = get_type_hints(self.options, include_extras=True)
        own = [_own_argument(field, hints[field.name]) for field in _ordered_fields(self.options)]
        groups: Groups = {"options": own}
        if not self.configuration:
            return groups
        if self.align is not None:  # first, because it is the subject of the command
            groups["align"] = []
        for path, info in self._keys():
            group = path[0] if len(path) > 1 else GENERAL
            groups.setdefault(group, []).append(_config_argument(path, info))
        return groups

    def _keys(self) -> Iterator[tuple[KeyPath, FieldInfo]]:
        """Yield all configuration keys that the command accepts, aliases included."""
        yield from config_fields()
        if self.align is not None:
            for path, info in config_fields(self.align, ("align",)):
                if path[-1] not in _OBJECTIVE_ARGUMENTS:
                    yield path, info
        for alias, form in LENGTH_ALIASES.items():
            yield (
                ("schedule", alias),
                FieldInfo(annotation=str, description=f"alias of --schedule.length '{form.format('N')}'"),
            )

    # The values

    def _own_values(self, parsed: argparse.Namespace) -> Options:
        """Return the command's own options, validated. Raises UsageError for a missing or wrong value."""
        given: dict[str, Any] = {}
        hints = get_type_hints(self.options, include_extras=True)
        for own in dataclasses.fields(self.options):  # type: ignore[arg-type]
            label = own.metadata["metavar"] if own.metadata["positional"] else _own_flag(own)
            value = getattr(parsed, own.name, None)
            if value is None or value == []:
                if own.default is dataclasses.MISSING:
                    raise UsageError(f"{label} is missing; see {self.prog} --help")
                continue
            if (value == "" or (isinstance(value, list) and "" in value)) and not own.metadata["empty"]:
                raise UsageError(f"{label} '': is empty; give a value, or leave it out")
            try:
                given[own.name] = TypeAdapter(hints[own.name], config=_FINITE).validate_python(value)
            except ValidationError as error:
                message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
                raise UsageError(f"{label}: {message[0].lower()}{message[1:]}, not {value!r}") from None
        return self.options(**given)

    def _config_values(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """Return the given configuration keys as a nested dict."""
        result: dict[str, Any] = {}
        if not self.configuration:
            return result
        for path, info in self._keys():
            text = getattr(parsed, ".".join(path), None)
            if text is not None:
                node = result
                for part in path[:-1]:
                    node = node.setdefault(part, {})
                node[path[-1]] = _config_value(path, info, text)
        return result

    def _unexpected(self, word: str, typed: Mapping[str, str]) -> UsageError:
        """Return the error for an unknown option or argument. typed: what the user wrote for each hyphenated name."""
        if not word.startswith("-"):
            return UsageError(f"'{word}': unexpected argument; options are written --key value")
        flag = word.split("=")[0]
        every = [name for group in self._groups().values() for names, _ in group for name in names]
        known = [name for name in every if name.startswith("-")]
        near = nearest_option(flag, known)
        hint = f"did you mean {near}?" if near else f"see {self.prog} --help"
        return UsageError(f"{typed.get(flag, flag)}: there is no such option; {hint}")


def nearest_option(flag: str, known: Sequence[str]) -> str | None:
    """Return the option that was probably meant: the same key elsewhere, another program's name, or a misspelling."""
    name = f"--{flag.lstrip('-')}"
    key = name[2:].rsplit(".", 1)[-1]
    synonym = f"--{SYNONYMS.get(key, '')}"
    same_key = [other for other in known if other[2:].rsplit(".", 1)[-1] == key]
    if synonym in known:
        return synonym
    if len(same_key) == 1:
        return same_key[0]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.7)), None)


def choose_subcommand(commands: Mapping[str, str], argv: Sequence[str], prog: str, description: str) -> str:
    """Return the name of the subcommand, the first word of argv. --help prints the help and exits.

    commands: one line of help for each subcommand. Raises UsageError if it is missing or unknown.
    """
    if argv and argv[0] in ("-h", "--help"):
        width = max(len(name) for name in commands)
        lines = "\n".join(
            textwrap.fill(f"  {name:<{width}}  {what}", 80, subsequent_indent=" " * (width + 4))
            for name, what in commands.items()
        )
        print(f"usage: {prog} COMMAND [options]\n\n{description}\n\n{lines}\n")
        print(f"Run {prog} COMMAND --help for the options of a command.")
        raise SystemExit(0)
    name = prog.removeprefix("deskside ")
    if not argv:
        raise UsageError(f"{name}: the command is missing; commands are {', '.join(commands)}")
    if argv[0] not in commands:
        raise UsageError(f"{name} {argv[0]}: there is no such command; {nearest_command(argv[0], commands)}")
    return argv[0]


def nearest_command(given: str, names: Mapping[str, Any]) -> str:
    """Return a hint for an unknown command: the closest name, or all names."""
    near = difflib.get_close_matches(given, names, n=1)
    return f"did you mean {near[0]}?" if near else f"commands are {', '.join(names)}"


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that keeps line breaks of the description and does not list the options in the usage line."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=_columns())

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        super().add_usage(usage, [], [], prefix)


def _columns() -> int:
    return max(40, min(100, shutil.get_terminal_size().columns))


def _hyphenated(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return argv with hyphens instead of underscores in option names, and the typed form of each hyphenated name."""
    words, typed = [], {}
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            typed[name.replace("_", "-")] = name
            word = name.replace("_", "-") + equals + value
        words.append(word)
    return words, typed


def _ordered_fields(kind: type) -> list[dataclasses.Field[Any]]:
    """Return the fields in the order of the help: positional ones, then the command's own options, then inherited ones.

    Commands inherit shared options from base classes. A field belongs to the most derived class that declares it.
    """
    declared_in: dict[str, int] = {}
    for depth, base in reversed([*enumerate(kind.__mro__)]):
        declared_in |= dict.fromkeys(vars(base).get("__annotations__", {}), depth)
    fields = dataclasses.fields(kind)
    return sorted(fields, key=lambda f: (not f.metadata["positional"], declared_in[f.name]))


# Names and keywords of argparse's `add_argument`, and those of all options by group of the help.
Argument = tuple[tuple[str, ...], dict[str, Any]]
Groups = dict[str, list[Argument]]


def _add_groups(parser: argparse.ArgumentParser, groups: Groups) -> None:
    for title, arguments in groups.items():
        section = parser.add_argument_group(title)
        for flags, settings in arguments:
            about = settings["help"].replace("%", "%%")  # argparse formats help texts with %
            section.add_argument(*flags, **{**settings, "help": about, "default": argparse.SUPPRESS})


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _own_flag(own: dataclasses.Field[Any]) -> str:
    return _flag(own.metadata["name"] or own.name)


def _own_argument(own: dataclasses.Field[Any], hint: Any) -> Argument:
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    about, flag = own.metadata["help"], _own_flag(own)
    if kind is bool:
        flag = f"--no-{flag[2:]}" if own.default else flag
        return (flag,), {"dest": own.name, "action": "store_const", "const": not own.default, "help": about}
    if own.default is dataclasses.MISSING:
        about += " (required)"
    elif own.default not in (None, ()):
        about += f" (default: {own.default})"
    settings = _described(own.metadata["metavar"] or _metavar(kind), about)
    if own.metadata["positional"]:
        return (own.name,), {**settings, "nargs": "*" if kind == _TEXTS else "?"}
    more = {"nargs": "*", "action": "extend"} if kind == _TEXTS else {}
    return (flag,), {"dest": own.name, **settings, **more}


def _config_argument(path: KeyPath, info: FieldInfo) -> Argument:
    key = ".".join(path)
    about = f"{info.description or ''} {_default(path, info)}".strip()
    if len(path) == 2 and path[1] == "name" and len(_alternatives(path[0])) > 1:
        name = "{" + ",".join(map(_tag, _alternatives(path[0]))) + "}"  # this key selects a class
    else:
        name = _metavar(info.annotation)
    return (_flag(key),), {"dest": key, **_described(name, about)}


def _described(name: str, about: str) -> dict[str, Any]:
    """Return the keywords metavar and help. Choices that are too long for a metavar are listed in the help."""
    if len(name) <= _WIDEST_METAVAR:
        return {"metavar": name, "help": about}
    return {"metavar": "NAME", "help": f"{about}; one of {name.strip('{}').replace(',', ', ')}"}


def _metavar(annotation: Any) -> str:
    """Return the metavar of a value of this type, such as INT or {a,b}."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _metavar(inner[0])
    if origin is Literal:
        return "{" + ",".join(str(choice) for choice in inner) + "}"
    if origin in (tuple, list):
        return "[...]"
    if origin is dict:
        return "{...}"
    if origin in (Union, types.UnionType):
        return "|".join(dict.fromkeys(_metavar(a) for a in inner if a is not type(None)))
    name = getattr(annotation, "__name__", "value")
    return {"int": "INT", "float": "NUMBER", "str": "TEXT", "bool": "true|false"}.get(name, name.upper())


# Keys of the configuration


def _about(part: str, align: type[Part] | None) -> str:
    """Return the description of a help group: how to choose its class, or the first sentence of its only class."""
    if part == GENERAL:
        return "options outside every group"
    alternatives = [align] if part == "align" and align is not None else _alternatives(part)
    if len(alternatives) > 1:
        return f"--{part}.name chooses {' or '.join(map(_tag, alternatives))}"
    return inspect.cleandoc(alternatives[0].__doc__ or "").replace("\n", " ").split(". ")[0].rstrip(".")


def _default(path: KeyPath, info: FieldInfo) -> str:
    """Return the default for the help.

    If --PART.name selects a class, the text also says which classes have the key and which have another default.
    """
    first, only = _option_text(info.default), ""
    others = []
    if len(path) == 2 and path[1] != "name" and len(_alternatives(path[0])) > 1:
        alternatives = _alternatives(path[0])
        having = [a for a in alternatives if path[1] in a.model_fields]
        if having and len(having) < len(alternatives):
            only = f"{'/'.join(map(_tag, having))} only; "
        defaults = {_tag(a): _option_text(a.model_fields[path[1]].default) for a in having}
        others = [f"; {tag}: {text}" for tag, text in defaults.items() if text != first]
    return f"({only}default: {first}{''.join(others)})" if first else ""


@lru_cache
def _alternatives(part: str) -> list[type[Part]]:
    """Return the classes that --PART.name selects from, the default first."""
    if part == "align":
        return []
    info = RunConfig.model_fields[part]
    return sorted(parts_of(info.annotation), key=lambda p: not isinstance(info.default, p))


def _tag(alternative: type[Part]) -> str:
    """Return the value of --PART.name that selects this class."""
    return str(alternative.model_fields["name"].default)


def _option_text(value: Any) -> str:
    """Return a default as it is written on the command line, or '' for None and empty values."""
    if value in (None, (), {}, PydanticUndefined):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _config_value(path: KeyPath, info: FieldInfo, text: str) -> Any:
    """Convert the text of an option to the value that pydantic validates.

    Tables are written as in TOML, lists as in TOML or separated by commas. `none` means None for a key that may be
    None, and is ordinary text for the others, such as optim.normalize. Everything else remains text.
    """
    is_union = get_origin(info.annotation) in (Union, types.UnionType)
    members = get_args(info.annotation) if is_union else ()
    if text.lower() == "none" and type(None) in members:
        return None
    if text.startswith(("[", "{")):
        try:
            return toml_table(f"x = {text}")["x"]
        except Unreadable:
            raise UsageError(
                f"{'.'.join(path)}: '{text}' is not a TOML list or table, such as [0.9, 0.95]"
            ) from None
    words = {word for member in members if get_origin(member) is Literal for word in get_args(member)}
    if takes_list(info.annotation) and text not in words:
        return [word.strip() for word in text.split(",")]
    return text


def takes_list(annotation: Any) -> bool:
    """Return whether an annotation accepts a list of plain values, which may be separated by commas."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(map(takes_list, get_args(annotation)))
    return get_origin(annotation) in (tuple, list) and not any(map(parts_of, get_args(annotation)))
