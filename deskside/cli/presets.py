"""`deskside presets`: list the models that ship with deskside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deskside.budget.shape import active_params, num_params
from deskside.cli.options import Command
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.config import merge, presets


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
    width = max(len(row["name"]) for row in rows) + 1
    print(f"{'preset':{width}}{'parameters':>11}{'layers':>8}{'width':>7}{'sequence':>10}")
    for row in rows:
        alias = f"  (formerly {', '.join(row['aliases'])})" if row["aliases"] else ""
        if row["active_parameters"] != row["parameters"]:
            alias = f"  ({row['active_parameters'] / 1e6:,.1f}M active per token){alias}"
        millions = f"{row['parameters'] / 1e6:,.1f}M"
        print(
            f"{row['name']:{width}}{millions:>11}{row['layers']:>8}{row['hidden_size']:>7}{row['sequence_length']:>10}{alias}"
        )
    print("\nOther sizes: d2, d4, ... (depth N: N layers, width 64 x N), or a .toml file.")
    return 0
