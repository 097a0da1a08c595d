"""The parity benchmark run as a command on a CPU: complete runs, the report, and the command line."""

import itertools
import json
import re
import statistics
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import parity, parity_jobs, parity_plots, parity_results, parity_run
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.index import read_index
from deskside.utils.errors import UsageError

BUNDLED = "bundled:tiny_shakespeare.txt"
SMALL = "--preset demo --gpus cpu --model.num_hidden_layers 3 --batch.tokens 512"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "play"
    prepare([BUNDLED], path, CorpusOptions(vocab_size=1024, val_fraction=0.01, seed=1))
    return path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.full
def test_run_and_report(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs two arms and inserts their report into a document."""
    out, arms = tmp_path / "out", "fp32,nvfp4:keep_last=0.2"
    words = f"run --data {data} --out {out} --tokens 6144 --arms {arms} {SMALL}".split()
    code = parity.main(words)
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "parity.jsonl").read_text().splitlines()]
    assert code == 0 and [row["status"] for row in rows] == ["finished", "finished"], printed
    first, second = rows
    assert (first["tokens"], first["steps"], len(first["curve"])) == (6144, 12, 12)
    assert first["native"] is None and second["native"] is False
    assert second["kept"] == [1, 1] and second["layers"] == 3
    assert first["val_tokens"] == pytest.approx(read_index(data).splits["val"].tokens, rel=0.01)
    assert first["val_bpb"] != second["val_bpb"], "the arm's precision did not reach its run"
    assert first["curve"][-1] == [6144, first["val_bpb"]]
    with zipfile.ZipFile(out / "metrics.zip") as archive:
        metrics = [json.loads(line) for line in archive.read("fp32-seed1.jsonl").splitlines()]
        assert "nvfp4-keep_last=0.2-seed1.log" in archive.namelist()
    assert first["train_loss_end"] == metrics[-1]["loss"]  # a tenth of 12 steps is one step
    assert not list(out.glob("*seed*")), "run directories must not stay"

    document = tmp_path / "page.md"
    document.write_text(f"before\n{parity.BEGIN}\nold\n{parity.END}\nafter\n")
    words = f"report {out} --reference fp32 --plots {tmp_path / 'plots'} --document {document}".split()
    assert parity.main(words) == 0
    page = document.read_text()
    gap = 100 * (second["val_bpb"] / first["val_bpb"] - 1)
    assert f"| {gap:+.2f} % |" in page and f"{first['val_loss']:.4f}" in page
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    assert "](plots/parity_bpb.png)" in page and "](plots/parity_gap.png)" in page
    for name in ("parity_bpb.png", "parity_gap.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_a_failing_arm_is_a_row(data: Path, tmp_path: Path) -> None:
    """The other arms continue, and the row shows the run's own error."""
    job = parity_jobs.jobs("demo", "fp32", [1], "512", data, [])[0]
    broken = [
        replace(job, arm=arm, words=["124m", "--schedule.steps", "2", "--data.path", str(tmp_path / arm)])
        for arm in ("a", "b")
    ]
    rows = parity_run.run_jobs(broken, [""], tmp_path / "out", tmp_path / "runs", None)
    assert [(row["arm"], row["status"]) for row in rows] == [("a", "failed"), ("b", "failed")]
    assert rows[1]["error"].startswith("deskside: ") and str(tmp_path / "b") in rows[1]["error"]
    assert (tmp_path / "runs" / "b-seed1.log").is_file()
    arms = parity_results.averages(rows, "bf16")
    assert rows[1]["error"] in parity_results.notes(rows, arms, "bf16")
    with pytest.raises(UsageError, match=r"parity\.jsonl exists"):
        parity_run.run_jobs(broken, [""], tmp_path / "out", None, None)


@pytest.mark.full
def test_limit(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that cannot end in time is stopped and recorded, and runs that were not started are counted."""
    out = tmp_path / "out"
    words = f"run --data {data} --out {out} --tokens 500M --arms fp32,bf16 --limit-seconds 14 {SMALL}".split()
    assert parity.main(words) == 1
    (row,) = [json.loads(line) for line in (out / "parity.jsonl").read_text().splitlines()]
    assert row["status"] == "stopped" and row["seconds"] < 15
    assert "1 of 2 arms were not started" in capsys.readouterr().out


def _row(arm: str, seed: int, bpb: list[float], **other: Any) -> dict[str, Any]:
    curve = [[1000 * (n + 1), value] for n, value in enumerate(bpb)]
    return {
        "arm": arm, "seed": seed, "label": f"{arm}-seed{seed}", "status": "finished", "error": "", "native": None,
        "layers": 12, "kept": [0, 0], "val_bpb": bpb[-1], "val_loss": 3 * bpb[-1], "val_tokens": 10,
        "train_loss_end": 2 * bpb[-1], "tokens": 1000 * len(bpb), "steps": 5, "skipped_steps": 0,
        "tokens_per_second": 100.0, "peak_memory_gib": 1.0, "curve": curve, "machine": {"device": "X", "torch": "2"},
        "setting": {"preset": "p", "steps": 5, "tokens_per_step": 600.0, "train_tokens": 1000,
                    "sequence_length": 8, "optimizer": "muon",
                    "keys": {}, "data": "abc"},
        **other,
    }  # fmt: skip


def _write(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "parity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_gaps_are_between_equal_seeds_and_calls_are_merged(tmp_path: Path) -> None:
    a = _write(
        tmp_path / "a",
        _row("bf16", 1, [2.0, 1.0]),
        _row("fp8", 1, [2.02, 1.001]),
        _row("nvfp4", 1, [9.0], status="failed", error="broke"),
    )
    b = _write(
        tmp_path / "b", _row("bf16", 2, [2.2, 1.1]), _row("fp8", 2, [2.2, 1.1033]), _row("fp8", 3, [3.0, 2.0])
    )
    c = _write(tmp_path / "c", _row("nvfp4", 1, [2.0, 1.01]))
    rows = parity_results.read([a, b, c])
    bf16, fp8, nvfp4 = parity_results.averages(rows, "bf16")
    assert fp8.gaps == pytest.approx([0.1, 0.3])  # seed 3 has no counterpart
    assert fp8.gap_curve == [(1000, pytest.approx(0.5)), (2000, pytest.approx(0.2))]
    assert bf16.spread == pytest.approx(100 * 0.1 / 1.05)
    assert nvfp4.gaps == pytest.approx([1.0])  # the later of the finished runs
    text = parity_results.table([bf16, fp8, nvfp4])
    assert "+0.20 % (+0.10 to +0.30)" in text
    assert f"{statistics.fmean([1.001, 1.1033, 2.0]):.4f} (1.0010 to 2.0000)" in text
    assert "9.52 % apart" in parity_results.notes(rows, [bf16, fp8, nvfp4], "bf16")


def test_runs_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    other = _row("fp8", 1, [2.0])
    other["setting"] = {**other["setting"], "steps": 6}
    folder = _write(tmp_path / "a", _row("bf16", 1, [2.0]), other)
    with pytest.raises(UsageError, match="fp8-seed1: has steps 6, bf16-seed1 has 5"):
        parity_results.read([folder])


def test_jobs_pin_seeds_and_share_everything_else(data: Path) -> None:
    jobs = parity_jobs.jobs("demo", "bf16,nvfp4:head=fp8,bf16@3", [1, 2], "100k", data, [])
    assert [(j.arm, j.seed) for j in jobs] == [
        ("bf16", 1), ("nvfp4:head=fp8", 1), ("bf16", 3), ("bf16", 2), ("nvfp4:head=fp8", 2),
    ]  # fmt: skip
    assert all(job.setting == jobs[0].setting for job in jobs)
    assert jobs[1].config.precision.head == "fp8" and jobs[0].config.precision.head == "bf16"
    assert jobs[0].setting["steps"] == 49  # evaluated on 2048 tokens


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--arms bf17", "precision.name"),
        ("--arms bf16:head", "must be key=value"),
        ("--arms bf16,bf16", "more than once"),
        ("--tokens many", "--tokens many"),
        ("--model.depth 3", "model.depth"),
        ("--schedule.steps 3", "sets it itself"),
        ("--seeds x", "not a whole number"),
        ("--data nowhere", "not a prepared data set"),
        ("loose", "unexpected argument loose"),
    ],
)
def test_wrong_usage(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    given = f"run --preset demo --gpus cpu --data {data} --out {tmp_path / 'o'} {words}".split()
    assert parity.main(given) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("visible", "asked", "slots"),
    [
        (None, "1", ["1"]),
        (None, "all", ["0", "1"]),
        ("5,3", "all", ["5", "3"]),
        ("5,3", "1", ["3"]),
        ("5, GPU-ab", "1,0", ["GPU-ab", "5"]),
        ("3", "0", ["3"]),
        ("3", "1", "--gpus 1: there are GPUs 0 to 0 with CUDA_VISIBLE_DEVICES=3; name each once"),
        (None, "0,0", "--gpus 0,0: there are GPUs 0 to 1; name each once"),
        (
            "",
            "all",
            "--gpus: there is no usable GPU with CUDA_VISIBLE_DEVICES=; train on the processor with ",
        ),
    ],
)
def test_gpus_are_counted_among_the_visible_ones(
    visible: str | None, asked: str, slots: list[str] | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two jobs that a scheduler gave one GPU each would use the same one."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    count = 2 if visible is None else len(visible.split(",")) if visible else 0
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if isinstance(slots, list):
        assert parity_jobs.slots(asked) == slots
    else:
        with pytest.raises(UsageError, match=re.escape(slots)):
            parity_jobs.slots(asked)


def test_labels_keep_apart() -> None:
    heights = parity_plots.apart([0.2, 0.21, 0.5, 0.98, 0.99, 0.995], 0.05)
    assert all(b - a >= 0.05 - 1e-12 for a, b in itertools.pairwise(heights))
    assert heights[0] == 0.2 and heights[2] == 0.5 and heights[-1] == 1.0
