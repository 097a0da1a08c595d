"""Long-context tasks: texts of the right length with one solution, and results that equal transformers'."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from deskside.engine.requests import Request
from deskside.evaluate import long_context as module
from deskside.evaluate.likelihood import ContextEncoder, Likelihood, Pair
from deskside.evaluate.long_context import TASKS, count_steps, long_context, recall
from deskside.evaluate.run_task import EvaluatedModel
from deskside.utils.errors import UsageError
from deskside.weights.hf import save_hf
from tests.evaluate.made_model import Made, make

LENGTH = 700
CELLS = [(name, depth) for name, task in TASKS.items() for depth in task.depths]


def subject_of(made: Made) -> EvaluatedModel:
    encoder = ContextEncoder(made.tokenizer, made.end, always_start=True)
    return EvaluatedModel(made.model, made.tokenizer, encoder, [made.end], batch_tokens=4096)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> EvaluatedModel:
    return subject_of(make(tmp_path_factory.mktemp("model"), max_position_embeddings=16384))


def solve(text: str) -> list[str]:
    """Return the answers to a prompt, computed from its text alone."""
    if found := re.findall(r"secret number is (\d+)", text):
        return [found[0]]
    if named := re.search(r"The number of (\w+) is$", text):
        (number,) = re.findall(rf"The number of {named[1]} is (\d+)\.", text)
        return [number]
    if wanted := re.search(r"have the value (\d+):$", text):
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (\w+)\.", text):
            values[name] = values.get(source, source)
        return [name for name, value in values.items() if value == wanted[1]]
    listed = text.splitlines()[1]
    return [word for word, _ in Counter(listed.split()).most_common(3)]


@pytest.mark.parametrize(("name", "depth"), CELLS)
@pytest.mark.parametrize("length", [LENGTH, 4000])
def test_texts(name: str, depth: float | None, length: int, subject: EvaluatedModel) -> None:
    """A text with its answer has almost the requested length, and only the passage at
    the requested depth answers the question.
    """
    for trial in range(3):
        prompt = module._prompt(subject.encoder, (name, length, depth), [0, trial])
        used = len(prompt.pair.context) + prompt.room
        unit = 20 if name == "frequent_words" else len(subject.encoder.prompts([module._FILLER])[0])
        assert length - unit - 2 <= used <= length and prompt.room >= len(prompt.pair.continuation)
        text = subject.tokenizer.decode(list(prompt.pair.context))
        answers = solve(text)
        assert sorted(answers) == sorted(prompt.answers)
        assert subject.tokenizer.decode(list(prompt.pair.continuation)) == " " + ", ".join(prompt.answers)
        if depth is not None and length == 4000:
            body = text[: text.rindex("\n")].split("\n", 1)[1]
            assert body.index(answers[0]) / len(body) == pytest.approx(depth, abs=0.06)
        if name == "frequent_words":
            (first, most), (_, second), (_, third), (_, fourth) = Counter(
                text.splitlines()[1].split()
            ).most_common(4)
            assert most > second > third > fourth and first == prompt.answers[0]


def test_chains_need_tracking(subject: EvaluatedModel) -> None:
    """The variables of one chain are asked for, so a list of eight of the ten does not count."""
    prompt = module._prompt(subject.encoder, ("variable_tracking", LENGTH, None), [0, 0])
    text = subject.tokenizer.decode(list(prompt.pair.context))
    variables = re.findall(r"VAR (\w+) =", text)
    assert len(variables) == 10 and len(prompt.answers) == 5
    assert len(subject.encoder.prompts([" " + ", ".join(variables[:8])])[0]) > prompt.room


Solver = Callable[[str], list[str]]


def answer_by(monkeypatch: pytest.MonkeyPatch, subject: EvaluatedModel, solver: Solver) -> None:
    """Replace the model by one that writes the solver's answers and nothing else."""

    def written(prompt: Sequence[int]) -> str:
        return " " + ", ".join(solver(subject.tokenizer.decode(list(prompt))))

    def likelihoods(_: object, pairs: Sequence[Pair], **__: Any) -> list[Likelihood]:
        return [
            Likelihood(-1.0, subject.tokenizer.decode(list(p.continuation)) == written(p.context), 1)
            for p in pairs
        ]

    def generate_texts(_: object, __: object, requests: Sequence[Request], ___: object) -> list[str]:
        return [written(request.prompt) for request in requests]

    monkeypatch.setattr(module, "likelihoods", likelihoods)
    monkeypatch.setattr(module, "generate_texts", generate_texts)


@pytest.mark.parametrize(
    ("solver", "several"),
    [
        (solve, 1.0),
        (lambda text: solve(text)[::-1], 1.0),  # in a different order
        (lambda text: [word.swapcase() for word in solve(text)], 1.0),
        (lambda text: ["3"], 0.0),
        (lambda text: [], 0.0),
        (lambda text: solve(text)[1:], None),  # all but one
    ],
)
def test_recall_of_models_that_know(
    solver: Solver, several: float | None, subject: EvaluatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_by(monkeypatch, subject, solver)
    cells = long_context(subject, list(TASKS), [LENGTH, 900], trials=2, seed=1)
    shares = {"variable_tracking": 4 / 5, "frequent_words": 2 / 3}
    for cell in cells:
        expected = shares.get(cell.task, 0.0) if several is None else several
        assert cell.accuracy == pytest.approx(expected), cell
        assert cell.n == (10 if cell.task in shares else 2)


def test_recall() -> None:
    assert recall("They are AB, x and cd", ["ab", "CD", "ef"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["passkey", pytest.param("variable_tracking", marks=pytest.mark.full)])
def test_results_equal_transformers(name: str, subject: EvaluatedModel, tmp_path: Path) -> None:
    """A model that always gives one of the answers is right for that item and hardly elsewhere."""
    depth = 0.5 if name == "passkey" else None
    trials = 3 if name == "passkey" else 1
    prompts = [
        module._prompt(subject.encoder, (name, LENGTH, depth), [3, trial])
        for trial in range(TASKS[name].prompts(trials))
    ]
    model = make(tmp_path, max_position_embeddings=1024).model.requires_grad_(True)
    tokens = torch.tensor([(*prompts[0].pair.context, *prompts[0].pair.continuation)])
    answer = len(prompts[0].pair.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = F.cross_entropy(model(tokens[:, :-1])[0, answer - 1 :], tokens[0, answer:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.requires_grad_(False)
    cells = long_context(replace(subject, model=model), [name], [LENGTH], trials=trials, seed=3)
    save_hf(model, model.config, None, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    nats, recalls = [], []
    for prompt in prompts:
        pair = prompt.pair
        inputs = torch.tensor([(*pair.context, *pair.continuation)])
        with torch.no_grad():
            logits = theirs(inputs).logits[0, len(pair.context) - 1 : -1]
        nats.append(F.cross_entropy(logits, torch.tensor(pair.continuation), reduction="sum").item())
        written = theirs.generate(
            torch.tensor([pair.context]),
            do_sample=False,
            max_new_tokens=prompt.room,
            eos_token_id=list(subject.eos_tokens),
        )
        text = subject.tokenizer.decode(written[0, len(pair.context) :].tolist())
        recalls.append(sum(word in text for word in prompt.answers) / len(prompt.answers))
    (cell,) = (each for each in cells if each.depth == depth)
    assert recalls[0] == 1 and cell.recall == pytest.approx(sum(recalls)) and cell.n == len(prompts)
    assert cell.nats == pytest.approx(sum(nats) / len(nats), rel=1e-4)


def test_seed_decides_the_texts(subject: EvaluatedModel) -> None:
    def nats(seed: int) -> list[float]:
        return [cell.nats for cell in long_context(subject, list(TASKS), [500], trials=1, seed=seed)]

    first, other = nats(0), nats(1)
    assert first == nats(0) and all(a != b for a, b in zip(first, other, strict=True))


def test_steps_are_counted(subject: EvaluatedModel) -> None:
    steps: list[int] = []
    long_context(subject, list(TASKS), [500], trials=1, seed=0, tick=steps.append)
    assert sum(steps) == count_steps(list(TASKS), [500], 1) == 5 + 5 + 2 * (5 + 5)


@pytest.mark.full
def test_16384_tokens(subject: EvaluatedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEPTHS", (0.5,))
    (cell,) = long_context(subject, ["multikey"], [16384], trials=1, seed=0)
    assert (cell.length, cell.n) == (16384, 1) and 0 < cell.nats < 1000


def test_all_positions_of_a_model(tmp_path: Path) -> None:
    subject = subject_of(make(tmp_path, max_position_embeddings=600))
    cells = long_context(subject, list(TASKS), [600], trials=1, seed=0)
    assert len(cells) == 12 and all(0 < cell.nats < 1000 for cell in cells)


@pytest.mark.parametrize("name", list(TASKS))
@pytest.mark.parametrize(("length", "message"), [(16385, "up to 16384 tokens"), (40, "the shortest text of")])
def test_lengths_that_do_not_fit(name: str, length: int, message: str, subject: EvaluatedModel) -> None:
    with pytest.raises(UsageError, match=message):
        long_context(subject, [name], [length], trials=1, seed=0)
