"""`deskside chat` and `deskside export`; `deskside eval` stands in eval_command.py.

They stand here, above everything that they use, because each begins by turning a path into a model (export/load.py).
With --json standard output holds one JSON object and nothing else; all other words go to standard error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from deskside import __version__
from deskside.config import strict_json
from deskside.config.commandline import MAY_BE_EMPTY, parse
from deskside.engine.sampling import Sampling
from deskside.errors import RunError, UsageError
from deskside.export.hf import check_out, save_hf
from deskside.export.load import load_model
from deskside.serve.chat import ChatOptions, converse
from deskside.serve.machine import Device, device_of, dtype_of, say

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Chat:
    """Talk to a model. A model without a chat template continues your text.

    Example: deskside chat runs/demo

    Example: deskside chat runs/demo --prompt "Once upon a time" --temperature 0
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="a run, or a Hugging Face directory"),
    ]
    prompt: Annotated[str | None, MAY_BE_EMPTY] = None
    """Answer this one text, then leave."""
    system: Annotated[str | None, MAY_BE_EMPTY] = None
    """System message of a chat model."""
    temperature: float = 0.8
    """0 always takes the most probable token."""
    top_k: int = 50
    """Draw from the k most probable tokens only; 0 switches it off."""
    top_p: float | None = None
    """Draw from the most probable tokens that hold this probability together."""
    min_p: float | None = None
    """Draw from tokens with at least this share of the best token's probability."""
    seed: int | None = None
    """Repeats a conversation exactly. Default: a new one each time."""
    max_new_tokens: int = 256
    """Tokens of one answer at most."""
    device: Device = "auto"
    """auto: cuda where there is one."""


@dataclass
class Export:
    """Write a model for other programs: AutoModelForCausalLM.from_pretrained(DIR).

    Example: deskside export runs/demo --to hf --out my-model
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="a run, or a Hugging Face directory"),
    ]
    out: Annotated[str, tyro.conf.arg(metavar="DIR")]
    """Directory to write; it must be new, empty or an earlier export."""
    to: Literal["hf"] = "hf"
    """Format: hf (Hugging Face safetensors)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the stored weights."""
    json: bool = False
    """Print one JSON object on standard output."""


def run_chat(argv: Sequence[str]) -> int:
    """`deskside chat`. Returns the exit code; raises UsageError and RunError."""
    options = parse(Chat, argv, "deskside chat")
    sampling = Sampling(options.temperature, options.top_k or None, options.top_p, options.min_p)
    if options.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {options.max_new_tokens}: must be at least 1")
    if options.seed is not None and options.seed < 0:
        raise UsageError(f"--seed {options.seed}: must be 0 or more")
    device = device_of(options.device)
    loaded = load_model(options.model, device, dtype_of(device), say)
    return converse(
        loaded,
        ChatOptions(sampling, options.max_new_tokens, options.seed, options.system),
        options.prompt,
    )


def run_export(argv: Sequence[str]) -> int:
    """`deskside export`. Returns the exit code; raises UsageError and RunError."""
    options = parse(Export, argv, "deskside export")
    out = Path(options.out)
    check_out(out)  # before the work
    loaded = load_model(options.model, "cpu", torch.float32, say)
    made = {"deskside": __version__, "from": options.model, "step": loaded.step, "dtype": options.dtype}
    try:
        save_hf(loaded.model, loaded.config, loaded.tokenizer_dir, out, DTYPES[options.dtype], made)
    except OSError as error:
        raise RunError(
            f"{error.filename2 or error.filename or out}: cannot be written: {error.strerror or error}"
        ) from None
    if options.json:
        print(
            strict_json.dumps(
                {"out": str(out), "to": options.to, "dtype": options.dtype, "step": loaded.step}
            )
        )
    else:
        print(out)
        say(f"load it with: AutoModelForCausalLM.from_pretrained({str(out)!r})")
    return 0
