"""`deskside presets`: list the models that ship with deskside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deskside.budget.shape import active_params, num_params
from deskside.cli.options import Command
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.config import merge, presets
from deskside.utils.printer import Printer


@dataclass(kw_only=True)
class PresetsOptions(JsonOption):
    """List the presets with their parameter counts, smallest first.

    Example: deskside presets
    """


COMMAND = Command("presets", PresetsOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside presets` and return the exit code. Raises UsageError."""
    options = COMMAND.parse(argv)
    rows: list[dict[str, Any]] = []
    for name in presets.names():
        config = merge.build(presets.layers(name))
        former_names = [former for former, new in presets.RENAMED.items() if new == name]
        rows.append(
            {
                "name": name,
                "parameters": num_params(config.model),
                "active_parameters": active_params(config.model),
                "layers": config.model.num_hidden_layers,
                "hidden_size": config.model.hidden_size,
                "sequence_length": config.batch.sequence_length,
                "aliases": former_names,
            }
        )
    rows.sort(key=lambda row: row["parameters"])
    if options.json:
        print_json(rows, indent=1)
        return 0
    cells = []
    for row in rows:
        notes = []
        if row["active_parameters"] != row["parameters"]:
            notes.append(f"{row['active_parameters'] / 1e6:,.1f}M active per token")
        if row["aliases"]:
            notes.append(f"formerly {', '.join(row['aliases'])}")
        numbers = (f"{row['layers']}", f"{row['hidden_size']}", f"{row['sequence_length']}")
        cells.append([row["name"], f"{row['parameters'] / 1e6:,.1f}M", *numbers, "; ".join(notes)])
    printer = Printer()
    printer.table(["preset", "parameters", "layers", "width", "sequence", ""], cells, "lrrrrl")
    printer.text("\nOther sizes: d2, d4, ... (depth N: N layers, width 64 x N), or a .toml file.")
    printer.text(
        "Parameters are those with the preset's own vocabulary. Data with a larger one enlarges the model's embedding "
        "and head."
    )
    return 0
