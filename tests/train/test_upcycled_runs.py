"""`deskside train --init RUN --upcycle`: the first loss is the dense run's. Without a checkpoint, it starts over."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deskside.cli.main import main
from deskside.config.model import ModelConfig
from deskside.config.run import RunConfig
from tests.train import tiny_run

EXPERTS = ["--upcycle", "--model.num_experts", "4", "--model.num_experts_per_tok", "2"]


@pytest.fixture(scope="module")
def dense(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dense")
    return tiny_run.train(root, tiny_run.config(data, schedule={"length": "40 steps"}), "dense").run.path


def start(dense: Path, data: Path, runs: Path, name: str, *options: str) -> Path:
    argv = ["train", "--init", str(dense), "--data.path", str(data), "--steps", "5", "--runs", str(runs)]
    argv += [
        "--name",
        name,
        "--batch.sequence_length",
        "32",
        "--batch.tokens",
        "256",
        "--compute.device",
        "cpu",
    ]
    assert main([*argv, *options]) == 0
    return runs / name


@pytest.mark.parametrize(
    "width", [pytest.param("64", marks=pytest.mark.full), "16"], ids=["whole", "quarters"]
)
def test_first_loss_is_that_of_the_dense_run(width: str, dense: Path, data: Path, tmp_path: Path) -> None:
    experts = EXPERTS
    if width == "16":
        experts = ["--upcycle", "--model.num_experts", "16", "--model.num_experts_per_tok", "8"]
        experts += ["--model.moe_intermediate_size", width]
    went_on = tiny_run.rows(start(dense, data, tmp_path, "dense"))
    mixture = start(dense, data, tmp_path, "mixture", *experts)
    upcycled = tiny_run.rows(mixture)
    assert upcycled[0]["loss"] == pytest.approx(went_on[0]["loss"], rel=1e-5)  # float32: see test_upcycle.py
    assert abs(upcycled[-1]["loss"] - went_on[-1]["loss"]) > 1e-4
    record = json.loads((mixture / "run.json").read_text("utf-8"))
    config = RunConfig.model_validate(record["config"]).model
    assert (config.moe_intermediate_size, record["init"]) == (int(width), str(dense))
    assert (tiny_run.plan(dense)["embedding_std"], tiny_run.plan(mixture).get("embedding_std")) == (
        0.02,
        None,
    )


def test_a_run_that_has_no_checkpoint_starts_over_as_a_mixture(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    run = start(dense, data, tmp_path, "mixture", *EXPERTS)
    before = tiny_run.curve(run)
    (run / "summary.json").unlink()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    (run / "metrics.jsonl").unlink()
    tiny_run.resume(run)
    assert tiny_run.curve(run) == before


def dry(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["train", *argv, "--dry-run", "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out)["config"]["model"])


def test_a_preset_gives_the_experts(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = {key: value for key, value in tiny_run.SHAPE.items() if key != "intermediate_size"}
    model = {**shape, "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    lines = ["[batch]", "sequence_length = 128", "[model]"]
    lines += [f"{key} = {value}" for key, value in model.items()]
    (tmp_path / "mixture.toml").write_text("\n".join(lines))
    shown = dry([str(tmp_path / "mixture.toml"), "--init", str(dense), "--upcycle"], capsys)
    assert model.items() <= shown.items()
    assert shown["router_aux_loss_coef"] == ModelConfig().router_aux_loss_coef
    chosen = ["--model.router_aux_loss_coef", "0.02"]
    shown = dry([str(tmp_path / "mixture.toml"), "--init", str(dense), "--upcycle", *chosen], capsys)
    assert shown["router_aux_loss_coef"] == 0.02


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--upcycle"], "--upcycle: a mixture of how many experts?"),
        (["demo", *EXPERTS], "model.vocab_size: "),
        ([*EXPERTS, "--model.hidden_size", "64"], "model.hidden_size: "),
        ([*EXPERTS, "--model.num_hidden_layers", "3"], "model.num_hidden_layers: "),
        ([*EXPERTS, "--model.moe_intermediate_size", "48"], "model.moe_intermediate_size: "),
        (["--upcycle", "--model.num_experts", "4"], "model.num_experts_per_tok: 8 exceeds"),
        ([*EXPERTS, "--adapter.rank", "4", "--optim.name", "adamw"], "adapter: "),
    ],
)
def test_what_cannot_be_upcycled_is_refused(
    options: list[str], key: str, dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["--batch.sequence_length", "32", "--batch.tokens", "256"]
    assert main(["train", *options, *short, "--init", str(dense), "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and key in shown.err


def test_a_dense_model_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", *EXPERTS, "--dry-run"]) == 2
    assert "--upcycle: upcycle which dense model?" in capsys.readouterr().err
