"""Records with tiny runs: replay one, continue it after an interruption, and make an entry from its runs."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import deskside
from deskside.cli import answer
from deskside.cli.main import main
from deskside.cli.records import run as run_records
from deskside.cli.train import run as run_train
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.rows import PackedDataset
from deskside.facts import records as table
from deskside.facts.records import Corpus, LossRecord
from deskside.records import entry
from deskside.records.replay import Train, replay
from deskside.records.score import ScoredRun
from deskside.run.record import read_run
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import TEMPORARY_SUFFIX
from deskside.utils.parsing import toml_table
from tests.train import tiny_run

MINUTES, STEP_SECONDS = 0.01, 0.02


class Made:
    """A record of a tiny model, its corpus, and a folder in which it was replayed with seeds 1 and 2."""

    def __init__(self, folder: Path):
        self.folder, self.said = folder, list[str]()
        tiny_run.write_text(folder / "text.txt", 200)
        options = CorpusOptions(vocab_size=300, val_fraction=0.2, workers=1, quiet=True)
        prepare([str(folder / "text.txt")], folder / "data", options)
        self.data = str(folder / "data")
        fingerprint = PackedDataset(self.data, "val", 32).fingerprint
        self.corpus = Corpus("tiny", "tiny", "a text", "deskside data prepare text.txt", fingerprint, 32)
        (folder / "tiny.toml").write_text(tiny_run.SMALLEST_PRESET)
        self.record = replace(
            table.records()[0],
            name="cpu-tiny",
            corpus="tiny",
            minutes=MINUTES,
            options=(str(folder / "tiny.toml"),),
            seeds=(1, 2),
            bits_per_byte=(3.0, 3.1),
        )
        self.out = folder / "out"
        self.found = self.replay(self.out)

    def replay(
        self,
        out: Path,
        seeds: Sequence[int] = (1, 2),
        train: Train = run_train,
        record: LossRecord | None = None,
    ) -> list[ScoredRun]:
        return replay(record or self.record, self.corpus, self.data, out, seeds, self.said.append, train)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The runs take 0.6 s of a clock that only their steps advance, so that a busy machine does not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answer, "finish", lambda *_: 0)  # no reports of the runs
        tiny_run.VirtualTime(patch, lambda step: STEP_SECONDS)
        patch.setattr(deskside, "STARTED", time.perf_counter())
        return Made(tmp_path_factory.mktemp("made"))


def _table(corpus: Corpus, record: LossRecord) -> str:
    values = "\n".join(f"{key} = {json.dumps(value)}" for key, value in vars(corpus).items() if key != "name")
    return f"[corpus.tiny]\n{values}\n\n{entry.as_toml(record)}"


@pytest.fixture
def shown(made: Made, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with only the tiny record, which the commands read."""
    file = made.folder / "records.toml"
    file.write_text(_table(made.corpus, made.record))
    monkeypatch.setattr(table, "MINUTES", (MINUTES,))
    monkeypatch.setattr(entry, "MINUTES", (MINUTES,))
    monkeypatch.setattr(table, "toml_file", lambda name: toml_table(file.read_text()))
    table.records.cache_clear()
    table.corpora.cache_clear()
    yield file
    table.records.cache_clear()
    table.corpora.cache_clear()


def test_runs_are_scored_as_the_models_are(made: Made) -> None:
    for run, seed in zip(made.found, (1, 2), strict=True):
        record = read_run(made.out / f"seed-{seed}")
        assert (run.seed, record.config["seed"]) == (seed, seed)
        assert run.seconds == record.summary["seconds"]
        # The run's own value is for the same text in other rows.
        assert run.bits_per_byte == pytest.approx(record.summary["val_bpb"], rel=0.05)
    assert made.found[0].bits_per_byte != made.found[1].bits_per_byte


def test_continues_where_it_was(made: Made, tmp_path: Path) -> None:
    trained: list[Sequence[str]] = []

    def train(arguments: Sequence[str]) -> int:
        trained.append(arguments)
        return 1

    assert made.replay(made.out, train=train) == made.found and not trained
    out = tmp_path / "out"
    shutil.copytree(made.out, out)
    (out / "seed-1.json").unlink()  # scored again, not trained again
    assert made.replay(out, train=train) == made.found and not trained
    (out / "seed-2.json").unlink()
    (out / "seed-2" / "summary.json").unlink()  # as if it was killed
    with pytest.raises(RunError, match="same command again"):
        made.replay(out, train=train)
    assert trained == [["--resume", str(out / "seed-2")]]
    shutil.rmtree(out / "seed-2")
    (out / "seed-2" / "checkpoints").mkdir(parents=True)  # killed while run.json was written
    (out / "seed-2" / f".run.json{TEMPORARY_SUFFIX}").touch()
    with pytest.raises(RunError):
        made.replay(out, train=train)
    assert trained[1][-4:] == ["--runs", str(out), "--name", "seed-2"] and not (out / "seed-2").exists()
    with pytest.raises(UsageError, match="--out"):
        made.replay(out / "seed-1.json" / "out", train=train)


def test_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="another record"):
        made.replay(made.out, record=replace(made.record, options=("other.toml",)))
    (tmp_path / "mine.txt").touch()
    with pytest.raises(UsageError, match="not empty"):
        made.replay(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    other = replace(made.corpus, fingerprint="0" * 32)
    with pytest.raises(UsageError, match="fingerprint"):
        replay(made.record, other, made.data, tmp_path / "new", [1], print)
    (made.out / "seed-1.json").rename(tmp_path / "kept.json")
    (made.out / "seed-1.json").write_text('{"seed": 1}')
    with pytest.raises(RunError, match="damaged"):
        made.replay(made.out)
    (tmp_path / "kept.json").rename(made.out / "seed-1.json")


def test_the_command(made: Made, shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["replay", "cpu-tiny", "--data", made.data, "--out", str(made.out), "--json"]
    assert run_records(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"]["kind"] == "not comparable"  # this machine is not an H200
    assert [run["bits_per_byte"] for run in said["runs"]] == [run.bits_per_byte for run in made.found]
    assert run_records(words[:-1]) == 0
    text = capsys.readouterr().out
    assert all(f"{run.bits_per_byte:.4f}" in text for run in made.found)
    assert all(len(line) <= 80 for line in text.splitlines() if str(made.out) not in line)
    assert main(["records", "replay", "cpu-tin", "--data", made.data]) == 2
    assert run_records([*words, "--seed", "2"]) == 0
    assert [run["seed"] for run in json.loads(capsys.readouterr().out)["runs"]] == [2]
    for seeds in ("1,1", "1;2", ""):
        assert main(["records", *words, "--seed", seeds]) == 2


def test_a_worse_result_has_exit_code_1(made: Made, shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = made.found[0].card
    lower = entry.as_toml(replace(made.record, bits_per_byte=(1.0, 1.001)))
    words = ["replay", "cpu-tiny", "--data", made.data, "--out", str(made.out), "--json"]
    shown.write_text(shown.read_text().split("[[record]]")[0] + lower)
    for seed in (1, 2):  # as if it was trained on the record's GPU
        file = made.out / f"seed-{seed}.json"
        file.write_text(file.read_text().replace(json.dumps(card), '"H200 SXM"'))
    try:
        assert run_records(words) == 1
        assert json.loads(capsys.readouterr().out)["verdict"]["kind"] == "worse"
    finally:
        for seed in (1, 2):
            file = made.out / f"seed-{seed}.json"
            file.write_text(file.read_text().replace('"H200 SXM"', json.dumps(card)))


def test_list(shown: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_records([]) == 0
    text = capsys.readouterr().out
    assert "cpu-tiny" in text and "3.0500" in text and all(len(line) <= 80 for line in text.splitlines())
    assert run_records(["--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert said["name"] == "cpu-tiny" and said["low"] < said["mean"] < said["high"]
    assert said["mean"] == pytest.approx(3.05)
    assert said["command"].startswith("deskside train ") and "--seed 1" in said["command"]


@pytest.fixture
def on_h200(made: Made, tmp_path: Path) -> list[Path]:
    """The two runs, as if they were trained on an H200."""
    gpu = {"name": "NVIDIA H200", "memory_gib": 139.8}
    runs = []
    for seed in (1, 2):
        runs.append(tmp_path / f"run-{seed}")
        shutil.copytree(made.out / f"seed-{seed}", runs[-1])
        _change(runs[-1], "environment.json", gpu=gpu)
        command = json.loads((runs[-1] / "run.json").read_text())["command"]
        assert "--schedule.clock training" in command
    return runs


def _change(run: Path, name: str, **values: object) -> None:
    content = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps({**content, **values}))


def _add(made: Made, file: Path, runs: Sequence[Path], name: str = "new") -> int:
    words = ["records", "add", *map(str, runs), "--name", name, "--corpus", "tiny", "--data", made.data]
    return main([*words, "--commit", "1a2b3c4d", "--raw", "docs", "--file", str(file)])


def test_add(made: Made, shown: Path, on_h200: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _add(made, shown, on_h200) == 0
    table.records.cache_clear()
    new = table.find_record("new")
    assert (new.card, new.minutes, new.seeds, new.options) == (
        "H200 SXM",
        MINUTES,
        (1, 2),
        made.record.options,
    )
    assert new.bits_per_byte == tuple(round(run.bits_per_byte, 5) for run in made.found)
    assert table.find_record("cpu-tiny") == made.record
    before = shown.read_text()
    assert _add(made, shown, [on_h200[0], on_h200[0]], "twice") == 2
    # Refused before the runs are scored, which takes minutes: the name is in use, or there is no file.
    monkeypatch.setattr(entry, "score_run", None)
    assert _add(made, shown, on_h200) == _add(made, shown.parent / "none.toml", on_h200) == 2
    assert shown.read_text() == before


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("summary.json", {"seconds": 60 * MINUTES * 1000 + 1}, "more than"),
        ("summary.json", {"status": "stopped"}, "not finished"),
        ("plan.json", {"data": "0" * 32}, "corpus"),
        (
            "environment.json",
            {"gpu": {"name": "NVIDIA GeForce RTX 4090", "memory_gib": 24.0}},
            "different cards",
        ),
        ("run.json", {"command": "deskside go --hours 1"}, "deskside train"),
        ("run.json", {"command": "deskside train x --gpus 2"}, "one card"),
        ("run.json", {"init": {"model": "x"}}, "random"),
    ],
)
def test_runs_that_break_a_rule(
    made: Made,
    shown: Path,
    on_h200: list[Path],
    capsys: pytest.CaptureFixture[str],
    file: str,
    change: dict[str, object],
    said: str,
) -> None:
    _change(on_h200[1], file, **change)
    before = shown.read_text()
    assert _add(made, shown, on_h200) == 2
    assert said in capsys.readouterr().err.replace("\n", " ") and shown.read_text() == before


def test_runs_of_two_commands(
    made: Made, shown: Path, on_h200: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = json.loads((on_h200[1] / "run.json").read_text())
    run["config"]["optim"]["lr"] *= 2
    (on_h200[1] / "run.json").write_text(json.dumps(run))
    assert _add(made, shown, on_h200) == 2
    assert "seed" in capsys.readouterr().err
    _change(
        on_h200[0], "run.json", config={**run["config"], "schedule": {"length": "2m", "clock": "training"}}
    )
    assert _add(made, shown, on_h200[:1]) == 2


@pytest.mark.parametrize("content", [None, b"# \xe9\n", b"x = 1\n", b"[corpus.a]\nx = 1\n", b"corpus = 1\n"])
def test_what_is_no_file_of_records_is_refused(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "records.toml"
    if content is not None:  # else a folder is given
        file.write_bytes(content)
    record, given = table.records()[0], tmp_path if content is None else file
    with pytest.raises(UsageError):
        entry.append_record(record, given)
    with pytest.raises(UsageError):
        entry.check_addable(record.name, given)
    assert content is None or file.read_bytes() == content


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_replay_continues(made: Made, tmp_path: Path, number: signal.Signals) -> None:
    """It is stopped while a seed trains: the training process ends too, and the same call
    continues the run, which is no longer locked.
    """
    file = tmp_path / "records.toml"
    record = replace(made.record, minutes=0.1)
    file.write_text(_table(made.corpus, record))
    script = (
        "import sys\nfrom pathlib import Path\nfrom deskside.facts import records\n"
        "from deskside.records import score\nscore.OVERRUN = 1000\n"
        "from deskside.utils.parsing import toml_table\nfrom deskside.cli.main import main\n"
        f"records.MINUTES = (0.1,)\nrecords.toml_file = lambda _: toml_table(Path({str(file)!r}).read_text())\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = [
        "records",
        "replay",
        record.name,
        "--data",
        made.data,
        "--seed",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    command = [sys.executable, "-c", script, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    metrics, deadline = tmp_path / "out" / "seed-1" / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert not (tmp_path / "out" / "seed-1" / "summary.json").exists()
    assert list((tmp_path / "out" / "seed-1" / "checkpoints").iterdir())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert read_run(tmp_path / "out" / "seed-1").summary["seconds"] < 12  # not 6 s in each process
