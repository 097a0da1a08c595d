"""The complete step benchmark on a CPU, run as a command, and its command line."""

import json
from pathlib import Path

import pytest

from benchmarks import step, step_table
from benchmarks.step_config import configuration
from deskside.budget.shape import num_params
from deskside.config.model import ModelConfig
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.utils.errors import UsageError

SMALL = "--preset demo --tokens 512 --steps 3 --warmup 1 --device cpu --model.num_hidden_layers 2"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.full
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs two arms: one with all options, and one that this device does not support."""
    file = tmp_path / "step.json"
    words = f"{SMALL} --precision fp32 --profile --hot-seconds 0.1 --json {file}".split()
    assert step.main(words) == 0
    (result,) = json.loads(file.read_text())["results"]
    value = result["value"]
    assert (value["preset"], value["tokens"], value["params"]) == ("demo", 512, num_params(_small()))
    for phase in ("short", "hot"):
        numbers = value["phases"][phase]
        assert numbers["steps"] >= 3
        assert 0 < numbers["step_ms"]["p10"] <= numbers["step_ms"]["median"] <= numbers["step_ms"]["p90"]
        median = numbers["step_ms"]["median"] / 1e3
        assert numbers["tokens_per_second"] == pytest.approx(512 / median)
        flops = numbers["tokens_per_second"] * value["flops_per_token"]
        assert numbers["mfu"] == pytest.approx(flops / (1e12 * value["matmul_peak_tflops"]))
    marks = list(value["cold_start"].values())
    assert marks == sorted(marks) and marks[0] > 0
    assert value["finite"]
    kinds = value["profile"]["kinds"]
    assert {"gemm", "attention", "elementwise", "loss", "optimizer", "embedding"} <= kinds.keys()
    busy = sum(kind["ms"] for kind in kinds.values())
    assert value["profile"]["busy_ms"] == pytest.approx(busy)
    # A profiled step and one that is not differ threefold on a shared machine.
    assert value["profile"]["step_ms"] > 0 and busy > 0
    known = kinds.get("unclassified", {"ms": 0.0})["ms"]
    assert known < 0.05 * busy
    printed = capsys.readouterr().out
    assert "matrix products" in printed and "floor/ms" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.full
def test_real_tokens_and_muon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(
        "\n\n".join(f"document {i}: " + "the quick brown fox " * (i % 17 + 3) for i in range(400))
    )
    prepare([str(text)], tmp_path / "data", CorpusOptions(vocab_size=300, val_fraction=0.1, seed=1))
    file = tmp_path / "step.json"
    words = f"{SMALL} --precision fp32 --optimizer muon --data {tmp_path / 'data'} --json {file}".split()
    assert step.main(words) == 0
    value = json.loads(file.read_text())["results"][0]["value"]
    assert value["optimizer"] == "muon" and value["optimizer_ms"] > 0
    assert value["data"] == str(tmp_path / "data")


@pytest.mark.full
def test_what_fails_in_a_child_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{SMALL} --precision fp32 --data no-such-folder".split()
    assert step.main(words) == 1
    output = capsys.readouterr()
    assert "no-such-folder: not a prepared data set" in output.out
    assert "Traceback" not in output.out + output.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--preset nothing", "no such preset"),
        ("--precision fp7", "precision.name"),
        ("--precision bf16:head", "key=value"),
        ("--tokens 1000", "not a multiple"),
        ("--model.hidden_siz 3", "hidden_size"),
        ("--model.hidden_size", "needs a value"),
        ("--nonsense 3", "--nonsense"),
        ("--micro-tokens x", "--micro-tokens"),
    ],
)
def test_wrong_usage_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert step.main(["--preset", "demo", *words.split()]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def test_arms_and_keys() -> None:
    assert step.arms("bf16, fp8-delayed:head=fp8:keep_first=0.1") == [
        ("bf16", {"name": "bf16"}),
        ("fp8-delayed:head=fp8:keep_first=0.1", {"name": "fp8-delayed", "head": "fp8", "keep_first": 0.1}),
    ]
    with pytest.raises(UsageError, match="at least one"):
        step.arms(" ,")
    options, config = step.arguments(
        ["--sequence", "4096", "--model.window_pattern", "SSSL", "--model.sliding_window", "512"]
    )
    spec = step.specification(options, {"name": "fp8-delayed", "head": "fp8"}, config)
    built = configuration({**spec, "tokens": 65536})
    assert (built.batch.sequence_length, built.model.max_position_embeddings) == (4096, 4096)
    assert (built.model.window_pattern, built.model.sliding_window) == ("SSSL", 512)
    assert (built.precision.name, built.precision.head) == ("fp8-delayed", "fp8")
    ((_, precision),) = step.arms("bf16:weight_cache=false:compute.cuda_graph=on")
    built = configuration(step.specification(options, precision, config))
    assert (built.precision.weight_cache, built.compute.cuda_graph) == (False, "on")
    assert built.model.window_pattern == "SSSL" and "compute" not in config


def test_table_keeps_to_its_width() -> None:
    failed = {"arm": "fp8-delayed", "status": "failed", "error": "x" * 200, "value": None}
    text = step_table.summary([failed])
    assert all(len(line) <= 80 for line in text.splitlines())


def _small() -> ModelConfig:
    return configuration(
        {"preset": "demo", "precision": "fp32", "config": {"model": {"num_hidden_layers": 2}}}
    ).model
