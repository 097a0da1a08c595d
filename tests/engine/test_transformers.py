"""Greedy text equals that of transformers' generate on the exported model.

Softcap does not exist there, so the uncached loop of test_engine.py is its oracle.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.engine.engine import Engine
from deskside.engine.fused import FusedBlocks
from deskside.engine.requests import Request
from deskside.engine.sampling import Sampling
from deskside.weights.hf import save_hf
from tests.export.test_hf_parity import CASES, random_model

transformers = pytest.importorskip("transformers")

LENGTHS = (6, 1, 30, 13, 6)
NEW = 20


def prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


CASES_IN_BATCHES = (
    "qwen3",
    "qwen3 mqa",
    "qwen3 bias",
    "llama",
    "gpt2",
    "qwen3 window",
    "qwen3 moe",
    "qwen3 moe window",
    "dots1",
    "dots1, shared expert",
    "qwen2 moe",
    "qwen2",
    "mistral window",
    "ministral",
    "smollm3",
    "granite",
    "phi3, longrope, some channels rotated",
    "mixtral",
    "gemma2",
    "olmo2",
    "gemma3",
    "olmo3",
    "neox",
    "gpt-oss",
)


def kinds() -> list[Any]:
    """Return what is run for each case: the default suite has the fused blocks and a penalty for every one, and the
    model's own blocks for those that differ most.
    """
    own = ("qwen3", "gpt2", "qwen3 moe window", "gpt-oss")
    return [
        pytest.param(
            case,
            penalty,
            blocks,
            marks=()
            if (blocks, penalty) == ("fused", 1.3)
            or ((blocks, penalty) == ("of the model", 1.0) and case in own)
            else pytest.mark.full,
        )
        for blocks in ("of the model", "fused")
        for penalty in (1.0, 1.3)
        for case in CASES_IN_BATCHES
    ]


@pytest.mark.parametrize("case, penalty, blocks", kinds())
def test_greedy_text_in_a_batch_of_unequal_lengths(
    case: str, penalty: float, blocks: str, tmp_path: Path
) -> None:
    """The fused blocks are those of a GPU, here with their operators in plain torch."""
    model = random_model(**CASES[case])
    save_hf(model, model.config, None, tmp_path / "hf")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    engine = Engine(model, max_batch=4, max_tokens=256, page_size=8, prefill_tokens=24)
    if blocks == "fused":
        engine._models[0].blocks = FusedBlocks(model)
    asked = [
        Request(tuple(p), NEW, Sampling(0.0, repetition_penalty=penalty))
        for p in prompts(model.config.vocab_size)
    ]
    for request, (answer,) in zip(asked, engine.run(asked), strict=True):
        text = theirs.generate(
            torch.tensor([request.prompt]),
            max_new_tokens=NEW,
            do_sample=False,
            repetition_penalty=penalty,
            pad_token_id=0,
        )
        assert [*request.prompt, *answer.tokens] == text[0].tolist()
