"""A model of some thousand parameters on disk, and questions that it can learn to answer."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deskside.config.model import ModelConfig
from deskside.data import tokenizer as bpe
from deskside.export.hf import save_hf
from deskside.model.init import initialize
from deskside.model.transformer import Transformer

RUN = ("--compute.device", "cpu", "--precision.name", "fp32", "--checkpoint.every", "1000 steps")


def model(folder: Path, seed: int = 0, hidden: int = 32, layers: int = 2) -> Path:
    """A Hugging Face directory with fresh weights and a byte-level tokenizer."""
    folder.mkdir(parents=True)
    tokens = folder.parent / f"{folder.name}-tokenizer"
    tokens.mkdir()
    bpe.save(bpe.train(["digits 0123456789 and letters, user assistant yes no please"] * 4, 260), tokens)
    config = ModelConfig(
        vocab_size=320,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=2 * hidden,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    made = Transformer(config)
    initialize(made, seed)
    return save_hf(made, config, tokens, folder)


def jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def copies(count: int, seed: int, digits: int = 1) -> list[dict[str, str]]:
    """Questions {"prompt": "73", "answer": "73"}."""
    chance = random.Random(seed)
    numbers = ["".join(chance.choices("0123456789", k=digits)) for _ in range(count)]
    return [{"prompt": f"say {n}", "answer": n} for n in numbers]
