"""Presets: the TOML files in `config/presets/`, TOML files of the user, and the depth series of `--depth`.

A file may build on another one with `base = "124m"` or `base = "other.toml"` (relative to its own directory). Files and
the command line are merged in the same way.
"""

import difflib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from deskside.config.depth_series import of_depth, of_size
from deskside.config.merge import check_keys
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, toml_table

# Former names -> names. The former names claimed more parameters than the models have.
RENAMED = {"355m": "340m", "774m": "710m", "1.5b": "1.3b"}
CHOICES = "use one of {names}, dN for N layers (d4, d12, d20), or a .toml file"
FINE_TUNING = ("sft", "dpo", "kto", "grpo")  # commands that start from trained weights and take no preset


def names() -> list[str]:
    """Return the names of the presets that ship with deskside."""
    folder = resources.files("deskside.config").joinpath("presets")
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def layers(name: str) -> list[dict[str, Any]]:
    """Return the configuration layers, lowest first, of a preset, `dN` (depth N) or a TOML file. Raises UsageError."""
    return [layer for layer, _ in _layers(name, Path(), ())]


def file_layers(name: str) -> list[dict[str, Any]]:
    """Return those of `layers(name)` that come from TOML files of the user, and not from presets that ship."""
    return [layer for layer, is_file in _layers(name, Path(), ()) if is_file]


def for_pretraining(name: str) -> list[dict[str, Any]]:
    """Return `layers(name)` for a command that pretrains. Raises UsageError also for a table [align]."""
    preset_layers = layers(name)
    for layer in preset_layers:
        if "align" in layer:
            align = layer["align"]
            objective = align.get("name") if isinstance(align, dict) else None
            command = objective if objective in FINE_TUNING else "|".join(FINE_TUNING)
            raise UsageError(
                f"{name}: its table [align] is for fine-tuning, which takes options and no file: use deskside "
                f"{command} MODEL --data SOURCE; to pretrain, remove the table"
            )
    return preset_layers


def _layers(name: str, folder: Path, seen: tuple[str, ...]) -> list[tuple[dict[str, Any], bool]]:
    """Return `layers(name)`, each with True if it comes from a file of the user.

    folder: directory of a relative file name; seen: files that build on this one.
    """
    if re.fullmatch(r"d\d+", name):
        return [(of_depth(int(name[1:])), False)]
    if name in RENAMED:
        _note_renamed(name)
        name = RENAMED[name]
    if name.endswith(".toml"):
        file = folder / name
        text, label, folder = _read(file), str(file), file.parent
        if str(file.resolve()) in seen:
            raise UsageError(f"{label}: builds on itself; change its base")
        seen = (*seen, str(file.resolve()))
    elif name in names():
        text = resources.files("deskside.config").joinpath("presets", f"{name}.toml").read_text("utf-8")
        label = f"preset {name}"
    else:
        written = [known for known in names() if known == name.lower()]
        similar = written or difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {similar[0]}? Otherwise " if similar else ""
        if not similar and (of_about_this_size := of_size(name)):
            hint = f"did you mean {of_about_this_size}? Otherwise "
        raise UsageError(f"{name}: no such preset; {hint}{CHOICES.format(names=', '.join(names()))}")
    try:
        values = toml_table(text)
    except Unreadable as error:
        raise UsageError(f"{label}: not valid TOML: {error}") from None
    is_file = name.endswith(".toml")
    if is_file:
        check_keys({key: value for key, value in values.items() if key != "base"}, label)
    if "base" not in values:
        return [(values, is_file)]
    base = values.pop("base")
    if not isinstance(base, str):
        raise UsageError(f"{label}: base: {base!r} must be the name of a preset or file, in quotes")
    return [*_layers(base, folder, seen), (values, is_file)]


@cache  # one note per name
def _note_renamed(name: str) -> None:
    say(f"preset {name} is now called {RENAMED[name]}, after its parameter count")


def _read(path: Path) -> str:
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: cannot be read as a TOML file: it is not a regular file")
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; presets that ship are {', '.join(names())}") from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as a TOML file: {error}") from None
