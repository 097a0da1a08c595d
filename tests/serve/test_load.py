"""Load on a server process: 20 seconds here, five minutes in the long form. Every greedy answer is known.

The answers come from a forward pass over one prompt alone. Only prompts without close calls between tokens are used,
so that rounding, which depends on a step's number of rows, decides nothing.
"""

import asyncio
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.serve_load import Question, Report, explain, load, main, questions, served, token_gap
from deskside.engine.generate import generate
from deskside.weights.load import Loaded, load_model
from tests.serve.made_run import make

CLEAR = 1e-3  # nats between the best token and the second best


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("load")).path


def clear_answers(loaded: Loaded) -> dict[Question, str]:
    known = {}
    for text, new in questions():
        ids = loaded.tokenizer.encode(text, add_special_tokens=False).ids
        prompt = [loaded.start_token, *ids]
        tokens = generate(loaded.model, [prompt], max_new_tokens=new, eos_tokens=loaded.eos_tokens)[0].tokens
        with torch.no_grad():
            logits = loaded.model(torch.tensor([[*prompt, *tokens]]))[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        if float((best[:, 0] - best[:, 1]).min()) > CLEAR:
            known[(text, new)] = loaded.tokenizer.decode(tokens)
    return known


def loaded_with(run: Path, seconds: float) -> None:
    known = clear_answers(load_model(run))
    assert len(set(known.values())) > 20
    arguments = [str(run), "--device", "cpu", "--max-batch", "32", "--name", "m"]
    with served(arguments, {"OMP_NUM_THREADS": "1"}) as (base, pid):
        report = asyncio.run(load(base, pid, known, seconds=seconds, clients=range(64)))
    print(*report.lines(), sep="\n")
    assert (report.lost, report.different.total(), report.wrongly_taken) == (0, 0, 0), report.lines()
    assert min(report.good, report.hung_up, report.refused) > 10  # however slow the machine is
    assert report.growth < 24, report.lines()


@pytest.mark.full
def test_eight_seconds(run: Path) -> None:
    loaded_with(run, 8)


@pytest.mark.full
def test_five_minutes(run: Path) -> None:
    loaded_with(run, 300)


@pytest.mark.full
def test_the_script(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "load.json"
    assert main([str(run), "--seconds", "2", "--clients", "4", "--json", str(file)]) == 0
    assert "good answers in 2 s" in capsys.readouterr().out
    assert '"lost": 0' in file.read_text()


def test_token_gap() -> None:
    choice = {
        "text": " a ship",
        "logprobs": {
            "tokens": [" a", " ship", "<|endoftext|>"],
            "token_logprobs": [-0.5, -1.0, -0.25],
            "top_logprobs": [
                {" a": -0.5, " an": -0.75},
                {" ship": -1.0, " sh": -4.0, " shore": -1.125, "<|endoftext|>": -2.0},
                {"<|endoftext|>": -0.25, " of": -3.25},
            ],
            "text_offset": [7, 9, 14],
        },
    }
    assert token_gap(choice, " an old") == 0.25
    assert token_gap(choice, " a shore") == 0.125
    assert token_gap(choice, " a short") == 3.0  # the first token that differs is " sh"
    assert token_gap(choice, " a") == 1.0  # ended one token before
    assert token_gap(choice, " a ship of") == 3.0
    assert token_gap(choice, " my boat") == math.inf


def test_an_improbable_answer_is_wrong(run: Path) -> None:
    question = questions(1)[0]
    with served([str(run), "--device", "cpu"], {"OMP_NUM_THREADS": "1"}) as (base, _):
        report = Report(different=Counter({(question, "zzz"): 2}))
        asyncio.run(explain(base, report))
    assert report.wrong == 2
