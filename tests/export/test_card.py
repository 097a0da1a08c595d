"""The model card contains what the run directory records, and "not recorded" for the rest."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from deskside.export.card import model_card
from deskside.run.directory import RunDirectory
from deskside.run.lineage import stages
from deskside.weights.hf import save_hf
from deskside.weights.load import load_model
from tests.data.chat_tokenizer import make as make_chat
from tests.export.test_hf_parity import random_model
from tests.serve.made_run import MadeRun, make

SUMMARY = {
    "status": "finished",
    "val_bpb": 1.2345,
    "val_languages": {"hi": {"bpb": 1.125, "bytes": 10}},
    "gzip_bpb": 3.21,
    "steps": 20,
    "tokens": 5_120_000,
    "seconds": 9000.0,
    "clock": "wall",
    "precision": "fp8-delayed",
    "emulated": True,
    "mfu": 0.417,
    "peak_memory_gib": 7.5,
    "tasks": {"piqa": {"score": 0.625}},
}
ENVIRONMENT = {"torch": "2.11.0", "gpu": {"name": "NVIDIA GeForce RTX 4090", "count": 2}}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make(tmp_path_factory.mktemp("card"))


def card(run: Path, form: str = "hf", warnings: list[str] | None = None) -> str:
    told: list[str] = [] if warnings is None else warnings
    return model_card(load_model(run, warn=told.append), form, "float32", told.append, "m-F32.gguf")


def rows(text: str) -> dict[str, str]:
    """Return the two-column rows of all tables. If a name repeats, the last row counts."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def write(run: Path, name: str, content: Any) -> None:
    (run / name).write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")


def copy(made: MadeRun, folder: Path, **run: Any) -> Path:
    """Return a copy of the fixture's run under another name, with other entries in run.json."""
    path = folder / "copy"
    path.mkdir(parents=True)
    for file in ("run.json", "tokenizer.json"):
        (path / file).write_bytes((made.path / file).read_bytes())
    (path / "checkpoints").symlink_to(made.path / "checkpoints")
    write(path, "run.json", {**json.loads((path / "run.json").read_text("utf-8")), **run})
    return path


def test_a_bare_run_has_nothing_made_up(made: MadeRun, tmp_path: Path) -> None:
    """The run has only run.json, a tokenizer and a checkpoint: no summary, no environment and no metrics."""
    found = rows(card(copy(made, tmp_path)))
    for fact in ("tokens seen", "time", "energy", "hardware", "peak memory", "software", "started from"):
        assert found[fact] == "not recorded", fact
    assert found["state"].startswith("not finished")
    assert found["parameters"] == f"{sum(p.numel() for p in made.model.parameters()):,}"
    assert found["optimizer"].startswith("muon") and found["sequence length"] == "64 tokens"


def test_what_a_run_holds_is_in_it(made: MadeRun, tmp_path: Path) -> None:
    run = copy(made, tmp_path, init=None, created="2026-11-20T10:00:00+00:00")
    write(run, "summary.json", SUMMARY)
    write(run, "environment.json", ENVIRONMENT)
    text = card(run)
    found = rows(text)
    assert found["tokens seen"] == "5,120,000"
    assert found["time"] == "2.5 h (wall clock, set-up included)"
    assert found["hardware"] == "NVIDIA GeForce RTX 4090 (2 in the machine)"
    assert found["precision of the matrix products"].startswith("fp8-delayed (emulated")
    assert found["share of the measured matmul peak"] == "41.7%"
    assert found["started from"] == "random weights" and found["begun"] == "2026-11-20"
    assert found["bits per byte"] == "1.2345" and found["task piqa"] == "0.6250"
    assert found["bits per byte of hi"] == "1.1250"
    assert found["for comparison: bits per byte of gzip"] == "3.2100"
    front = yaml.safe_load(text.split("---")[1])
    assert front["library_name"] == "transformers" and front["license"] == "unknown"
    # The card contains nothing of this machine, because it is made to be published.
    assert str(tmp_path) not in text and str(made.path.parent) not in text


def test_the_data_index_is_quoted(made: MadeRun) -> None:
    """Its source has no tag, so one row has all tokens."""
    index = json.loads((Path(str(made.config.data.path)) / "index.json").read_text("utf-8"))
    tags = index["splits"]["train"]["shards"][0]["tags"]
    name = index["tags"][0]["source"] or "(no tag)"
    expected = f"| {name} | - | {tags['0']['documents']:,} | {tags['0']['tokens']:,} | not recorded |"
    assert expected in card(made.path)


def test_energy_is_watts_times_training_time(made: MadeRun, tmp_path: Path) -> None:
    """Two of three steps have a reading: 1000 tokens at 10 a second take 100 s, at 360 W and then at 180 W."""
    lines = [
        {"step": 1, "tokens": 1000, "tokens_per_second": 10.0, "watts": 360.0},
        {"step": 2, "tokens": 2000, "tokens_per_second": 10.0, "watts": None},
        {"step": 3, "tokens": 3000, "tokens_per_second": 10.0, "watts": 180.0},
    ]
    run = copy(made, tmp_path)
    write(run, "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    energy = stages(run, print)[0].energy
    assert energy is not None and (energy.steps, energy.logged) == (2, 3)
    assert energy.kilowatt_hours == pytest.approx((360 + 180) * 100 / 3.6e6)
    assert rows(card(run))["energy"].startswith("15 Wh, measured on one GPU during training steps (2 of 3")


def test_the_stages_before_are_told(made: MadeRun, tmp_path: Path) -> None:
    """The run started from another run's export, which started from a model that no longer exists."""
    first = copy(made, tmp_path / "a", name="base", init="Qwen/Qwen3-0.6B")
    write(first, "summary.json", SUMMARY)
    (first / "model").mkdir()
    second = copy(made, tmp_path / "b", name="chat", init=str(first / "model"))
    told = stages(second, print)
    assert [stage.name for stage in told] == ["base", "chat"]
    assert told[0].started_from == "Qwen3-0.6B" and told[1].started_from == "copy"
    text = card(second)
    assert text.index("`base`") < text.rindex("`chat`") and "5,120,000" in text
    # A relative path is relative to the directory where the run was started.
    recorded = json.loads((second / "run.json").read_text("utf-8"))
    write(second, "run.json", {**recorded, "init": "a/copy/model", "directory": str(tmp_path)})
    assert [stage.name for stage in stages(second, print)] == ["base", "chat"]
    # A cycle, which a replaced folder can cause, terminates.
    write(first, "run.json", {**json.loads((first / "run.json").read_text("utf-8")), "init": str(second)})
    assert [stage.name for stage in stages(second, print)] == ["base", "chat"]


def test_a_model_of_the_hub_is_no_run_of_this_directory(
    made: MadeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(made, tmp_path / "a", name="chat", init="hf:Qwen/Qwen3-0.6B")
    monkeypatch.chdir(copy(made, tmp_path / "b", name="another"))
    assert [(stage.name, stage.started_from) for stage in stages(run, print)] == [("chat", "Qwen/Qwen3-0.6B")]


@pytest.mark.parametrize("name", ["summary.json", "environment.json", "plan.json"])
def test_damaged_files_are_said_and_left_out(name: str, made: MadeRun, tmp_path: Path) -> None:
    run = copy(made, tmp_path)
    write(run, name, '{"tokens": 12')
    write(run, "metrics.jsonl", '{"step": 1, "tokens"')
    warnings: list[str] = []
    assert rows(card(run, warnings=warnings))["tokens seen"] == "not recorded"
    assert (len(warnings) == 2 and name in warnings[1]) or name in warnings[0]
    assert any("metrics.jsonl: 1 damaged" in line for line in warnings)


def test_values_of_the_wrong_kind_are_not_recorded(made: MadeRun, tmp_path: Path) -> None:
    run = copy(made, tmp_path)
    write(
        run, "summary.json", {"tokens": "many", "seconds": True, "tasks": [1], "val_bpb": {}, "steps": None}
    )
    write(run, "environment.json", {"gpu": "none", "torch": None})
    found = rows(card(run))
    assert found["tokens seen"] == found["time"] == found["hardware"] == "not recorded"
    assert "Not recorded. Measure it with: `deskside eval`" in card(run)


def test_a_hugging_face_directory_has_no_history(made: MadeRun, tmp_path: Path) -> None:
    run = RunDirectory(made.path)
    out = save_hf(made.model, made.config.model, run.tokenizer, tmp_path / "hf")
    text = card(out, "gguf")
    assert "no record of its training" in text and "llama-server -m m-F32.gguf" in text
    assert "knows the split pattern" not in text
    assert text.count("Not recorded") == 3


@pytest.mark.parametrize("chats", [False, True])
def test_the_lines_that_the_card_shows_run(
    chats: bool, made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_chat(tmp_path) if chats else RunDirectory(made.path).tokenizer
    model = random_model(vocab_size=512, max_position_embeddings=512)
    out = save_hf(model, model.config, source, tmp_path / "hf")
    text = card(out)
    assert ("answers in conversations" in text) == chats == ("trained to follow" not in text)
    lines = text.split("```python\n")[1].split("```")[0]
    exec(lines.replace("DIR", str(out)), {})
    assert capsys.readouterr().out.startswith("<|im_start|>user\nHello!" if chats else "<|endoftext|>Once")


def test_an_earlier_checkpoint_is_not_credited_with_the_last_ones_numbers(
    made: MadeRun, tmp_path: Path
) -> None:
    run = copy(made, tmp_path)
    write(run, "summary.json", {**SUMMARY, "steps": 30})
    assert "Measured at step 30, these weights are of step 20." in card(run)
    write(run, "summary.json", {**SUMMARY, "steps": 30, "best_step": 20})  # the run ended with these weights
    assert "Measured at step" not in card(run)


@pytest.mark.parametrize(
    ("weights", "updates", "blend", "other"),
    [("raw", 5, 0.4, True), (None, 5, 0.4, False), ("raw", 5, 0.0, False), ("raw", 0, 1.0, False)],
)
def test_weights_of_the_last_step_are_not_credited_with_the_average_s_numbers(
    weights: Literal["raw"] | None, updates: int, blend: float, other: bool, made: MadeRun, tmp_path: Path
) -> None:
    run = copy(made, tmp_path)
    average = {"name": "ema", "updates": updates, "blend": blend, "by_blend": []}
    write(run, "summary.json", {**SUMMARY, "average": average})
    text = model_card(load_model(run, weights=weights), "hf", "float32", print)
    assert ("Measured with an average" in text) == other


def test_bundled_texts_come_with_their_licence(made: MadeRun, tmp_path: Path) -> None:
    from deskside.data.corpus.analyze import CorpusOptions
    from deskside.data.corpus.prepare import prepare

    data = tmp_path / "data"
    prepare(
        ["bundled:tiny_indic.jsonl"],
        data,
        CorpusOptions(vocab_size=300, val_fraction=0.1, workers=1, quiet=True),
    )
    config = made.config.model_dump(mode="json")
    config["data"] |= {"path": str(data), "sources": ["bundled:tiny_indic.jsonl"]}
    sources = {s.name: s for s in stages(copy(made, tmp_path, config=config), print)[0].sources}
    assert sources["common-voice"].licence == "CC0" and sources["common-voice"].lang == "hi"
    front = model_card(load_model(copy(made, tmp_path / "b", config=config)), "hf", "float32", print)
    assert yaml.safe_load(front.split("---")[1])["language"] == ["bn", "hi", "ml", "mr", "ta", "te"]
    assert len(sources) == 6 and all(s.licence for s in sources.values())


def test_languages_of_mostly_untagged_data_are_not_claimed(made: MadeRun, tmp_path: Path) -> None:
    from deskside.data.corpus.prepare import CorpusOptions, prepare

    names, data = ["bundled:tiny_shakespeare.txt", "bundled:tiny_indic.jsonl"], tmp_path / "data"
    prepare(names, data, CorpusOptions(vocab_size=300, val_fraction=0.1, workers=1, quiet=True))
    config = made.config.model_dump(mode="json")
    config["data"] |= {"path": str(data), "sources": names}
    text = model_card(load_model(copy(made, tmp_path, config=config)), "hf", "float32", print)
    assert "language" not in yaml.safe_load(text.split("---")[1])
