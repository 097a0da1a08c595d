"""The end of a run: samples, and the export of the model."""

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
MAX_LANGUAGES = 24  # with a sample each
PROMPT_TOKENS = 8
SAMPLE_TOKENS = 80
SAMPLE_TEMPERATURE = 0.8


def samples(
    model: Transformer, validation: PackedDataset, run: RunDirectory, seed: int, seconds: float = math.inf
) -> list[dict[str, str]]:
    """Continue a few short prompts from the validation text. Generation stops after `seconds`.

    With validation text in several languages, there is one prompt in each, and its sample has a "language".
    """
    tokenizer = load_tokenizer(run.tokenizer)
    eos = validation.index.tokenizer.eos_id
    languages: list[str] = []
    if len(validation.languages) > 1:
        beginnings = validation.beginnings(PROMPT_TOKENS)
        languages = list(beginnings)[:MAX_LANGUAGES]
        prompts = [beginnings[language] for language in languages]
    else:
        indices = np.unique(np.arange(SAMPLES) * validation.num_rows // SAMPLES)
        rows = validation.rows_by_number(indices).inputs[:, :PROMPT_TOKENS]
        prompts = [row.tolist() for row in rows]
    generated: list[list[int]] = [[] for _ in prompts]
    deadline = time.perf_counter() + seconds
    for event in generate_events(
        model,
        prompts,
        max_new_tokens=SAMPLE_TOKENS,
        sampling=Sampling(temperature=SAMPLE_TEMPERATURE, top_k=50),
        eos_tokens=(eos,),
        seed=seed,
    ):
        if event.token is not None:
            generated[event.request].append(event.token)
        if time.perf_counter() > deadline:
            break
    results = []
    for number, (prompt, new) in enumerate(zip(prompts, generated, strict=True)):
        # A token may contain part of a character. One that the prompt begins belongs to the sample, and new tokens are
        # decoded with the prompt.
        text = tokenizer.decode(prompt, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        whole = tokenizer.decode(prompt + new, skip_special_tokens=True)
        language = {"language": languages[number]} if languages else {}
        results.append({"prompt": text, "text": whole[len(text) :], **language})
    return results


def export(run: RunDirectory, model: Transformer) -> str:
    """Write the model to the run directory in Hugging Face format. Return a message about the result."""
    try:
        save_hf(model, model.config, run.tokenizer, run.model)
    except UsageError as error:  # transformers has no such architecture
        return f"no Hugging Face model was written: {error}"
    return f"the Hugging Face model is in {run.model}"


def whole_model(model: Transformer, world: World) -> Transformer:
    """Return the model with all its weights in this process, with adapters merged.

    Every rank must call this, because sharded weights are gathered.
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
