"""`deskside export`: write a run or a Hugging Face model in the formats of other programs.

With --json standard output holds one JSON object; everything else is printed on standard error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deskside.cli.options import Command, option
from deskside.cli.shared_options import JsonOption, ModelOption
from deskside.utils.errors import UsageError


@dataclass(kw_only=True)
class ExportOptions(ModelOption, JsonOption):
    """Write a model for other programs, with a model card.

    Examples:
      deskside export runs/demo --to hf --out my-model
      deskside export runs/demo --to gguf --dtype q8_0 --out my-gguf
    """

    out: str = option("output directory: a new or empty one, or that of an earlier export", metavar="DIR")
    to: Literal["hf", "gguf", "peft"] = option(
        "hf: Hugging Face safetensors; gguf: one file for llama.cpp; peft: only the adapters of a run", "hf"
    )
    dtype: Literal["float32", "bfloat16", "float16", "q8_0"] = option(
        "number format of the weights; q8_0 (8 bits) is for gguf only, peft is always float32", "float32"
    )


COMMAND = Command("export", ExportOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside export` and return the exit code. Raises UsageError and RunError."""
    options = COMMAND.parse(argv)
    if options.dtype == "q8_0" and options.to != "gguf":
        raise UsageError(
            f"--dtype q8_0: exists only in GGUF; with --to {options.to}, use float32, bfloat16 or float16"
        )
    if options.dtype != "float32" and options.to == "peft":
        raise UsageError(
            f"--dtype {options.dtype}: adapters are always written in float32; leave --dtype out"
        )
    from deskside.cli.export_model import export_model

    return export_model(options)
