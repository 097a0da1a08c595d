"""`deskside eval --tasks`: its output as text and as JSON, and its errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from deskside.cli.eval import run as run_eval
from deskside.utils.errors import UsageError
from tests.evaluate.made_model import Made, make, sentence
from tests.serve.made_run import MadeRun
from tests.serve.made_run import make as make_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    choices = [
        {"query": sentence(rng, 3, 9), "choices": [sentence(rng, 1, 4) for _ in range(4)], "gold": int(n % 4)}
        for n in range(30)
    ]
    schema = [
        {"context_options": ["the sea", "the ships"], "continuation": sentence(rng, 1, 4), "gold": n % 2}
        for n in range(12)
    ]
    lines = [json.dumps(row) for row in choices]
    (folder / "arc_easy.jsonl").write_text("\n".join(["{broken", *lines]))
    (folder / "winograd_wsc.jsonl").write_text("\n".join(map(json.dumps, schema)))
    (folder / "svamp.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n} and 1", "answer": n}) for n in range(9))
    )
    return folder


def test_json(made: Made, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = tmp_path / "items.jsonl"
    arguments = [
        str(made.folder),
        "--tasks",
        "core,svamp",
        "--tasks-dir",
        str(data),
        "--items",
        str(items),
        "--json",
    ]
    assert run_eval(arguments) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["bpb"] is None  # a model directory has no validation data
    assert list(found["tasks"]) == ["arc_easy", "winograd", "svamp"]
    arc = found["tasks"]["arc_easy"]
    assert (arc["n"], arc["shots"], arc["damaged"], arc["kind"]) == (30, 10, 1, "choice")
    assert arc["accuracy"] == arc[arc["score"]] == arc["acc_norm"]
    assert arc["low"] < arc["accuracy"] < arc["high"]
    assert arc["centred"] == pytest.approx((arc["accuracy"] - 0.25) / 0.75)
    parts = [found["tasks"][name]["centred"] for name in ("arc_easy", "winograd")]
    assert found["core_tasks"] == ["arc_easy", "winograd"]
    assert found["core"] == pytest.approx(np.mean(parts))
    assert found["core_interval"][0] < found["core"] < found["core_interval"][1]
    assert "hellaswag" in found["left_out"] and "no data in" in err
    assert "arc_easy: 1 damaged record is left out (JSON that does not parse" in err
    records = [json.loads(line) for line in items.read_text().splitlines()]
    assert len(records) == 30 + 12 + 9
    right = sum(record["right"] for record in records if record["task"] == "arc_easy")
    assert right / 30 == pytest.approx(arc["accuracy"])
    with pytest.raises(UsageError, match="exists already"):
        run_eval(arguments)


def test_results_do_not_depend_on_the_batch_size(
    made: Made, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for size in ("1", "300", "100000"):
        run_eval(
            [str(made.folder), "--tasks", "all", "--tasks-dir", str(data), "--batch-tokens", size, "--json"]
        )
        tasks = json.loads(capsys.readouterr().out)["tasks"]
        for task in tasks.values():
            del task["seconds"]
        found.append(tasks)
    assert found[0] == found[1] == found[2]


def test_a_run_gets_bits_per_byte_and_tasks(
    run: MadeRun, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        str(run.path),
        "--tasks",
        "arc_easy",
        "--tasks-dir",
        str(data),
        "--limit",
        "5",
        "--shots",
        "1",
    ]
    assert run_eval([*arguments, "--start", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["bpb"] < 20
    assert (found["tasks"]["arc_easy"]["n"], found["tasks"]["arc_easy"]["shots"]) == (5, 1)
    assert found["core"] is None and found["limit"] == 5 and found["start"] is True


def test_long_context(run: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(run.path), "--long-context", "600, 700", "--trials", "2", "--device", "cpu"]
    assert run_eval([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    cells = found["long_context"]["cells"]
    depths = (0, 0.25, 0.5, 0.75, 1)
    expected = [
        (task, length, depth)
        for task in ("passkey", "multikey", "variable_tracking", "frequent_words")
        for length in (600, 700)
        for depth in (depths if "key" in task else (None,))
    ]
    assert [(cell["task"], cell["length"], cell["depth"]) for cell in cells] == expected
    for cell in cells:
        assert cell["n"] == (10 if cell["depth"] is None else 2) and cell["nats"] > 0
        assert 0 <= cell["low"] <= cell["accuracy"] <= cell["high"] <= 1
    assert found["bpb"] is not None and found["bpb_by_position"][0]["tokens"] == found["tokens"]
    written = json.loads((run.path / "long_context.json").read_text())
    assert written == {**found["long_context"], "step": 20}
    assert run_eval([*arguments, "--long-tasks", "frequent_words,passkey"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if line.startswith(("frequent_words ", "passkey "))]
    assert max(map(len, rows)) <= 80
    assert "of the expected words in texts of 700 tokens" in " ".join(out.split())
    assert [row.split()[:2] for row in rows] == [
        [task, length] for task in ("frequent_words", "passkey") for length in ("600", "700")
    ]


def test_long_context_beyond_the_model(run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before the slow measurement of bits per byte."""

    def measure(*_: object, **__: object) -> None:
        raise AssertionError("bits per byte were measured")

    monkeypatch.setattr("deskside.cli.eval_model.measure", measure)
    with pytest.raises(UsageError, match="--long-context 100000: this model takes up to"):
        run_eval([str(run.path), "--long-context", "400,100000", "--device", "cpu"])


def test_a_sequence_length_without_effect(made: Made, tmp_path: Path) -> None:
    (tmp_path / "both.jsonl").write_text('{"en": "a", "xx": "b"}\n')
    parallel = ["--parallel", str(tmp_path / "both.jsonl"), "--languages", "en,xx"]
    with pytest.raises(UsageError, match="--sequence-length"):
        run_eval([str(made.folder), *parallel, "--sequence-length", "32", "--device", "cpu"])


def test_parallel(run: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each language of the file has the bits of its sentences evaluated alone as a text."""
    rows = [{"id": n, "en": f"the sea {n}", "xx": f"{n} ships, ships and ships"} for n in range(7)]
    (tmp_path / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(run.path), "--parallel", str(tmp_path / "both.jsonl"), "--languages", "en,xx"]
    assert run_eval([*arguments, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["parallel"]
    assert found["sentences"] == 7 and list(found["languages"]) == ["en", "xx"]
    for language, one in found["languages"].items():
        texts = [json.dumps({"text": row[language]}) + "\n" for row in rows]
        (tmp_path / "alone.jsonl").write_text("".join(texts))
        alone = [str(run.path), "--text", str(tmp_path / "alone.jsonl"), "--device", "cpu", "--json"]
        assert run_eval(alone) == 0
        expected = json.loads(capsys.readouterr().out)
        assert one["bpb"] == pytest.approx(expected["bpb"], rel=1e-5)
        assert one["bits_per_sentence"] == pytest.approx(expected["bpb"] * expected["bytes"] / 7, rel=1e-5)
    bits = {language: one["bits_per_sentence"] for language, one in found["languages"].items()}
    assert found["languages"]["xx"]["relative"] == pytest.approx(bits["xx"] / bits["en"])
    assert run_eval([*arguments, "--device", "cpu"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    answer = f"{min(bits.values()):.1f} to {max(bits.values()):.1f} bits per sentence in 2 languages."
    assert "7 sentences" in printed and answer in printed
    for broken, field in (
        ({"en": "a"}, "xx"),
        ({"en": "a", "xx": " "}, "'xx'"),
        ({"en": 3, "xx": "b"}, "'en'"),
    ):
        (tmp_path / "both.jsonl").write_text(json.dumps(broken) + "\n")
        with pytest.raises(UsageError, match=field):
            run_eval(arguments)


def test_long_context_of_a_run_that_cannot_be_written(
    run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "long_context.json").unlink(missing_ok=True)
    (run.path / "long_context.json").mkdir()
    arguments = ["--long-context", "400", "--long-tasks", "passkey", "--trials", "1", "--device", "cpu"]
    assert run_eval([str(run.path), *arguments, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["long_context"]["cells"] and "will not show" in shown.err
    (run.path / "long_context.json").rmdir()


def test_the_table_fits_a_terminal(made: Made, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_eval([str(made.folder), "--tasks", "core", "--tasks-dir", str(data)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["task", "arc_easy", "winograd"]
    assert lines[3].startswith("CORE-like: ") and "2 of the 22 tasks" in lines[3]
    assert max(map(len, lines)) <= 80


def test_chat_and_start_change_the_prompt(made: Made, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = [str(made.folder), "--tasks", "arc_easy,svamp", "--tasks-dir", str(data), "--json", "--items"]
    texts = []
    for number, more in enumerate(([], ["--chat"], ["--start"])):
        items = data / f"items-{number}.json"
        assert run_eval([*base, str(items), *more]) == 0
        texts.append(items.read_text())
        items.unlink()
    assert len(set(texts)) == 3
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "arc_esy"], "did you mean arc_easy"),
        (["--tasks", ","], "names no task"),
        (["--tasks", "arc_easy"], "where is the data"),
        (["--tasks", "arc_easy", "--limit", "0"], "--limit 0: must be at least 1"),
        (["--tasks", "arc_easy", "--shots", "-1"], "--shots -1: must be at least 0"),
        (["--tasks", "winograd", "--chat", "--tasks-dir", "DATA"], "--chat: winograd compares beginnings"),
        (["--trials", "3"], "--trials: has no effect without --long-context"),
        (["--long-tasks", "passkey"], "--long-tasks: has no effect without --long-context"),
        (
            ["--long-context", "2048", "--long-tasks", "needle"],
            "one of passkey, multikey, variable_tracking,",
        ),
        (["--long-context", "2048", "--trials", "0"], "--trials 0: must be at least 1"),
        (["--long-context", "2K"], "give lengths in tokens"),
        (["--languages", "en,hi"], "--languages: has no effect without --parallel"),
        (["--parallel", "DATA", "--languages", "en"], "--languages en: give at least two"),
        (["--parallel", "DATA", "--languages", "en,en"], "give at least two different"),
        (["--limit", "3"], "--limit: has no effect without --tasks"),
        (["--chat"], "--chat: has no effect without --tasks"),
        (["--tasks-dir", "x"], "--tasks-dir: has no effect without --tasks"),
        (["--tasks", "arc_easy", "--tasks-dir", "no-such-folder"], "no such folder"),
    ],
)
def test_refused_before_the_model_is_loaded(
    made: Made, data: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("deskside.cli.eval_model.load_model", loaded)
    given = [str(data) if argument == "DATA" else argument for argument in arguments]
    with pytest.raises(UsageError, match=message):
        run_eval([str(made.folder), *given])


def test_chat_needs_a_template(run: MadeRun, data: Path) -> None:
    with pytest.raises(UsageError, match="has no chat template"):
        run_eval(
            [str(run.path), "--tasks", "arc_easy", "--tasks-dir", str(data), "--chat", "--text", "a.txt"]
        )


def test_a_failed_task_does_not_stop_the_others(
    made: Made, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "winograd_wsc.jsonl").write_bytes((data / "winograd_wsc.jsonl").read_bytes())
    (tmp_path / "lambada_openai.jsonl").write_text(json.dumps({"context": "a", "continuation": "sea " * 500}))
    arguments = [str(made.folder), "--tasks", "core", "--tasks-dir", str(tmp_path), "--json"]
    assert run_eval(arguments) == 1
    found = json.loads(capsys.readouterr().out)
    assert list(found["tasks"]) == ["winograd"]
    assert "does not fit the model's 160 positions" in found["failed"]["lambada"]
    assert found["core"] is None  # one of its tasks is missing
    arguments[2] = "lambada"
    with pytest.raises(UsageError, match="does not fit"):
        run_eval(arguments)


def test_errors_of_items_and_shots_come_before_the_model_is_loaded(
    made: Made, data: Path, tmp_path: Path
) -> None:
    arguments = ["no-such-model", "--tasks", "arc_easy", "--tasks-dir", str(data)]
    with pytest.raises(UsageError, match="its directory does not exist"):
        run_eval([*arguments, "--items", str(tmp_path / "nowhere" / "items.jsonl")])
    with pytest.raises(UsageError, match=r"has 29 examples .* but 30 are needed; give --shots 29"):
        run_eval([*arguments, "--shots", "30"])
