"""A model with some thousand parameters on disk, questions that it can learn
to answer, and runs that are interrupted.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from deskside.cli.eval import run as run_eval
from deskside.config.model import ModelConfig
from deskside.data import tokenizer as bpe
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.train.loop.step import Stepper
from deskside.train.state.checkpointer import Checkpointer
from deskside.weights.hf import save_hf

RUN = ("--compute.device", "cpu", "--precision.name", "fp32", "--checkpoint.every", "2 steps")
TEXT = ("digits 0123456789 and letters, user assistant yes no please",) * 4


def command_line(model: Path, data: Path, folder: Path, name: str) -> list[str]:
    """Return the arguments of sft, dpo or grpo for a short run with this name in
    a folder. The caller adds the rest.
    """
    paths = ["--data", str(data), "--data.path", str(folder / f"{name}-data"), "--runs", str(folder)]
    return [str(model), *paths, "--name", name, *RUN]


class Killed(BaseException):
    """Simulates a kill: nothing is saved after it."""


def model(folder: Path, seed: int = 0, text: Iterable[str] = TEXT, tokens: int = 260) -> Path:
    """Write a Hugging Face directory with fresh weights and a byte-level tokenizer of this size trained on `text`."""
    folder.mkdir(parents=True)
    tokenizer = folder.parent / f"{folder.name}-tokenizer"
    tokenizer.mkdir()
    bpe.save(bpe.train(text, tokens), tokenizer)
    config = ModelConfig(
        vocab_size=-(-tokens // 64) * 64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    made = Transformer(config)
    initialize(made, seed)
    return save_hf(made, config, tokenizer, folder)


def jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions() -> list[dict[str, str]]:
    """Return 480 questions. Each consists of a few letters and a digit, which is the answer."""
    made = [(d, a + b) for d in "0123456789" for a in "abcdefgh" for b in "abcdef"]
    random.Random(0).shuffle(made)
    return [{"prompt": f"{letters} {digit}", "answer": digit} for digit, letters in made]


def mostly_wrong(right: float = 0.08) -> list[dict[str, Any]]:
    """Return conversations that usually answer with the digit after the one in
    the question, and rarely with that digit.
    """
    chance = random.Random(1)
    rows = []
    for question in questions() * 3:
        digit = int(question["answer"])
        said = digit if chance.random() < right else (digit + 1) % 10
        turns = [{"role": "user", "content": question["prompt"]}, {"role": "assistant", "content": str(said)}]
        rows.append({"messages": turns})
    return rows


def pairs(count: int, seed: int = 1) -> list[dict[str, str]]:
    """Return pairs whose chosen answer begins with "yes" and whose rejected answer begins with "no"."""
    chance = random.Random(seed)
    return [
        {
            "prompt": f"is {chance.randrange(1000)} it",
            "chosen": f"yes {chance.randrange(100)}",
            "rejected": f"no {chance.randrange(100)}",
        }
        for _ in range(count)
    ]


def evaluated(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the JSON output of the README's `deskside eval RUN --tasks ... --tasks-dir DIR --chat`."""
    jsonl(folder / "svamp.jsonl", ({"prompt": f"{n} and 1", "answer": n} for n in range(4)))
    arguments = ["--tasks", "svamp", "--tasks-dir", str(folder), "--shots", "0", "--chat", "--json"]
    capsys.readouterr()
    assert run_eval([str(run), *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def kill_at(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """Make this process's next run end at this step as if it was killed; step 0 means before its first checkpoint."""
    if last == 0:

        def killed(*_: Any) -> None:
            raise Killed

        monkeypatch.setattr(Checkpointer, "save", killed)
        return
    run = Stepper.run

    def until(self: Stepper, batches: Any, step: int, dry: bool = False) -> Any:
        if step == last and not dry:
            raise Killed
        return run(self, batches, step, dry)

    monkeypatch.setattr(Stepper, "run", until)


def same(one: Path, other: Path, keys: tuple[str, ...]) -> None:
    """Assert that two runs are bitwise equal."""
    first, second = ([{k: row.get(k) for k in keys} for row in metrics(run)] for run in (one, other))
    assert first == second
    weights = "model/model.safetensors"
    assert (one / weights).read_bytes() == (other / weights).read_bytes()
