"""Samples of a model that was trained on text: continuations of prompts from the validation split."""

import math
import time

import numpy as np

from deskside.data.reading.rows import PackedDataset
from deskside.data.tokenizer import load as load_tokenizer
from deskside.engine.generate import generate_events
from deskside.engine.sampling import Sampling
from deskside.model.transformer import Transformer
from deskside.run.directory import RunDirectory

SAMPLES = 3
MAX_LANGUAGES = 24  # with a sample each
PROMPT_TOKENS = 8
SAMPLE_TOKENS = 80
SAMPLE_TEMPERATURE = 0.8


def sample_text(
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
        # A token may contain part of a character. A character that the prompt begins belongs to the sample, so new
        # tokens are decoded together with the prompt.
        text = tokenizer.decode(prompt, skip_special_tokens=True).rstrip("\N{REPLACEMENT CHARACTER}")
        whole = tokenizer.decode(prompt + new, skip_special_tokens=True)
        language = {"language": languages[number]} if languages else {}
        results.append({"prompt": text, "text": whole[len(text) :], **language})
    return results
