"""`deskside eval`: measure bits per byte of a model, and run evaluation tasks.

With --json standard output holds one JSON object; everything else is printed on standard error.
"""

from collections.abc import Sequence

from deskside.cli.eval_options import EvalOptions
from deskside.cli.options import Command
from deskside.utils.quick_start import quick_imports

COMMAND = Command("eval", EvalOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside eval` and return the exit code. Raises UsageError and RunError."""
    options = COMMAND.parse(argv)
    with quick_imports():
        from deskside.cli.eval_model import eval_model

    return eval_model(options)
