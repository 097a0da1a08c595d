"""The end of a run: samples, the Hugging Face model, summary.json."""

import math
import time

import numpy as np
import torch
from torch import Tensor

from deskside.data.reading.rows import PackedDataset
from deskside.data.tokenizer import load as load_tokenizer
from deskside.engine.generate import generate_events
from deskside.engine.sampling import Sampling
from deskside.model.transformer import Transformer
from deskside.precision.lora import is_adapted
from deskside.run.directory import RunDirectory
from deskside.train.parallel import World
from deskside.utils.errors import UsageError
from deskside.weights.checkpoint import load_weights
from deskside.weights.hf import save_hf
from deskside.weights.merge_adapters import merged

SAMPLES = 3
PROMPT_TOKENS = 8
SAMPLE_TOKENS = 80
SAMPLE_TEMPERATURE = 0.8


def samples(
    model: Transformer, validation: PackedDataset, run: RunDirectory, seed: int, seconds: float = math.inf
) -> list[dict[str, str]]:
    """Return continuations of a few places spread over the validation text, cut off after so many seconds."""
    tokenizer = load_tokenizer(run.tokenizer)
    eos = validation.index.tokenizer.eos_id
    numbers = np.unique(np.arange(SAMPLES) * validation.num_rows // SAMPLES)
    rows = validation.rows_by_number(numbers).inputs[:, :PROMPT_TOKENS]
    prompts: list[list[int]] = [row.tolist() for row in rows]
    new: list[list[int]] = [[] for _ in prompts]
    until = time.perf_counter() + seconds
    for event in generate_events(
        model,
        prompts,
        max_new_tokens=SAMPLE_TOKENS,
        sampling=Sampling(temperature=SAMPLE_TEMPERATURE, top_k=50),
        eos_tokens=(eos,),
        seed=seed,
    ):
        if event.token is not None:
            new[event.request].append(event.token)
        if time.perf_counter() > until:
            break
    texts = [tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts]
    # New tokens are decoded with the prompt, because a token may hold part of a character.
    whole = [tokenizer.decode(p + n, skip_special_tokens=True) for p, n in zip(prompts, new, strict=True)]
    return [{"prompt": text, "text": w[len(text) :]} for text, w in zip(texts, whole, strict=True)]


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
    tensors: dict[str, Tensor] = {
        name: parameter.full_tensor().cpu() if hasattr(parameter, "full_tensor") else parameter.detach().cpu()
        for name, parameter in model.named_parameters()
    }
    copy = Transformer(model.config)
    load_weights(copy, tensors)
    return copy.to(torch.device("cpu"))
