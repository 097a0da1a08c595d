"""Parse command-line options with argparse, and validate their values with pydantic.

The options of a command are a dataclass whose fields are created by `option`. Commands that plan or train also accept
every key of the configuration as `--part.key`. argparse converts no values and sets no defaults, so its result contains
only the options that were given. pydantic's error for a wrong value becomes a UsageError of one line. The help is
generated from the same fields. Option names are shown with hyphens, but underscores are accepted.
"""

import argparse
import dataclasses
import difflib
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from deskside.utils.console import command_lines, wrap
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, toml_table

Options = TypeVar("Options")
_FINITE = ConfigDict(allow_inf_nan=False)
_TEXTS = tuple[str, ...]  # type of an option that takes several values
_WIDEST_METAVAR = 40  # longer choices are listed in the help text instead
_SET_BY_COMMAND = ("name", "data", "val")  # keys of `align` that a command sets from its own options
GENERAL = "general"  # the help group of configuration keys outside every part, such as seed

# Option names of other programs -> ours. Errors suggest ours; the names of other programs are not accepted.
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
    """Return a dataclass field for a command-line option. An option without a default is required.

    Args:
        help: Help text, to which the default is added.
        default: The value when the option is not given.
        name: Name on the command line, if it differs from the field's.
        metavar: Placeholder of the value in the help.
        positional: Whether the value is given without the option's name.
        may_be_empty: Whether an empty string is accepted.
    """
    metadata = {
        "help": help,
        "name": name,
        "metavar": metavar,
        "positional": positional,
        "may_be_empty": may_be_empty,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Command(Generic[Options]):
    """A command with its options.

    Attributes:
        name: Name after `deskside`, such as "train" or "data prepare".
        options: Dataclass of the command's own options. Its docstring is shown at the top of the help.
        configuration: Whether `--part.key` is accepted for every key of `RunConfig`.
        align: Options of the fine-tuning objective, which are accepted as --align.KEY.
        common: Configuration keys that are shown in the short help.
    """

    name: str
    options: type[Options]
    configuration: bool = False
    align: type[Part] | None = None
    common: tuple[str, ...] = ()

    @property
    def prog(self) -> str:
        """The command line's first words, such as "deskside data prepare"."""
        return f"deskside {self.name}"

    def parse(self, argv: Sequence[str]) -> Options:
        """Return the command's own options.

        Raises UsageError for a missing value, an unknown option or a wrong value. --help prints the help and exits.
        """
        return self.parse_config(argv)[0]

    def parse_config(self, argv: Sequence[str]) -> tuple[Options, dict[str, Any]]:
        """Return the command's own options, and the given configuration keys as a nested dict of unvalidated values.

        Raises UsageError like `parse`.
        """
        words, typed_names = _hyphenated(argv)
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
            raise self._unknown_argument(word, typed_names)
        return self._command_options(parsed), self._config_values(parsed)

    def parser(self) -> argparse.ArgumentParser:
        """Return the argparse parser of all options. Its result has only the options that were given."""
        parser = _Parser(prog=self.prog, add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("-h", "--help", nargs="?", const="", default=argparse.SUPPRESS, metavar="GROUP")
        _add_groups(parser, self.groups())
        return parser

    def help(self, group: str = "") -> str:
        """Return the help text.

        group: a group of configuration keys, "all", or "" for the command's own and its common options.
        """
        groups = self.groups()
        command_options = groups.pop("options")
        if group and group != "all" and group not in groups:
            raise UsageError(
                f"--help {group}: there is no such group of options; groups are {', '.join([*groups, 'all'])}"
            )
        shown: Groups = {}
        description = epilog = None
        if group in ("", "all"):
            shown["options"] = command_options
            text = _joined_sentences(inspect.cleandoc(self.options.__doc__ or "").splitlines())
            description = "\n".join(row for line in text for row in _description_lines(line))
        else:
            shown[f"{group} ({group_description(group, self.align)})"] = groups[group]
        if group == "all":
            shown |= groups
        if not group and self.common:
            by_flag = {flags[0]: (flags, settings) for group in groups.values() for flags, settings in group}
            shown["common configuration options"] = [by_flag[_flag(key)] for key in self.common]
        if not group and groups:
            epilog = f"More options: {self.prog} --help GROUP. Groups: {', '.join(groups)}, all."
            epilog = "\n".join(wrap(epilog, _columns()))
        words = [self.prog]
        for option_field in _ordered_fields(self.options):
            metavar = option_field.metadata["metavar"]
            if option_field.metadata["positional"]:
                words.append(metavar if option_field.default is dataclasses.MISSING else f"[{metavar}]")
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

    def groups(self) -> "Groups":
        """Return all options: the command's own, then those of each configuration part."""
        hints = get_type_hints(self.options, include_extras=True)
        fields = _ordered_fields(self.options)
        groups: Groups = {"options": [_command_argument(field, hints[field.name]) for field in fields]}
        if not self.configuration:
            return groups
        if self.align is not None:  # the first group of the help, because it is the subject of the command
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
                if path[-1] not in _SET_BY_COMMAND:
                    yield path, info
        for alias, template in LENGTH_ALIASES.items():
            about = f"alias of --schedule.length '{template.format('N')}'"
            yield ("schedule", alias), FieldInfo(annotation=str, description=about)

    # The values

    def _command_options(self, parsed: argparse.Namespace) -> Options:
        """Return the command's own options, validated. Raises UsageError for a missing or wrong value."""
        given: dict[str, Any] = {}
        hints = get_type_hints(self.options, include_extras=True)
        for field in dataclasses.fields(self.options):  # type: ignore[arg-type]
            label = field.metadata["metavar"] if field.metadata["positional"] else _field_flag(field)
            value = getattr(parsed, field.name, None)
            if value is None or value == []:
                if field.default is dataclasses.MISSING:
                    raise UsageError(f"{label} is missing; see {self.prog} --help")
                continue
            is_empty = value == "" or (isinstance(value, list) and "" in value)
            if is_empty and not field.metadata["may_be_empty"]:
                raise UsageError(f"{label} '': is empty; give a value, or leave it out")
            try:
                given[field.name] = TypeAdapter(hints[field.name], config=_FINITE).validate_python(value)
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

    def _unknown_argument(self, word: str, typed_names: Mapping[str, str]) -> UsageError:
        """Return the error for an unknown option or argument. typed_names: hyphenated name -> name as it was typed."""
        if not word.startswith("-"):
            return UsageError(f"'{word}': unexpected argument; options are written --key value")
        flag = word.split("=")[0]
        names = [name for group in self.groups().values() for flags, _ in group for name in flags]
        nearest = nearest_option(flag, [name for name in names if name.startswith("-")])
        hint = f"did you mean {nearest}?" if nearest else f"see {self.prog} --help"
        return UsageError(f"{typed_names.get(flag, flag)}: there is no such option; {hint}")


def nearest_option(flag: str, known: Sequence[str]) -> str | None:
    """Return the known option that was probably meant, or None.

    It is our name for another program's option, the same key in another part, or a similarly spelled option.
    """
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

    commands: one line of help for each subcommand. Raises UsageError if the subcommand is missing or unknown.
    """
    if argv and argv[0] in ("-h", "--help"):
        width = max(len(name) for name in commands)
        lines = "\n".join(
            textwrap.fill(
                f"  {name:<{width}}  {about}",
                _columns(),
                subsequent_indent=" " * (width + 4),
                break_on_hyphens=False,
            )
            for name, about in commands.items()
        )
        print(f"usage: {prog} COMMAND [options]\n\n{description}\n\n{lines}\n")
        print(f"Run {prog} COMMAND --help for the options of a command.")
        raise SystemExit(0)
    name = prog.removeprefix("deskside ")
    if not argv:
        raise UsageError(f"{name}: the command is missing; commands are {', '.join(commands)}")
    if argv[0] not in commands:
        raise UsageError(f"{name} {argv[0]}: there is no such command; {command_hint(argv[0], commands)}")
    return argv[0]


def command_hint(unknown: str, names: Mapping[str, Any]) -> str:
    """Return a hint for an unknown command: the most similar name, or all names."""
    similar = difflib.get_close_matches(unknown, names, n=1)
    return f"did you mean {similar[0]}?" if similar else f"commands are {', '.join(names)}"


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that keeps the line breaks of the description and omits the options from the usage line."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=_columns())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width)

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        super().add_usage(usage, [], [], prefix)


def _joined_sentences(lines: Sequence[str]) -> list[str]:
    """Return the lines with wrapped sentences joined into one line each.

    Docstrings are wrapped for the source code, but terminals are narrower. Indented lines do not change.
    """
    joined: list[str] = []
    for line in lines:
        last = joined[-1] if joined else ""
        if last and line and not last.startswith(" ") and not line.startswith(" ") and last[-1] not in ".:":
            joined[-1] = f"{last} {line}"
        else:
            joined.append(line)
    return joined


def _description_lines(line: str) -> list[str]:
    """Return a line of a command's description in the width of the terminal. An example is one command."""
    if line.startswith("  deskside "):
        return command_lines(line, _columns())
    return wrap(line, _columns())


def _columns() -> int:
    return max(40, min(100, shutil.get_terminal_size().columns))


def _hyphenated(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return argv with hyphens instead of underscores in option names, and hyphenated name -> name as it was typed."""
    words, typed_names = [], {}
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            typed_names[name.replace("_", "-")] = name
            word = name.replace("_", "-") + equals + value
        words.append(word)
    return words, typed_names


def _ordered_fields(kind: type) -> list[dataclasses.Field[Any]]:
    """Return the fields in the order of the help: positional ones, then the class's own, then inherited ones.

    Commands inherit shared options from base classes.
    """
    depth_of: dict[str, int] = {}  # field name -> index in the MRO of the first class that declares it
    for depth, base in enumerate(kind.__mro__):
        for name in vars(base).get("__annotations__", {}):
            depth_of.setdefault(name, depth)
    fields = dataclasses.fields(kind)
    return sorted(fields, key=lambda field: (not field.metadata["positional"], depth_of[field.name]))


Argument = tuple[tuple[str, ...], dict[str, Any]]  # names and keyword arguments for argparse's `add_argument`
Groups = dict[str, list[Argument]]  # title of a group of the help -> its arguments


def _add_groups(parser: argparse.ArgumentParser, groups: Groups) -> None:
    for title, arguments in groups.items():
        section = parser.add_argument_group(title)
        for flags, settings in arguments:
            about = settings["help"].replace("%", "%%")  # argparse formats help texts with %
            section.add_argument(*flags, **{**settings, "help": about, "default": argparse.SUPPRESS})


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _field_flag(field: dataclasses.Field[Any]) -> str:
    return _flag(field.metadata["name"] or field.name)


def _command_argument(field: dataclasses.Field[Any], hint: Any) -> Argument:
    """Return the argument of a field of the command's own options. hint: the field's type."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    about, flag = field.metadata["help"], _field_flag(field)
    if kind is bool:
        flag = f"--no-{flag[2:]}" if field.default else flag
        return (flag,), {
            "dest": field.name,
            "action": "store_const",
            "const": not field.default,
            "help": about,
        }
    if field.default is dataclasses.MISSING:
        about += " (required)"
    elif field.default not in (None, ()):
        about += f" (default: {field.default})"
    settings = _metavar_and_help(field.metadata["metavar"] or _metavar(kind), about)
    if field.metadata["positional"]:
        return (field.name,), {**settings, "nargs": "*" if kind == _TEXTS else "?"}
    if kind == _TEXTS:
        settings |= {"nargs": "*", "action": "extend"}
    return (flag,), {"dest": field.name, **settings}


def _config_argument(path: KeyPath, info: FieldInfo) -> Argument:
    """Return the argument of a configuration key."""
    key = ".".join(path)
    about = f"{info.description or ''} {_default_text(path, info)}".strip()
    if len(path) == 2 and path[1] == "name" and len(_alternatives(path[0])) > 1:
        metavar = "{" + ",".join(map(_tag, _alternatives(path[0]))) + "}"  # this key selects a class
    else:
        metavar = _metavar(info.annotation)
    return (_flag(key),), {"dest": key, **_metavar_and_help(metavar, about)}


def _metavar_and_help(metavar: str, about: str) -> dict[str, Any]:
    """Return the keyword arguments metavar and help. Choices that are too long for a metavar are listed in the help."""
    if len(metavar) <= _WIDEST_METAVAR:
        return {"metavar": metavar, "help": about}
    return {"metavar": "NAME", "help": f"{about}; one of {metavar.strip('{}').replace(',', ', ')}"}


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
        members = [_metavar(member) for member in inner if member is not type(None)]
        return "|".join(dict.fromkeys(members))  # without duplicates
    name = getattr(annotation, "__name__", "value")
    return {"int": "INT", "float": "NUMBER", "str": "TEXT", "bool": "true|false"}.get(name, name.upper())


# Keys of the configuration


def group_description(part: str, align: type[Part] | None) -> str:
    """Return the description of a help group: how to select its class, or the first sentence of its only class."""
    if part == GENERAL:
        return "options outside every group"
    alternatives = [align] if part == "align" and align is not None else _alternatives(part)
    if len(alternatives) > 1:
        return f"--{part}.name chooses {' or '.join(map(_tag, alternatives))}"
    return inspect.cleandoc(alternatives[0].__doc__ or "").replace("\n", " ").split(". ")[0].rstrip(".")


def _default_text(path: KeyPath, info: FieldInfo) -> str:
    """Return the default for the help, such as "(default: 0.04; adamw: 0.002)", or "" if there is none.

    If --PART.name selects a class, the text also says which classes have the key and which have another default.
    """
    default = _option_text(info.default)
    if not default:
        return ""
    prefix, others = "", ""
    if len(path) == 2 and path[1] != "name":
        alternatives = _alternatives(path[0])
        having_key = [cls for cls in alternatives if path[1] in cls.model_fields]
        if having_key and len(having_key) < len(alternatives):
            prefix = f"{'/'.join(map(_tag, having_key))} only; "
        for cls in having_key:
            text = _option_text(cls.model_fields[path[1]].default) or "none"
            others += f"; {_tag(cls)}: {text}" if text != default else ""
    return f"({prefix}default: {default}{others})"


@lru_cache
def _alternatives(part: str) -> list[type[Part]]:
    """Return the classes of a configuration part, the default first. --PART.name selects one of several."""
    if part == "align":
        return []
    info = RunConfig.model_fields[part]
    return sorted(parts_of(info.annotation), key=lambda cls: not isinstance(info.default, cls))


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
    literals = {word for member in members if get_origin(member) is Literal for word in get_args(member)}
    if takes_list(info.annotation) and text not in literals:
        return [word.strip() for word in text.split(",")]
    return text


def takes_list(annotation: Any) -> bool:
    """Return True if an annotation accepts a list of plain values, which may be separated by commas."""
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return any(map(takes_list, get_args(annotation)))
    return get_origin(annotation) in (tuple, list) and not any(map(parts_of, get_args(annotation)))
