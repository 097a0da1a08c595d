"""Passkey retrieval: the prompts, and results that equal transformers' greedy decoding and log-softmax."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from deskside.evaluate import passkey as module
from deskside.evaluate.likelihood import Encoder
from deskside.evaluate.passkey import DEPTHS, passkey
from deskside.utils.errors import UsageError
from deskside.weights.hf import save_hf
from tests.evaluate.made_model import Made, make

LENGTH = 500


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)


@pytest.fixture
def encoder(made: Made) -> Encoder:
    return Encoder(made.tokenizer, made.end, always_start=True)


@pytest.mark.parametrize("depth", DEPTHS)
def test_prompt_has_its_length_and_its_depth(depth: float, encoder: Encoder) -> None:
    prompt = module._prompt(encoder, 4000, depth, 48213)
    (pair,) = encoder.pairs([(prompt, " 48213")])
    filler = len(encoder.prompts([module._FILLER])[0])
    assert 4000 - filler - 1 <= len(pair.context) + len(pair.continuation) <= 4000
    assert prompt.count("48213") == 2 and prompt.count(module._FILLER) > 20
    before, after = prompt.split(module._HIDDEN.format(48213))
    share = before.count(module._FILLER) / prompt.count(module._FILLER)
    assert share == pytest.approx(depth, abs=0.03) and after.endswith(module._QUESTION)


def test_results_equal_transformers(made: Made, encoder: Encoder, tmp_path: Path) -> None:
    """A model that has learned one of the numbers by heart is right there and nowhere else."""
    (number, *_) = numbers = _numbers(seed=3, depth=0.5, trials=3)
    pairs = encoder.pairs([(module._prompt(encoder, LENGTH, 0.5, n), f" {n}") for n in numbers])
    model = make(tmp_path, max_position_embeddings=1024).model.requires_grad_(True)
    tokens = torch.tensor([(*pairs[0].context, *pairs[0].continuation)])
    answer = len(pairs[0].context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = F.cross_entropy(model(tokens[:, :-1])[0, answer - 1 :], tokens[0, answer:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    cells = passkey(model, encoder, [LENGTH], trials=3, seed=3, batch_tokens=2048)
    save_hf(model, model.config, None, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    nats, right = [], []
    for pair in pairs:
        inputs = torch.tensor([(*pair.context, *pair.continuation)])
        with torch.no_grad():
            logits = theirs(inputs).logits[0, len(pair.context) - 1 : -1]
        nats.append(F.cross_entropy(logits, torch.tensor(pair.continuation), reduction="sum").item())
        written = theirs.generate(
            torch.tensor([pair.context]), do_sample=False, max_new_tokens=len(pair.continuation)
        )
        right.append(tuple(written[0, len(pair.context) :].tolist()) == pair.continuation)
    middle = next(cell for cell in cells if cell.depth == 0.5)
    assert (
        right[0] and middle.correct == sum(right) and str(number) in module._prompt(encoder, 500, 0, number)
    )
    assert middle.nats == pytest.approx(sum(nats) / 3, rel=1e-4)
    assert sum(cell.n for cell in cells) == 15 and [cell.depth for cell in cells] == list(DEPTHS)


def _numbers(seed: int, depth: float, trials: int) -> list[int]:
    rng = module.np.random.default_rng([seed, LENGTH, round(100 * depth)])
    return list(map(int, rng.integers(10_000, 100_000, size=trials)))


def test_seed_decides_the_numbers(made: Made, encoder: Encoder) -> None:
    def nats(seed: int) -> list[float]:
        return [
            c.nats for c in passkey(made.model, encoder, [LENGTH], trials=1, seed=seed, batch_tokens=4096)
        ]

    assert nats(0) == nats(0) != nats(1)


def test_prompts_of_16384_tokens(made: Made, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPTHS", (0.5,))
    (cell,) = passkey(made.model, encoder, [16384], trials=1, seed=0, batch_tokens=8192)
    assert (cell.length, cell.n) == (16384, 1) and 0 < cell.nats < 1000


@pytest.mark.parametrize(("length", "message"), [(16385, "up to 16384 tokens"), (40, "without filler has")])
def test_lengths_that_do_not_fit(length: int, message: str, made: Made, encoder: Encoder) -> None:
    with pytest.raises(UsageError, match=message):
        passkey(made.model, encoder, [length], trials=1, seed=0, batch_tokens=4096)
