"""The options of `deskside export`, which are parsed without torch."""

from dataclasses import dataclass
from typing import Literal

from deskside.cli.options import option
from deskside.cli.shared_options import JsonOption, ModelOption


@dataclass(kw_only=True)
class ExportOptions(ModelOption, JsonOption):
    """Write a model for other programs, with a model card.

    Examples:
      deskside export runs/demo --to hf --out my-model
      deskside export runs/demo --to gguf --dtype q4_k_m --out my-gguf
      deskside export runs/chat --to hf --dtype bfloat16 --out my-model --push me/my-model
    """

    out: str = option("output directory: a new or empty one, or that of an earlier export", metavar="DIR")
    to: Literal["hf", "gguf", "peft"] = option(
        "hf: Hugging Face safetensors; gguf: one file for llama.cpp; peft: only the adapters of a run", "hf"
    )
    dtype: Literal["float32", "bfloat16", "float16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"] = option(
        "number format of the weights; those of 8 to 4 bits are for gguf only, peft is always float32",
        "float32",
    )
    push: str | None = option(
        "also upload it to the Hugging Face hub, as owner/name; private if it is new", None, metavar="NAME"
    )
    public: bool = option("with --push: make a new repository public", False)
