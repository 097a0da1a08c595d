"""`deskside export`: write a run or a Hugging Face model in the formats of other programs.

With --json standard output holds one JSON object; everything else is printed on standard error.
"""

from collections.abc import Sequence

from deskside.cli.export_options import ExportOptions
from deskside.cli.options import Command
from deskside.utils.errors import UsageError

COMMAND = Command("export", ExportOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside export` and return the exit code. Raises UsageError and RunError."""
    options = COMMAND.parse(argv)
    if options.dtype.startswith("q") and options.to != "gguf":
        raise UsageError(
            f"--dtype {options.dtype}: exists only in GGUF; with --to {options.to}, use float32, bfloat16 or float16"
        )
    if options.dtype != "float32" and options.to == "peft":
        raise UsageError(
            f"--dtype {options.dtype}: adapters are always written in float32; leave --dtype out"
        )
    if options.public and options.push is None:
        raise UsageError("--public: is for --push owner/name; add it, or leave --public out")
    from deskside.cli.export_model import export_model

    return export_model(options)
