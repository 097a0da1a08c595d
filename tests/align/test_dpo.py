"""Tests of DPO: pairs packed into rows against transformers on each text alone, whole runs, and interrupted runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from deskside.align.dpo import Dpo
from deskside.align.preference_data import PairRows, prepare_pairs
from deskside.align.prepared import FolderSpec
from deskside.align.reference import Reference
from deskside.cli import dpo as dpo_command
from deskside.cli.eval import run as run_eval
from deskside.config.align import DpoConfig
from deskside.config.run import RunConfig
from deskside.data.chat import chat_template
from deskside.kernels.attention import AttentionContext
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import load_model
from tests.align import tiny

KEYS = ("step", "loss", "grad_norm", "accuracy", "margin", "kl")


@pytest.fixture(scope="module")
def prepared(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    chat_template.make_chat_tokenizer(base, folder / "tokenizer", None)
    rows = tiny.pairs(120)
    rows.append({**rows[0], "prompt": "a longer question " * 4})
    prepare_pairs(
        FolderSpec("preference", (str(tiny.jsonl(folder / "p.jsonl", rows)),)),
        folder / "tokenizer",
        folder / "data",
    )
    return folder / "data"


def train(folder: Path, base: Path, name: str, *more: str) -> Path:
    data = folder / "pairs.jsonl"
    if not data.exists():
        tiny.jsonl(data, tiny.pairs(200))
    argv = tiny.command_line(base, data, folder, name)
    argv += ["--batch.sequence_length", "160", "--batch.tokens", "1280"]
    dpo_command.run([*argv, "--optim.lr", "3e-3", *more])
    return folder / name


def test_pairs_stay_together_and_are_all_there(prepared: Path) -> None:
    rows = PairRows(prepared, "train", 200, 320)
    assert sorted(int(p) for row in rows.rows for p in row) == list(
        range(rows.index["splits"]["train"]["count"])
    )
    for indices in rows.reference_texts(rows.rows):
        texts = [rows.text(index) for index in indices]
        assert sum(text.num_inputs for text in texts) <= 200
        for chosen, rejected in zip(texts[0::2], texts[1::2], strict=True):
            assert chosen.answer_start == rejected.answer_start
            assert (chosen.tokens[: chosen.answer_start] == rejected.tokens[: rejected.answer_start]).all()
    assert max(len(row) for row in rows.rows) > 1


def test_the_answers_are_what_chatting_would_say(prepared: Path, base: Path) -> None:
    rows = PairRows(prepared, "train", 200, 320)
    tokenizer = chat_template.bpe.load(prepared)
    turn_end = tokenizer.token_to_id("<|im_end|>")
    for number in range(6):
        text = rows.text(number)
        said = tokenizer.decode(text.tokens[text.answer_start : -1].tolist())
        assert said.startswith("no" if number % 2 else "yes")
        assert text.tokens[-1] == turn_end
        assert tokenizer.decode(
            text.tokens[: text.answer_start].tolist(), skip_special_tokens=False
        ).endswith("assistant\n")


def test_pairs_that_do_not_fit_are_left_out_and_counted(prepared: Path) -> None:
    whole, short = PairRows(prepared, "train", 250, 320), PairRows(prepared, "train", 110, 320)
    assert whole.left_out == 0
    assert short.left_out > 0
    assert sum(map(len, short.rows)) + short.left_out == sum(map(len, whole.rows))
    with pytest.raises(UsageError, match="no pair of the train split fits into 20 tokens"):
        PairRows(prepared, "train", 20, 320)


def test_the_order_is_a_permutation_in_every_epoch(prepared: Path) -> None:
    rows = PairRows(prepared, "train", 200, 320)
    n = rows.num_rows
    for epoch in (0, 1):
        found = rows.rows_at(7, np.arange(epoch * n, (epoch + 1) * n))
        assert sorted(int(p) for row in found for p in row) == sorted(
            int(p) for row in rows.rows for p in row
        )
    one, other = (rows.rows_at(seed, np.arange(n)) for seed in (7, 8))
    assert [r.tolist() for r in one] != [r.tolist() for r in other]


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "sigmoid_norm"])
def test_loss_in_rows_is_that_of_transformers_on_each_text_alone(
    loss: Any, prepared: Path, base: Path
) -> None:
    config = RunConfig.model_validate(
        {"align": {"name": "dpo"}, "data": {"document_mask": True}, "model": {"vocab_size": 320}}
    )
    objective = Dpo(DpoConfig(loss=loss, beta=0.3))
    rows = objective.open(config, prepared, "train", 200)
    generator = np.random.default_rng(0)
    reference = generator.normal(-3, 0.5, int(rows.scored_start[-1])).astype(np.float32)
    objective.reference = Reference({"train": rows})
    objective.reference.values = {"train": reference}
    pairs = rows.rows[:3]
    batch = objective._batch_of(rows, pairs, (1, 1), torch.device("cpu"))
    model = load_model(str(base)).model
    context = AttentionContext(cu_seqlens=batch.cu_seqlens, max_seqlen=200)
    found = objective.loss(model, batch, context, config.compute)

    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    total = torch.zeros(())
    right = 0.0
    for pair in (int(p) for row in pairs for p in row):
        ratios, lengths = [], []
        for number in (2 * pair, 2 * pair + 1):
            text = rows.text(number)
            ids = torch.from_numpy(text.tokens)[None]
            logprobs = theirs(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            first, last = int(rows.scored_start[number]), int(rows.scored_start[number + 1])
            ratios.append(logprobs[text.answer_start - 1 :].sum() - float(reference[first:last].sum()))
            lengths.append(text.num_targets)
            assert text.num_targets == last - first
        right += float(ratios[0] > ratios[1])
        if loss != "sigmoid":
            ratios = [ratio / length for ratio, length in zip(ratios, lengths, strict=True)]
        h = ratios[0] - ratios[1]
        total = total + ((h - 1 / 0.6) ** 2 if loss == "ipo" else -F.logsigmoid(0.3 * h))
    torch.testing.assert_close(found.sum, total, rtol=1e-5, atol=1e-4)
    assert float(found.metric_sums["accuracy"]) == right


def test_a_run_learns_what_is_preferred(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, base, "whole", "--schedule.steps", "25")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["before"]["val_accuracy"] == 0.5
    assert summary["before"]["val_margin"] == 0
    assert summary["val_accuracy"] > 0.95
    assert summary["val_margin"] > 0.5
    assert summary["val_kl"] > 0
    first, last = tiny.metrics(run)[0], tiny.metrics(run)[-1]
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert first["kl"] == pytest.approx(0, abs=1e-7)
    assert last["loss"] < 0.4
    assert "val_bpb" not in first
    assert [s["before"] for s in summary["samples"]]
    # The run's data are pairs, so no command measures bits per byte on them.
    found = tiny.evaluated(run, tmp_path, capsys)
    assert found["bpb"] is None and found["tasks"]["svamp"]["n"] == 4
    for options in ([], ["--data", str(tmp_path / "whole-data")]):
        with pytest.raises(UsageError, match="preference pairs"):
            run_eval([str(run), *options])


@pytest.mark.parametrize("step", [6, pytest.param(0, marks=pytest.mark.full)])
def test_killed_and_resumed_is_the_same_run(
    step: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed in the middle, or before its first checkpoint."""
    straight = train(tmp_path, base, "straight", "--schedule.steps", "8")
    with monkeypatch.context() as patch:
        tiny.kill_at(patch, step)
        with pytest.raises(tiny.Killed):
            train(tmp_path, base, "killed", "--schedule.steps", "8")
    assert dpo_command.run(["--resume", str(tmp_path / "killed")]) == 0
    tiny.same(tmp_path / "killed", straight, KEYS)


@pytest.mark.parametrize(
    "loss", ["orpo", *(pytest.param(loss, marks=pytest.mark.full) for loss in ("simpo", "cpo"))]
)
def test_without_a_reference_nothing_is_computed_before_the_first_step(
    loss: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run learns, and a killed and resumed run equals one that was not interrupted."""
    more = ("--schedule.steps", "12", "--align.loss", loss)
    straight = train(tmp_path, base, "straight", *more)
    with monkeypatch.context() as patch:
        tiny.kill_at(patch, 6)
        with pytest.raises(tiny.Killed):
            train(tmp_path, base, "killed", *more)
    assert dpo_command.run(["--resume", str(tmp_path / "killed")]) == 0
    tiny.same(tmp_path / "killed", straight, (*(k for k in KEYS if k != "kl"), "nll"))
    assert not (tmp_path / "straight-data" / "reference").exists()
    assert not (straight / "reference.json").exists()
    rows, summary = tiny.metrics(straight), json.loads((straight / "summary.json").read_text())
    assert all("kl" not in row and ("nll" in row) == (loss != "simpo") for row in rows)
    assert "val_kl" not in summary and ("val_nll" in summary) == (loss != "simpo")
    assert summary["val_accuracy"] > 0.9 and summary["val_loss"] < summary["before"]["val_loss"]


def test_the_reference_is_computed_once_for_the_same_weights(base: Path, tmp_path: Path) -> None:
    first = train(tmp_path, base, "first", "--schedule.steps", "2")
    shared = ("--data.path", str(tmp_path / "first-data"), "--schedule.steps", "2")
    argv = [
        str(base),
        "--data",
        str(tmp_path / "pairs.jsonl"),
        "--runs",
        str(tmp_path),
        "--name",
        "second",
        *tiny.RUN,
    ]
    dpo_command.run(
        [*argv, "--batch.sequence_length", "160", "--batch.tokens", "1280", "--align.beta", "0.5", *shared]
    )
    assert "of an earlier run" in (tmp_path / "second" / "events.log").read_text()
    assert "of an earlier run" not in (first / "events.log").read_text()
    assert len(list((tmp_path / "first-data" / "reference").iterdir())) == 1


def test_the_reference_of_the_same_weights_in_another_architecture_is_another_one(
    base: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(base, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    train(tmp_path, base, "first", "--schedule.steps", "1")
    second = train(
        tmp_path, other, "second", "--schedule.steps", "1", "--data.path", str(tmp_path / "first-data")
    )
    assert len(list((tmp_path / "first-data" / "reference").iterdir())) == 2
    assert json.loads((second / "summary.json").read_text())["before"]["val_kl"] == 0


def test_a_missing_reference_is_no_new_reference(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        tiny.kill_at(patch, 3)
        with pytest.raises(tiny.Killed):
            train(tmp_path, base, "killed", "--schedule.steps", "4")
    for file in (tmp_path / "killed-data" / "reference").iterdir():
        file.unlink()
    with pytest.raises(RunError, match="are missing"):
        dpo_command.run(["--resume", str(tmp_path / "killed")])


def test_adapters_begin_as_their_base(base: Path, tmp_path: Path) -> None:
    run = train(tmp_path, base, "lora", "--schedule.steps", "12", "--adapter.rank", "4", "--optim.lr", "1e-2")
    assert tiny.metrics(run)[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert json.loads((run / "summary.json").read_text())["val_accuracy"] > 0.9


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a", "chosen": "b"}, "wanted prompt, chosen, rejected"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "both answers are the same"),
        ({"prompt": [{"role": "user"}], "chosen": "b", "rejected": "c"}, "has no text"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "not a list of messages"),
        ({"prompt": "a", "chosen": 5, "rejected": "c"}, "not a list of messages"),
        (
            {"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"},
            "not the assistant's",
        ),
    ],
)
def test_what_is_no_pair_is_left_out_by_reason(
    row: dict[str, Any], why: str, base: Path, tmp_path: Path
) -> None:
    chat_template.make_chat_tokenizer(base, tmp_path / "tokenizer", None)
    file = tiny.jsonl(tmp_path / "p.jsonl", [*tiny.pairs(20), row])
    index = prepare_pairs(FolderSpec("preference", (str(file),)), tmp_path / "tokenizer", tmp_path / "data")
    (left,) = index["left_out"].values()
    assert left["count"] == 1
    assert "p.jsonl:21" in left["first"][0]
    assert why in left["first"][0]


def test_answers_may_be_messages(base: Path, tmp_path: Path) -> None:
    chat_template.make_chat_tokenizer(base, tmp_path / "tokenizer", None)
    plain = tiny.pairs(20)
    spelt = [
        {
            "prompt": [{"role": "user", "content": p["prompt"]}],
            "chosen": [
                {"role": "user", "content": p["prompt"]},
                {"role": "assistant", "content": p["chosen"]},
            ],
            "rejected": [{"role": "assistant", "content": p["rejected"]}],
        }
        for p in plain
    ]
    found = []
    for name, rows in (("plain", plain), ("spelt", spelt)):
        file = tiny.jsonl(tmp_path / f"{name}.jsonl", rows)
        prepare_pairs(FolderSpec("preference", (str(file),)), tmp_path / "tokenizer", tmp_path / name)
        found.append((tmp_path / name / "train.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "MODEL is missing"),
        (["BASE"], "--data is required"),
        (["BASE", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["BASE", "--data", "PAIRS", "--align.loss", "ipo", "--align.label_smoothing", "0.1"],
            "label_smoothing: has no effect with loss ipo",
        ),
        (["BASE", "--data", "PAIRS", "--align.beta", "0"], "align.beta"),
        (["BASE", "--data", "PAIRS", "--align.loss", "kto"], "align.loss"),
        (["BASE", "--data", "PAIRS", "--align.loss", "robust"], "give --align.label_smoothing"),
        (["BASE", "--data", "PAIRS", "--align.loss", "cpo", "--align.gamma", "1"], "use --align.loss simpo"),
        (["BASE", "--data", "PAIRS", "--compute.z_loss", "1e-4", "--schedule.steps", "1"], "z_loss"),
        (["BASE", "--data", "PAIRS", "--data.prefetch", "4"], "data.prefetch: has no effect here"),
        (["BASE", "--data", "PAIRS", "--data.weights", "{a = 1.0}"], "data.weights: has no effect here"),
        (["BASE", "--data", "PAIRS", "--data.val_fraction", "0.1"], "use --align.val_fraction"),
        (["BASE", "--data", "PAIRS", "--data.path", "PREPARED"], "holds other pairs"),
        (["--resume", "runs/x", "--data", "PAIRS"], "give no other options"),
        (["--resume", "runs/x", "--config", "dpo.toml"], "give no other options"),
    ],
)
def test_wrong_usage_is_one_line(
    argv: list[str],
    error: str,
    base: Path,
    prepared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = tiny.jsonl(tmp_path / "pairs.jsonl", tiny.pairs(40))
    argv = [{"BASE": str(base), "PAIRS": str(pairs), "PREPARED": str(prepared)}.get(a, a) for a in argv]
    with pytest.raises(UsageError, match=error) as found:
        dpo_command.run([*argv, "--compute.device", "cpu"] if "--resume" not in argv else argv)
    assert "\n" not in str(found.value)
