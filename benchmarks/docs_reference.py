"""Reference pages from the code: the options of every command, and every key of the configuration."""

import html
import inspect
import re
from collections.abc import Iterator, Sequence

from deskside.cli import main
from deskside.cli.arguments import Argument
from deskside.cli.completion import all_commands
from deskside.cli.config_options import group_description
from deskside.cli.train import COMMAND as TRAIN

CONFIGURATION = "configuration.md"


def commands_page() -> str:
    """Return the page with the options of every command, from the same definitions as its --help."""
    paragraphs = (main.__doc__ or "").split("\n\n")
    exit_codes = next(text for text in paragraphs if text.startswith("Exit codes"))
    lines = [
        "# Commands",
        "",
        "`deskside COMMAND --help` prints the same in the terminal. Option names may be written with hyphens or "
        "underscores.",
        "",
        " ".join(exit_codes.split()),
    ]
    for command, about in all_commands():
        text = inspect.cleandoc(command.options.__doc__ or "")
        prose, *examples = re.split(r"^Examples?:", text, maxsplit=1, flags=re.MULTILINE)
        lines += ["", f"## {command.prog}", "", *_prose(prose, about)]
        if examples:
            shown = examples[0].strip("\n")
            end = re.search(r"\n\n", shown)  # some texts go on after the examples
            block, rest = (shown[: end.start()], shown[end.end() :]) if end else (shown, "")
            lines += ["", "```bash", *(line.strip() for line in block.splitlines()), "```", ""]
            lines += _prose(rest, "")
        groups = command.groups()
        for title, arguments in command.sections().items():
            lines += [
                "",
                f"{title.capitalize()}:",
                "",
                *_table("argument" if title == "arguments" else "option", arguments),
            ]
        if groups.get("align"):
            lines += ["", "Of the objective:", "", *_table("option", groups["align"])]
        if command.configuration:
            lines += [
                "",
                f"It also takes every key of the [configuration]({CONFIGURATION}) as `--KEY VALUE`.",
            ]
    return "\n".join([*lines, ""])


def configuration_page() -> str:
    """Return the page with every key of the configuration, its type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Every key is an option of `deskside train` and of the commands that say so: "
        "`--model.num_hidden_layers 16`. In a TOML file, a group is a table, and `base` names the preset to build on:",
        "",
        "```toml",
        'base = "124m"',
        "",
        "[optim]",
        "lr = 0.03",
        "```",
        "",
        "An unknown key, an impossible value, or an option without effect is refused in one line that names the key. "
        "`deskside train 124m --data.path DIR --dry-run` shows the resolved configuration.",
    ]
    groups = TRAIN.groups()
    groups.pop("options")
    for name, arguments in groups.items():
        lines += ["", f"## {name}", "", f"{_sentence(group_description(name, None))}", ""]
        lines += _table(
            "key", [((flags[0].removeprefix("--").replace("-", "_"),), s) for flags, s in arguments]
        )
    return "\n".join([*lines, ""])


def _prose(text: str, first: str) -> list[str]:
    """Return the text of a help as Markdown, with its line breaks. first: the text if there is none."""
    paragraphs = re.split(r"\n\s*\n", text.strip() or first)
    lines: list[str] = []
    for paragraph in paragraphs:
        lines += ["  \n".join(_escaped(line.strip()) for line in paragraph.splitlines()), ""]
    return lines[:-1]


def _sentence(text: str) -> str:
    return f"{_escaped(text[0].upper() + text[1:])}." if text else ""


def _table(heading: str, arguments: Sequence[Argument]) -> list[str]:
    return [f"| {heading} | value | meaning |", "| --- | --- | --- |", *_rows(arguments)]


def _rows(arguments: Sequence[Argument]) -> Iterator[str]:
    for names, settings in arguments:
        value, about = settings.get("metavar", ""), _escaped(settings["help"]).replace("|", "\\|")
        yield f"| {', '.join(map(_code, names))} | {_code(value) if value else ''} | {about} |"


def _code(text: str) -> str:
    """Return a key, an option or a value as code that may be broken after its punctuation, in a cell of a table."""
    shown = re.sub(r"([._,|])", r"\1<wbr>", html.escape(text)).replace("|", "&#124;").replace("_", "&#95;")
    return f'<code class="breaks">{shown}</code>'


def _escaped(text: str) -> str:
    """Escape the characters that Markdown or HTML would take for markup."""
    return re.sub(r"([*_<\[\]`])", r"\\\1", text)
