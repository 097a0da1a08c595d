"""Parse command-line options with argparse, and validate their values with pydantic.

The options of a command are a dataclass whose fields are created by `option`. Commands that plan or train also accept
every key of the configuration as `--part.key` (`config_options.py`). argparse converts no values and sets no defaults,
so its result contains only the options that were given. pydantic's error for a wrong value becomes a UsageError of one
line. The help is generated from the same fields. Option names are shown with hyphens, but underscores are accepted.
"""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from deskside.cli.arguments import Argument, Groups, add_groups, flag_of, metavar_and_help, metavar_of
from deskside.cli.config_options import config_groups, config_values, group_description
from deskside.cli.help_text import HelpFormatter, columns, description
from deskside.cli.suggestions import option_hint
from deskside.config import presets
from deskside.config.base import Part, plain_message
from deskside.utils.console import wrap
from deskside.utils.errors import UsageError

Options = TypeVar("Options")
_FINITE = ConfigDict(allow_inf_nan=False)
_TEXTS = tuple[str, ...]  # type of an option that takes several values


def option(
    help: str = "",
    default: Any = dataclasses.MISSING,
    *,
    name: str | None = None,
    metavar: str | None = None,
    positional: bool = False,
    may_be_empty: bool = False,
    section: str = "",
) -> Any:
    """Return a dataclass field for a command-line option. An option without a default is required.

    Args:
        help: Help text, to which the default is added.
        default: The value when the option is not given.
        name: Name on the command line, if it differs from the field's.
        metavar: Placeholder of the value in the help.
        positional: Whether the value is given without the option's name.
        may_be_empty: Whether an empty string is accepted.
        section: Title of the help's section that lists the option; by default "options", and "arguments" if positional.
    """
    metadata = {
        "help": help,
        "name": name,
        "metavar": metavar,
        "positional": positional,
        "may_be_empty": may_be_empty,
        "section": section or ("arguments" if positional else "options"),
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
        defaults: Help texts of defaults that are the command's own: name of a field or configuration key -> text.
    """

    name: str
    options: type[Options]
    configuration: bool = False
    align: type[Part] | None = None
    common: tuple[str, ...] = ()
    defaults: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def prog(self) -> str:
        """The command line's first words, such as "deskside data prepare"."""
        return f"deskside {self.name}"

    @property
    def summary(self) -> str:
        """The first line of its help."""
        return (self.options.__doc__ or "").splitlines()[0]

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
            following = words[words.index(word) + 1 :]
            value = following[0] if following and not following[0].startswith("-") else ""
            raise self._unknown_argument(word, value, typed_names)
        keys = config_values(parsed, self.align) if self.configuration else {}
        return self._command_options(parsed), keys

    def given(self, argv: Sequence[str]) -> set[str]:
        """Return the names of the command's own options that are in a command line, which `parse` accepts."""
        words, _ = _hyphenated(argv)
        parsed, _ = self.parser().parse_known_intermixed_args(words)
        return {field.name for field in _ordered_fields(self.options) if hasattr(parsed, field.name)}

    def parser(self) -> argparse.ArgumentParser:
        """Return the argparse parser of all options. Its result has only the options that were given."""
        parser = _Parser(prog=self.prog, add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("-h", "--help", nargs="?", const="", default=argparse.SUPPRESS, metavar="GROUP")
        add_groups(parser, self.groups())
        return parser

    def help(self, group: str = "") -> str:
        """Return the help text.

        group: a group of configuration keys, "all", or "" for the command's own and its common options.
        """
        groups = self.groups()
        del groups["options"]
        if group and group != "all" and group not in groups:
            raise UsageError(
                f"--help {group}: there is no such group of options; groups are {', '.join([*groups, 'all'])}"
            )
        shown: Groups = {}
        about = epilog = None
        if group in ("", "all"):
            shown |= self.sections()
            about = description(self.options.__doc__ or "")
        else:
            shown[f"{group} ({group_description(group, self.align)})"] = groups[group]
        if group == "all":
            shown |= groups
        if not group and self.common:
            by_flag = {flags[0]: (flags, settings) for group in groups.values() for flags, settings in group}
            shown["common configuration options"] = [by_flag[flag_of(key)] for key in self.common]
        if not group and groups:
            epilog = f"More options: {self.prog} --help GROUP. Groups: {', '.join(groups)}, all."
            epilog = "\n".join(wrap(epilog, columns()))
        words = [self.prog]
        for option_field in _ordered_fields(self.options):
            metavar = option_field.metadata["metavar"]
            if option_field.metadata["positional"]:
                words.append(metavar if option_field.default is dataclasses.MISSING else f"[{metavar}]")
        parser = argparse.ArgumentParser(
            usage=" ".join([*words, "[options]"]).replace("%", "%%"),
            description=about,
            epilog=epilog,
            add_help=False,
            formatter_class=HelpFormatter,
        )
        add_groups(parser, shown)
        return parser.format_help()

    def groups(self) -> Groups:
        """Return all options: the command's own, then those of each configuration part."""
        hints = get_type_hints(self.options, include_extras=True)
        fields = _ordered_fields(self.options)
        own = [_command_argument(field, hints[field.name], self.defaults.get(field.name)) for field in fields]
        return {"options": own} | (config_groups(self.align, self.defaults) if self.configuration else {})

    def sections(self) -> Groups:
        """Return the command's own options in the sections of its help: the arguments first, other options last."""
        titles = [field.metadata["section"] for field in _ordered_fields(self.options)]
        first_to_last = sorted(
            dict.fromkeys(titles), key=lambda title: (title != "arguments", title == "options")
        )
        own = list(zip(titles, self.groups()["options"], strict=True))
        return {title: [argument for of, argument in own if of == title] for title in first_to_last}

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
                message = plain_message(error.errors(include_url=False)[0])
                raise UsageError(f"{label}: {message}, not {value!r}") from None
        return self.options(**given)

    def _unknown_argument(self, word: str, value: str, typed_names: Mapping[str, str]) -> UsageError:
        """Return the error for an unknown option or argument.

        value: the word after it, or ""; typed_names: hyphenated name -> name as it was typed.
        """
        if not word.startswith("-"):
            return UsageError(f"'{word}': unexpected argument; {self._argument_hint(word)}")
        flag, _, given = word.partition("=")
        names = [name for group in self.groups().values() for flags, _ in group for name in flags]
        positional = {
            field.name: field.metadata["metavar"]
            for field in _ordered_fields(self.options)
            if field.metadata["positional"]
        }
        known = [name for name in names if name.startswith("-")]
        hint = option_hint(self.name, flag, known, positional, given or value)
        return UsageError(f"{typed_names.get(flag, flag)}: there is no such option; {hint}")

    def _argument_hint(self, word: str) -> str:
        """Return what was probably meant by an argument that the command does not take."""
        known = {field.name for field in dataclasses.fields(self.options)}  # type: ignore[arg-type]
        if "preset" in known and word in presets.names():
            return f"did you mean --preset {word}?"
        return "options are written --key value"


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


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


def _field_flag(field: dataclasses.Field[Any]) -> str:
    return flag_of(field.metadata["name"] or field.name)


def _command_argument(field: dataclasses.Field[Any], hint: Any, default: str | None) -> Argument:
    """Return the argument of a field of the command's own options.

    hint: the field's type; default: text of a default that is not the field's.
    """
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
    elif default is not None:
        about += f" (default: {default})"
    elif field.default not in (None, ()):
        about += f" (default: {field.default})"
    settings = metavar_and_help(field.metadata["metavar"] or metavar_of(kind), about)
    if field.metadata["positional"]:
        return (field.name,), {**settings, "nargs": "*" if kind == _TEXTS else "?"}
    if kind == _TEXTS:
        settings |= {"nargs": "*", "action": "extend"}
    return (flag,), {"dest": field.name, **settings}
