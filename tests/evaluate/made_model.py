"""A small model as a Hugging Face directory, with a tokenizer and a chat template, and items made of its words."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from deskside.config.model import ModelConfig
from deskside.data import tokenizer as bpe
from deskside.data.chat import chat_template
from deskside.model.init import InitOptions, initialize
from deskside.model.transformer import Transformer
from deskside.weights.hf import save_hf

TEXT = "the of naïve café 東京 sea and 12 ships, नमस्ते went to 😀 wide. sailors sang songs: long 7 days"
WORDS = TEXT.split()
POSITIONS = 160


@dataclass
class Made:
    folder: Path
    model: Transformer
    tokenizer: Tokenizer
    end: int


def make(folder: Path, **options: Any) -> Made:
    """Return a model with random weights that clearly prefer some tokens. `options` are the model's."""
    rng = np.random.default_rng(5)
    texts = [" ".join(rng.choice(WORDS, size=40)) for _ in range(60)]
    plain = folder / "plain"
    bpe.save(bpe.train(texts, 320), plain)
    chat_template.make_chat_tokenizer(plain, folder / "chat", None)
    config = ModelConfig.model_validate(
        {
            "vocab_size": 320,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": POSITIONS,
            **options,
        }
    )
    model = Transformer(config)
    initialize(model, seed=3, options=InitOptions(head_std=0.4, output="fan_in"))
    model.requires_grad_(False)
    if not options:
        save_hf(model, config, folder / "chat" / "tokenizer.json", folder / "hf")
        # The chat files are in the same directory as the weights.
        for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
            (folder / "hf" / name).write_bytes((folder / "chat" / name).read_bytes())
    tokenizer = bpe.load(folder / "chat")
    return Made(folder / "hf", model, tokenizer, bpe.end_of_text(tokenizer)[1])


def sentence(rng: np.random.Generator, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS, size=int(rng.integers(low, high))))


@torch.no_grad()
def oracle(model: Transformer, context: tuple[int, ...], continuation: tuple[int, ...]) -> tuple[float, bool]:
    """Return log p from one forward pass over a whole row, with the softmax in float64."""
    whole = (context + continuation)[-(model.config.max_position_embeddings + 1) :]
    inputs = torch.tensor([whole[:-1]], device=model.embed.weight.device)
    logits = model(inputs)[0, -len(continuation) :].cpu().double()
    targets = torch.tensor(continuation)
    logprobs = logits.log_softmax(-1)[torch.arange(len(targets)), targets]
    return float(logprobs.sum()), bool((logits.argmax(-1) == targets).all())
