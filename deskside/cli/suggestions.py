"""Suggestions for unknown options and commands: "did you mean --optim.lr?"."""

import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from deskside.cli.commands import COMMANDS
from deskside.config import presets
from deskside.config.depth_series import of_size

# Option names of other programs, or of another of our commands -> ours. Errors suggest ours and do not accept these.
SYNONYMS = {
    "learning-rate": "optim.lr",
    "optimizer": "optim.name",
    "max-steps": "steps",
    "num-steps": "steps",
    "iterations": "steps",
    "steps": "tokens",  # a plan has no steps
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
# Option or argument of another of our commands -> those that may be meant by it, in this order.
SAME_THING = {
    "preset": ("preset", "model", "source"),
    "model": ("model", "source", "preset"),
    "init": ("source", "model", "preset"),
    "params": ("preset",),
    "size": ("params", "preset"),
    "depth": ("preset",),
    "data": ("data.path", "sources"),
    "sources": ("data", "data.path"),
    "time": ("hours",),
    "output": ("out",),
}
# The similarity of two names, without their hyphens, from which one may be a misspelling of the other.
SIMILAR = 0.75


def option_hint(
    command: str, flag: str, known: Sequence[str], positional: Mapping[str, str], value: str
) -> str:
    """Return what was probably meant by an unknown option, or where to look.

    That is, in this order: our name for another program's option; the same key in another part; the command's own
    option or argument for the same thing; the other commands that have an option of this name; an option that is
    spelled almost like it.

    known: options of the command; positional: name of each argument -> how the help writes it; value: what was given
    for the option, or "".
    """
    name = flag.lstrip("-")
    key = name.rsplit(".", 1)[-1]
    same_key = [other for other in known if other[2:].rsplit(".", 1)[-1] == key]
    if key in SYNONYMS and f"--{SYNONYMS[key]}" in known:
        return f"did you mean --{SYNONYMS[key]}?"
    if len(same_key) == 1:
        return f"did you mean {same_key[0]}?"
    for other in (name, *SAME_THING.get(name, ())):
        if other in positional:
            given = value if other == name else _as_preset(value) if other == "preset" else ""
            return f"{positional[other]} is written without a name: deskside {command} {given or positional[other]}"
        if f"--{other}" in known:
            return f"did you mean {' '.join([f'--{other}', _as_preset(value) if other == 'preset' else '']).strip()}?"
    if others := commands_with(flag):
        return f"{_listed(others)} it; see deskside {command} --help"
    bare = {other[2:]: other for other in known}
    similar = difflib.get_close_matches(name, bare, n=1, cutoff=SIMILAR)
    return f"did you mean {bare[similar[0]]}?" if similar else f"see deskside {command} --help"


def _as_preset(value: str) -> str:
    """Return the preset with this name or with about this number of parameters, such as 1.5B; "" if there is none."""
    return value if value in presets.names() else (of_size(value) or "").split(" ")[0]


def _listed(commands: Sequence[str]) -> str:
    shown = [f"deskside {name}" for name in commands[:2]]
    return f"{' and '.join(shown)} {'has' if len(shown) == 1 else 'have'}"


def commands_with(flag: str) -> list[str]:
    """Return the names of the commands of deskside that have an option of their own with this name.

    Imports the modules of all commands, but not torch.
    """
    found = []
    for module_name, _, _ in COMMANDS.values():
        module = import_module(module_name)
        for command in module.COMMANDS.values() if hasattr(module, "COMMANDS") else [module.COMMAND]:
            own = {name for flags, _ in command.groups()["options"] for name in flags}
            found += [command.name] if flag in own else []
    return found


def command_hint(unknown: str, names: Mapping[str, Any]) -> str:
    """Return a hint for an unknown command: the most similar name, or all names."""
    similar = difflib.get_close_matches(unknown, names, n=1)
    return f"did you mean {similar[0]}?" if similar else f"commands are {', '.join(names)}"
