"""`deskside train`: errors before anything is written, the dry run, and --init."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from deskside.budget.shape import flops_per_token
from deskside.cli.answer import speed
from deskside.cli.main import main
from deskside.cli.train import TrainOptions, warn_of_high_rate
from deskside.config.run import RunConfig
from deskside.dashboard import notes
from deskside.data.reading.index_file import is_prepared
from tests.serve.made_run import MadeRun, make

STAGES = (
    "--schedule.stages=[{until = 0.5, sequence_length = 512, batch_tokens = 65536}, "
    "{until = 1.0, sequence_length = 2048}]"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make(tmp_path_factory.mktemp("made"))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one-line error of a command that exits with 2 and prints nothing else."""
    assert main(["train", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err.removeprefix("deskside: ").strip()


def dry(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["train", *argv, "--dry-run", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    result = json.loads(shown.out)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no preset is given; use one of 1.3b, 124m"),
        (["125m"], "125m: no such preset; did you mean 124m? Otherwise use one of 1.3b, 124m"),
        (["gone.toml"], "gone.toml: no such file"),
        (["124m", "--depth", "12"], "--depth and a preset"),
        (["--depth", "13"], "depth 13: must be even and at least 2"),
        (["124m", "--data.path", "x"], "schedule.length: the run has no length; give --hours 2"),
        (["124m", "--hours", "2"], "data.path: no data was given; prepare some with: deskside data prepare"),
        (["124m", "--hours", "2", "--data.path", "x"], "data.path: x is not prepared data (no index.json)"),
        (
            ["124m", "--hours", "2", "--schedule.hours", "3"],
            "--schedule.hours and --hours: the run can have one",
        ),
        (
            ["124m", "--hours", "2", "--schedule.steps", "3"],
            "--schedule.steps and --hours: the run can have one",
        ),
        (["124m", "--hours", "2", "--data.path", ""], "data.path: string should have at least 1 character"),
        (["124m", "--hours", "2", "--runs", ""], "--runs '': is empty; give a value, or leave it out"),
        (["--resume", ""], "--resume '': is empty"),
        (["124m", "--hours", "two"], "--hours two: "),
        (["124m", "--hours", "0"], "--hours 0: "),
        (
            ["demo", "--data.path", "misspelt", "--steps", "2"],
            "data.path: misspelt is not prepared data (no index.json)",
        ),
        (["demo", "--optim.name", "adam"], "optim.name: input should be adamw or muon, not 'adam'"),
        (["demo", "--model.num_key_value_heads", "3"], "model.num_key_value_heads: 4 heads cannot be shared"),
        (
            ["demo", "--batch.sequence_length", "512", "--batch.tokens", "1024"],
            "batch.sequence_length: 512 is longer",
        ),
        (["--resume", "nothing-there"], "nothing-there: is not a run (no run.json)"),
        (["demo", "--resume", "x"], "--resume uses the run's own configuration"),
        (["--resume", "x", "--optim.lr", "1"], "--resume uses the run's own configuration"),
        (["--resume", "x", "--runs", "mine"], "--resume uses the run's own configuration"),
        (["--init", "nothing-there", "--hours", "1"], "nothing-there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refused_before_anything_is_made(
    argv: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(argv, capsys).startswith(message)
    assert list(here.iterdir()) == []


def test_a_folder_of_text_is_named_in_the_command_that_prepares_it(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "my texts").mkdir()
    (here / "my texts" / "a.txt").write_text("some words")
    line = refused(["demo", "--data.path", "my texts", "--steps", "2"], capsys)
    assert line.endswith("deskside data prepare 'my texts' --out data/NAME")
    assert [path.name for path in here.rglob("*")] == ["my texts", "a.txt"]


def test_a_dry_run_refuses_data_with_the_line_of_the_run(
    made: MadeRun, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_text("some words")
    data = str(made.config.data.path)
    large = ["demo", "--steps", "2", "--data.path", data, "--model.vocab_size"]
    # The data has 300 entries. A larger vocabulary is built as it is configured, so a dry run prints that.
    assert dry([*large, "304"], capsys)["config"]["model"]["vocab_size"] == 304
    for argv in (
        ["demo", "--steps", "2", "--data.path", "nowhere"],
        ["demo", "--steps", "2", "--data.path", "texts"],
        [*large, "256"],
    ):
        line = refused([*argv, "--compute.device", "cpu"], capsys)
        assert refused([*argv, "--compute.device", "cpu", "--dry-run"], capsys) == line
        assert refused([*argv, "--compute.device", "cpu", "--dry-run", "--json"], capsys) == line
    assert "--model.vocab_size 300, " in (line := refused([*large, "256", "--dry-run"], capsys))
    assert line.endswith("--vocab-size 256")
    mixed = [*large, "304", "--data.weights", "{french = 1}", "--dry-run"]
    assert "weight french: is not in the data" in refused(mixed, capsys)
    # Without a length, the run itself is refused for that first; the dry run still checks the data.
    assert refused(["124m", "--data.path", "texts", "--dry-run"], capsys).startswith("data.path: texts")
    assert [path.name for path in here.iterdir()] == ["texts"]


def test_the_dry_run_of_a_resumed_run_checks_its_data(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path_factory.mktemp("gone"))
    assert main(["train", "--resume", str(run.path), "--dry-run"]) == 0
    capsys.readouterr()
    (Path(str(run.config.data.path)) / "index.json").unlink()
    assert "is not prepared data" in refused(["--resume", str(run.path), "--dry-run"], capsys)


@pytest.mark.parametrize(
    ("command", "table", "which"),
    [
        (["train", "mine.toml"], "name = 'dpo'", "dpo"),
        (["train", "mine.toml", "--dry-run"], "name = 'sft'\nepochs = 1", "sft"),
        (["train", "mine.toml"], "beta = 0.1", "sft|dpo|kto|grpo"),
        (["go", "--preset", "mine.toml", "--hours", "1", "--yes"], "name = 'sft'", "sft"),
        (["probe", "--preset", "mine.toml"], "name = 'sft'", "sft"),
        (["study", "study.toml"], "name = 'sft'", "sft"),
    ],
)
def test_a_file_for_fine_tuning_is_not_pretrained(
    command: list[str], table: str, which: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine.toml").write_text(f"base = 'demo'\n[align]\n{table}\n")
    (here / "study.toml").write_text(
        "name = 'one'\nbase = 'mine.toml'\n[budget]\nsteps = 2\n"
        "[[factor]]\nname = 'rate'\n[[factor.level]]\nname = 'low'\n[factor.level.set]\noptim.lr = 0.01\n"
    )
    assert main(command) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert "mine.toml: its table [align] is for fine-tuning" in shown.err
    assert f"use deskside {which} MODEL --data SOURCE" in shown.err
    assert sorted(path.name for path in here.iterdir()) == ["mine.toml", "study.toml"]


@pytest.mark.parametrize("name", ["a/b", "..", "", "."])
def test_an_invalid_run_name(
    name: str, made: MadeRun, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["demo", "--data.path", made.config.data.path or "", f"--name={name}"]
    what = "must be a plain folder name" if name else "is empty; give a value, or leave it out"
    assert refused(argv, capsys).startswith(f"--name {name!r}: {what}")
    assert list(here.iterdir()) == []


def test_the_name_of_an_existing_run(made: MadeRun, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs" / "mine").mkdir(parents=True)
    line = refused(["demo", "--data.path", made.config.data.path or "", "--name", "mine"], capsys)
    assert line.startswith("runs/mine exists") and "--resume" not in line


def test_init_of_a_run_has_its_rows_and_data(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    config = dry(["--init", str(made.path)], capsys)["config"]
    assert config["data"]["path"] == made.config.data.path
    assert (config["batch"]["sequence_length"], config["batch"]["tokens"]) == (64, 256)
    given = ["--batch.sequence_length", "32", "--data.path", "other"]
    assert "other is not prepared data" in refused(["--init", str(made.path), *given, "--hours", "1"], capsys)
    config = dry(["--init", str(made.path), "--batch.sequence_length", "1024"], capsys)["config"]
    assert (config["batch"]["sequence_length"], config["batch"]["tokens"]) == (1024, 65536)


def test_resume_of_a_damaged_run(made: MadeRun, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run.json").write_text("{")
    assert main(["train", "--resume", "."]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and "run.json: is damaged" in shown.err


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({}, "schedule.length: the run has no length"),
        (
            {"schedule": {"name": "wsd", "length": "2 steps"}, "data": {"path": "gone"}},
            "data.path: gone is not prepared",
        ),
    ],
)
def test_resume_of_a_run_without_length_or_data(
    config: dict[str, Any], line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.json").write_text(json.dumps({"schema_version": 1, "config": config}))
    assert refused(["--resume", "."], capsys).startswith(line)
    (here / "run.json").write_text("{}")
    assert main(["train", "--resume", "."]) == 1
    assert (
        capsys.readouterr().err == "deskside: run.json: has no valid run configuration (it has no config)\n"
    )


@pytest.mark.parametrize("runs", ["file", "file/runs"])
def test_runs_must_be_a_directory(
    runs: str, made: MadeRun, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "file").write_text("")
    line = refused(["demo", "--data.path", made.config.data.path or "", "--runs", runs], capsys)
    assert line == f"--runs {runs}: is a file, or lies below one; give a folder"


def test_dry_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = dry(
        ["124m", "--schedule.steps", "200", "--schedule.warmup", "50 steps", "--schedule.decay", "0.25"],
        capsys,
    )
    config = RunConfig.model_validate(result["config"])
    theirs = Qwen3Config(
        vocab_size=32768, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=3,
        head_dim=64, intermediate_size=2048, tie_word_embeddings=False,
    )  # fmt: skip
    counted = sum(p.numel() for p in AutoModelForCausalLM.from_config(theirs).parameters())
    groups = result["parameters"]
    assert groups.pop("total") == sum(groups.values()) == counted
    assert result["flops_per_token"] == flops_per_token(config.model, config.batch.sequence_length)
    assert (result["steps"], result["tokens"]) == (200, 200 * config.batch.tokens)
    assert [(row["step"], row["lr_factor"]) for row in result["schedule"][1:]] == [
        (50, 1.0), (150, 1.0), (200, pytest.approx(config.schedule.model_dump()["final_lr_fraction"])),
    ]  # fmt: skip


def test_dry_run_in_tokens_counts_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the steps have 65536 tokens, half 131072: 100M tokens are 1018 steps."""
    result = dry(["124m", "--schedule.tokens", "1e8", "--batch.tokens", "131072", STAGES], capsys)
    steps = -(-100_000_000 // ((65536 + 131072) // 2))
    assert (result["steps"], result["tokens"]) == (steps, steps * (65536 + 131072) // 2)


EXAMPLES = [
    line.strip()
    for line in f"{TrainOptions.__doc__}\n{notes.COMMANDS}".splitlines()
    if line.strip().startswith("deskside train")
    and not any(word in line for word in ("my.toml", "--init", "--resume", "--dry-run"))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_commands_that_are_shown_have_a_length(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    here = re.sub(r"--(data.path|gpus) \S+", "", example)  # which are not of this machine
    assert main([*shlex.split(here, comments=True)[1:], "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["schedule"]["length"] is not None


def test_dry_run_in_hours_has_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    result = dry(["124m", "--hours", "2", "--schedule.warmup", "50 steps"], capsys)
    assert result["steps"] is None and result["tokens"] is None
    assert [row["step"] for row in result["schedule"]] == [None] * 4
    assert result["schedule"][1] == {"what": "warm-up ends", "progress": None, "step": None, "lr_factor": 1.0}


@pytest.mark.parametrize(
    "argv",
    [
        ["demo"],
        ["gpt2"],
        ["124m", "--schedule.length", "3 epochs"],
        ["d20", "--schedule.steps", "9000"],
        ["1.3b", "--hours", "24"],
    ],
)
def test_dry_run_as_text(argv: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *argv, "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and list(here.iterdir()) == []
    lines = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    for part in (
        "model.hidden_size = ",
        "optim.name = muon",
        "embedding",
        "training FLOPs per token: ",
        "decay starts",
    ):
        assert part in shown.out
    last = {
        "demo": "length 3m: ",
        "gpt2": "the run has no length yet",
        "124m": "length 3 epochs: the steps depend on the data",
        "d20": "9,000 steps of ",
        "1.3b": "length 24h: ",
    }
    assert lines[-1].startswith(last[argv[0]])


def test_init_takes_the_shape_of_the_weights(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The shape of the weights replaces the preset's whole shape."""
    for preset in ([], ["gpt2"]):
        result = dry([*preset, "--init", str(made.path)], capsys)
        assert RunConfig.model_validate(result["config"]).model == made.config.model


def test_init_refuses_another_shape(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    for key, value in (("rope_theta", "5.0"), ("num_hidden_layers", "1")):
        line = refused(["--init", str(made.path), "--dry-run", f"--model.{key}", value], capsys)
        assert line.startswith(f"model.{key}: the weights of {made.path} ") and f"not {value};" in line


def test_dry_run_of_a_resume_shows_the_recorded_run(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RunConfig.model_validate(dry(["--resume", str(made.path)], capsys)["config"]) == made.config


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (
            515.0,
            "515 tokens/s in training steps; 357 with set-up, evaluation and checkpoints (bf16, emulated)",
        ),
        (357.5, "358 tokens/s in training steps (bf16, emulated)"),
        (None, "not known, in bf16, emulated"),
    ],
)
def test_speed_of_steps_and_of_the_run(rate: float | None, said: str) -> None:
    """The speed of the whole run, tokens / seconds, is also shown if it is lower than that of the steps."""
    summary = {
        "tokens": 35_700,
        "seconds": 100.0,
        "tokens_per_second": rate,
        "precision": "bf16",
        "emulated": True,
    }
    assert speed(summary) == said


@pytest.mark.parametrize(
    ("chosen", "warned"),
    [
        ({}, ["lr", "embedding_lr", "head_lr"]),
        ({"name": "adamw"}, ["lr"]),
        ({"name": "adamw", "lr": 1e-5}, []),
        ({"lr": 1e-5}, ["embedding_lr", "head_lr"]),
        ({"lr": 1e-5, "embedding_lr": 1e-5, "head_lr": 1e-5}, []),
    ],
)
def test_trained_weights_with_the_rates_of_random_ones(
    chosen: dict[str, Any], warned: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_high_rate({"optim": chosen})
    said = capsys.readouterr().err.partition(" for random weights")[0]
    assert re.findall(r"optim\.(\w+)", said) == warned


@pytest.mark.parametrize(
    ("given", "rates"), [([], (None, None)), (["--optim.head_lr", "0.01"], (None, 0.01))]
)
def test_trained_weights_have_one_rate(
    given: list[str],
    rates: tuple[float | None, float | None],
    made: MadeRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With AdamW, the higher rates of embedding and head are for random weights."""
    optimizer = ["--optim.name", "adamw", "--optim.lr", "2e-5"]
    for options in ([], ["--optim.scale", "false"]):
        config = dry(["--init", str(made.path), *optimizer, *options, *given], capsys)["config"]
        assert (config["optim"]["embedding_lr"], config["optim"]["head_lr"]) == rates
    assert dry(["demo", *optimizer], capsys)["config"]["optim"]["head_lr"] == 0.008


def test_data_is_prepared_before_processes_are_launched(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that prepares for hours must not keep the others waiting in a process group."""
    (here / "book.txt").write_text("a sentence of the book. " * 2000)
    (here / "tiny.toml").write_text(
        "base = 'demo'\n[model]\nvocab_size = 300\n[data]\npath = 'data/book'\nsources = ['book.txt']\n"
    )
    seen = []

    def launched(command: str, argv: list[str], processes: int) -> int:
        seen.append((command, processes, is_prepared("data/book")))
        return 0

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("deskside.cli.train.launch", launched)
    assert main(["train", "tiny.toml", "--gpus", "2", "--compute.device", "cpu"]) == 0
    assert seen == [("train", 2, True)]
