"""The end of a run: samples, the Hugging Face model, summary.json."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deskside.config.run import RunConfig
from deskside.data.reading.rows import PackedDataset
from deskside.data.tokenizer import load as load_tokenizer
from deskside.engine.generate import events
from deskside.engine.sampling import Sampling
from deskside.model.transformer import Transformer
from deskside.precision.lora import is_adapted
from deskside.run.directory import RunDirectory
from deskside.train.parallel import World
from deskside.utils.errors import UsageError
from deskside.weights.checkpoint_files import load_weights
from deskside.weights.hf import save_hf
from deskside.weights.merge_adapters import merged

SAMPLES = 3
PROMPT_TOKENS = 8
SAMPLE_TOKENS = 80
SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Totals:
    """Totals of a training run. peak_reserved_gib: peak of the GPU's caching allocator, None on a CPU."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float | None
    mfu: float | None
    peak_memory_gib: float
    peak_reserved_gib: float | None


def summarise(
    config: RunConfig,
    model: Transformer,
    totals: Totals,
    measured: Mapping[str, Any],
    precision: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the contents of summary.json.

    measured: the final evaluation; precision: the facts of `setup.choose_recipe`.
    """
    groups = model.num_params()
    return {
        "schema_version": 1,
        "status": "finished",
        **({"objective": config.align.name} if config.align else {}),
        **measured,
        "steps": totals.steps,
        "tokens": totals.tokens,
        "seconds": totals.seconds,
        "clock": config.schedule.clock,
        "tokens_per_second": totals.tokens_per_second,
        # Both qualify the speed: an emulated format runs at another speed than a native one.
        "precision": precision["chosen"],
        "emulated": not precision["native"],
        "mfu": totals.mfu,
        "peak_memory_gib": totals.peak_memory_gib,
        "peak_reserved_gib": totals.peak_reserved_gib,
        "parameters": sum(groups.values()),
        "parameters_by_group": groups,
    }


def samples(
    model: Transformer, validation: PackedDataset, run: RunDirectory, seed: int, seconds: float = math.inf
) -> list[dict[str, str]]:
    """Return continuations of a few places spread over the validation text, cut off after so many seconds."""
    tokenizer = load_tokenizer(run.tokenizer)
    eos = validation.index.tokenizer.eos_id
    numbers = np.unique(np.arange(SAMPLES) * validation.num_rows // SAMPLES)
    rows = validation.plain_rows(numbers).inputs[:, :PROMPT_TOKENS]
    prompts: list[list[int]] = [row.tolist() for row in rows]
    new: list[list[int]] = [[] for _ in prompts]
    until = time.perf_counter() + seconds
    for event in events(
        model,
        prompts,
        max_new_tokens=SAMPLE_TOKENS,
        sampling=Sampling(temperature=SAMPLE_TEMPERATURE, top_k=50),
        eos_tokens=(eos,),
        seed=seed,
    ):
        if event.token is not None:
            new[event.row].append(event.token)
        if time.perf_counter() > until:
            break
    return [
        {
            "prompt": tokenizer.decode(prompt, skip_special_tokens=True),
            "text": _continuation(tokenizer, prompt, tokens),
        }
        for prompt, tokens in zip(prompts, new, strict=True)
    ]


def _continuation(tokenizer: Any, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The new text alone. Decoded with the prompt, because a token may hold part of a character."""
    whole = tokenizer.decode([*prompt, *new], skip_special_tokens=True)
    return str(whole[len(tokenizer.decode(list(prompt), skip_special_tokens=True)) :])


def export(run: RunDirectory, model: Transformer) -> str:
    """Write the Hugging Face model into the run; returns a sentence on what was done."""
    try:
        save_hf(model, model.config, run.tokenizer, run.model)
    except UsageError as error:  # an architecture that only exists here
        return f"no Hugging Face model was written: {error}"
    return f"the Hugging Face model is in {run.model}"


def whole_model(model: Transformer, world: World) -> Transformer:
    """The model with all its weights on this process, adapters merged into them.

    Every rank calls this; sharded weights are gathered.
    """
    if is_adapted(model):
        return merged(model)
    if not world.sharded:
        return model
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[name] = (
            parameter.full_tensor().cpu() if hasattr(parameter, "full_tensor") else parameter.detach().cpu()
        )
    copy = Transformer(model.config)
    load_weights(copy, tensors)
    return copy.to(torch.device("cpu"))
