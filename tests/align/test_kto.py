"""Tests of KTO: mismatched answers, the estimate of the KL divergence, whole runs, and interrupted runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from deskside.align.kto import Kto, LabelledBatch
from deskside.align.labelled_data import LabelledRows, answers_to_others, prepare_labelled
from deskside.align.prepared import FolderSpec
from deskside.align.reference import Reference
from deskside.cli import kto as kto_command
from deskside.cli.main import main
from deskside.config.align import KtoConfig
from deskside.config.run import RunConfig
from deskside.data.chat import chat_template
from deskside.kernels.attention import AttentionContext
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import load_model
from tests.align import tiny
from tests.data import chat_tokenizer

KEYS = ("step", "loss", "grad_norm", "chosen_reward", "rejected_reward", "margin", "kl")


def labelled(count: int) -> list[dict[str, Any]]:
    """Return two answers to each question. The good ones begin with "yes"."""
    rows = []
    for pair in tiny.pairs(count // 2):
        rows.append({"prompt": pair["prompt"], "completion": pair["chosen"], "label": True})
        rows.append({"prompt": pair["prompt"], "completion": pair["rejected"], "label": False})
    return rows


@pytest.fixture(scope="module")
def prepared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labelled")
    chat_template.make_chat_tokenizer(base, folder / "tokenizer", None)
    rows = labelled(120)
    rows[0]["prompt"] = rows[1]["prompt"] = "a longer question " * 4
    source = tiny.jsonl(folder / "p.jsonl", rows)
    prepare_labelled(FolderSpec("labelled", (str(source),)), folder / "tokenizer", folder / "data")
    return folder / "data"


def train(folder: Path, base: Path, name: str, *more: str) -> Path:
    data = tiny.jsonl(folder / "labelled.jsonl", labelled(240))
    argv = tiny.command_line(base, data, folder, name)
    argv += ["--batch.sequence_length", "160", "--batch.tokens", "1280", "--optim.lr", "3e-3"]
    assert kto_command.run([*argv, *more]) == 0
    return folder / name


def test_every_answer_follows_one_other_question() -> None:
    questions = [b"a", b"b", b"a", b"c", b"c", b"a", b"d", b"e", b"b"]
    other = answers_to_others(questions, "train")
    assert sorted(other) == list(range(9))
    assert all(questions[i] != questions[j] for i, j in enumerate(other))
    assert len(answers_to_others([b"a", b"b"], "train")) == 2


def test_most_answers_may_be_to_one_question_but_not_all() -> None:
    questions = [b"a", b"a", b"b", b"a", b"c", b"a", b"a"]
    other = answers_to_others(questions, "train")
    assert all(questions[i] != questions[j] for i, j in enumerate(other))
    assert set(other[[0, 1, 3, 5, 6]].tolist()) == {2, 4}  # both labels are used
    with pytest.raises(UsageError, match="all 3 answers of the val split"):
        answers_to_others([b"a"] * 3, "val")


def test_a_small_data_set_holds_out_two_questions(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    rows = [{"prompt": f"q{n}", "completion": "yes", "label": True} for n in range(6)]
    spec = FolderSpec("labelled", (str(tiny.jsonl(tmp_path / "a.jsonl", rows)),), val_fraction=1e-9)
    splits = prepare_labelled(spec, tokenizer, tmp_path / "out")["splits"]
    assert (splits["train"]["count"], splits["val"]["count"]) == (4, 2)


@pytest.mark.parametrize("length", [200, 60])
def test_texts_are_questions_with_their_own_and_with_other_answers(length: int, prepared: Path) -> None:
    rows = LabelledRows(prepared, "train", length, 320)
    tokenizer = chat_template.bpe.load(prepared)
    units = np.concatenate(rows.rows)
    assert len(set(units.tolist())) == len(units) == rows.index["splits"]["train"]["count"] - rows.left_out
    assert (rows.left_out > 0) == (length == 60)
    for record in units.tolist():
        own, other = rows.text(2 * record), rows.text(2 * record + 1)
        said = tokenizer.decode(own.tokens[own.answer_start : -1].tolist())
        assert said.startswith("yes" if rows.desirable[record] else "no")
        assert (own.tokens[: own.answer_start] == other.tokens[: other.answer_start]).all()
        assert other.num_targets >= 1 and other.num_inputs <= length
        answered = rows.text(2 * int(rows._other[record]))
        whole = answered.tokens[answered.answer_start :]
        assert (other.tokens[other.answer_start :] == whole[: other.num_targets]).all()
        assert other.num_targets == len(whole) or other.num_inputs == length
    packed = rows.other_texts(rows.rows)
    assert sorted(i for row in packed for i in row) == sorted(2 * units + 1)
    assert all(sum(rows.text(i).num_inputs for i in row) <= length for row in packed)


def test_a_step_is_that_of_transformers_on_each_text_alone(prepared: Path, base: Path) -> None:
    """The loss and its estimate of the KL divergence are the same in passes of one row and of two rows."""
    config = RunConfig.model_validate(
        {"align": {"name": "kto"}, "data": {"document_mask": True}, "model": {"vocab_size": 320}}
    )
    objective = Kto(KtoConfig(beta=0.3, undesirable_weight=1.5))
    rows = objective.open(config, prepared, "train", 200)
    reference = np.random.default_rng(0).normal(-6.2, 0.5, int(rows.scored_start[-1])).astype(np.float32)
    objective.reference = Reference({"train": rows})
    objective.reference.values = {"train": reference}
    model = load_model(str(base)).model
    session: Any = SimpleNamespace(
        model=model,
        config=config,
        attention=SimpleNamespace(at=lambda *_: ("reference", "reference")),
        world=SimpleNamespace(device=torch.device("cpu"), all_reduce_sum=lambda value: value),
        micro_rows=2,
    )
    objective.session = session
    units = rows.rows[:3]

    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)

    def log_ratio(index: int) -> torch.Tensor:
        text = rows.text(index)
        ids = torch.from_numpy(text.tokens)[None]
        logprobs = theirs(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        ref = reference[rows.scored_start[index] : rows.scored_start[index + 1]].sum()
        return logprobs[text.answer_start - 1 :].sum() - float(ref)

    records = [int(r) for row in units for r in row]
    kl = torch.stack([log_ratio(2 * r + 1) for r in records]).mean().detach().clamp(min=0)
    assert kl > 0
    total = torch.zeros(())
    for r in records:
        margin = log_ratio(2 * r) - kl if rows.desirable[r] else kl - log_ratio(2 * r)
        total = total + (1.0 if rows.desirable[r] else 1.5) * (1 - torch.sigmoid(0.3 * margin))
    found_kl = objective._kl(units, rows, len(records))
    torch.testing.assert_close(found_kl, kl, rtol=1e-5, atol=1e-4)
    found = torch.zeros(())
    for part in (units[:1], units[1:]):
        batch = objective._batch(rows, part, found_kl, len(records), torch.device("cpu"))
        assert isinstance(batch, LabelledBatch)
        context = AttentionContext(cu_seqlens=batch.cu_seqlens, max_seqlen=200)
        found = found + objective.loss(model, batch, context, config.compute).sum
    torch.testing.assert_close(found, total, rtol=1e-5, atol=1e-4)


def test_a_run_learns_what_is_desirable(base: Path, tmp_path: Path) -> None:
    run = train(tmp_path, base, "whole", "--schedule.steps", "25")
    summary, rows = json.loads((run / "summary.json").read_text()), tiny.metrics(run)
    assert summary["before"]["val_loss"] == pytest.approx(0.5)
    assert rows[0]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-5) and rows[0]["margin"] == pytest.approx(0, abs=1e-6)
    assert summary["val_margin"] > 0.5 and summary["val_loss"] < 0.45
    assert summary["val_chosen_reward"] > summary["val_rejected_reward"]
    assert any(row["kl"] > 0 for row in rows)


@pytest.mark.full
def test_the_step_does_not_depend_on_the_micro_batch(base: Path, tmp_path: Path) -> None:
    more = ("--schedule.steps", "3")
    whole = train(tmp_path, base, "whole", *more, "--batch.micro_tokens", "1280")
    parts = train(tmp_path, base, "parts", *more, "--batch.micro_tokens", "160")
    for one, other in zip(tiny.metrics(whole), tiny.metrics(parts), strict=True):
        assert [one[key] for key in KEYS] == pytest.approx([other[key] for key in KEYS], rel=2e-3, abs=2e-4)


@pytest.mark.full
def test_killed_and_resumed_is_the_same_run(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = train(tmp_path, base, "straight", "--schedule.steps", "8")
    for step in (6, 0):
        with monkeypatch.context() as patch:
            tiny.kill_at(patch, step)
            with pytest.raises(tiny.Killed):
                train(tmp_path, base, f"killed-{step}", "--schedule.steps", "8")
        assert kto_command.run(["--resume", str(tmp_path / f"killed-{step}")]) == 0
        tiny.same(tmp_path / f"killed-{step}", straight, KEYS)
    (file,) = (tmp_path / "straight-data" / "reference").iterdir()
    file.unlink()
    (straight / "summary.json").unlink()
    with pytest.raises(RunError, match="are missing"):
        kto_command.run(["--resume", str(straight)])


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"prompt": "a", "completion": "b"}, "without the field"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "neither true nor false"),
        ({"prompt": "a", "completion": "b", "label": None}, "neither true nor false"),
        (
            {"prompt": "a", "completion": [{"role": "user", "content": "b"}], "label": True},
            "not the assistant's",
        ),
    ],
)
def test_an_unusable_record_is_counted(record: dict[str, Any], why: str, base: Path, tmp_path: Path) -> None:
    chat_template.make_chat_tokenizer(base, tmp_path / "tokenizer", None)
    source = tiny.jsonl(tmp_path / "p.jsonl", [*labelled(120), record, {**labelled(2)[0], "label": 1}])
    index = prepare_labelled(
        FolderSpec("labelled", (str(source),)), tmp_path / "tokenizer", tmp_path / "data"
    )
    ((reason, left),) = index["left_out"].items()
    assert why in f"{reason}: {left['first'][0]}" and left["count"] == 1
    splits = index["splits"].values()
    assert sum(split["count"] for split in splits) == 121
    assert sum(split["desirable"] for split in splits) == 61


def test_pairs_are_no_labelled_answers(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tiny.jsonl(tmp_path / "pairs.jsonl", tiny.pairs(40))
    assert main(["kto", *tiny.command_line(base, pairs, tmp_path, "wrong")]) == 2
    assert "no usable answers for the train split" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()
