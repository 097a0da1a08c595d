"""`deskside chat`; `deskside eval` and `deskside export` stand in eval_command.py and export_command.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from deskside.cli.parser import MAY_BE_EMPTY, parse
from deskside.engine.device import Device, device_of, dtype_of, say
from deskside.engine.sampling import Sampling
from deskside.serve.chat import ChatOptions, converse
from deskside.utils.errors import UsageError
from deskside.weights.load import load_model


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
    repetition_penalty: float = 1.0
    """Above 1: less of what was said already."""
    seed: int | None = None
    """Repeats a conversation exactly. Default: a new one each time."""
    max_new_tokens: int = 256
    """Tokens of one answer at most."""
    device: Device = "auto"
    """auto: cuda where there is one."""


def run(argv: Sequence[str]) -> int:
    """`deskside chat`. Returns the exit code; raises UsageError and RunError."""
    options = parse(Chat, argv, "deskside chat")
    sampling = Sampling(
        options.temperature, options.top_k or None, options.top_p, options.min_p, options.repetition_penalty
    )
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
