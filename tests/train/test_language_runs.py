"""Runs on data in two languages: each language is evaluated, and languages are sampled with a temperature."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deskside.config.run import RunConfig
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.rows import PackedDataset
from deskside.evaluate.bpb import evaluate_dataset
from deskside.run.directory import RunDirectory
from deskside.run.record import read_run
from deskside.train import training_run
from deskside.train.loop.callbacks import Callback
from deskside.train.objective import RowDataset
from deskside.utils.errors import UsageError
from deskside.utils.signals import StopSignal
from deskside.weights.load import load_model
from tests.train import tiny_run
from tests.train.tiny_run import rows


@pytest.fixture(scope="module")
def languages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared documents, three quarters in "en" and a quarter in "xx"."""
    folder = tmp_path_factory.mktemp("languages")
    lines = [{"text": f"{n:03} {tiny_run.TEXT}", "lang": "xx" if n % 4 == 0 else "en"} for n in range(120)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = CorpusOptions(vocab_size=300, val_fraction=0.3, workers=1, quiet=True)
    prepare([str(folder / "text.jsonl")], folder / "data", options)
    return folder / "data"


def test_each_language_is_evaluated(languages: Path, tmp_path: Path) -> None:
    config = tiny_run.config(
        languages, schedule={"length": "6 steps"}, evaluate={"every": "3 steps", "tokens": 1_000_000}
    )
    outcome = tiny_run.train(tmp_path, config)
    (evaluated,) = [row for row in rows(outcome.run.path) if "val_bpb" in row]
    validation = PackedDataset(languages, split="val", sequence_length=32)
    expected = evaluate_dataset(load_model(outcome.run.path).model, validation, micro_rows=4)
    assert list(expected.by_language) == ["en", "xx"]
    for language, one in expected.by_language.items():
        final = outcome.summary["val_languages"][language]
        assert final["bpb"] == pytest.approx(one.bpb, rel=1e-6) and final["bytes"] == one.bytes
        assert evaluated[f"val_bpb/{language}"] > final["bpb"]
    x, y = read_run(outcome.run.path).language_series()["xx"]
    assert x == [3 * 256, 6 * 256] and y[-1] == outcome.summary["val_languages"]["xx"]["bpb"]
    assert outcome.summary["mixture_epochs"] == {}
    assert tiny_run.plan(outcome.run.path)["languages"] == ["en", "xx"]
    samples = outcome.summary["samples"]
    assert [sample["language"] for sample in samples] == ["en", "xx"]
    for sample in samples:
        number = sample["prompt"].split()[0]
        assert number.isdigit() and (int(number) % 4 == 0) == (sample["language"] == "xx")


def test_prompts_of_samples_have_whole_characters(tmp_path: Path) -> None:
    """A prompt of eight tokens, many of them parts of a character, could end within a character."""
    letters = [chr(0x0B85 + n) for n in (0, 1, 2, 3, 4, 5, 9, 10)]
    texts = ["".join(letters[(n * k + k) % 8] for k in range(60)) for n in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = CorpusOptions(vocab_size=300, val_fraction=0.3, workers=1, quiet=True)
    prepare([str(tmp_path / "text.jsonl")], tmp_path / "data", options)
    config = tiny_run.config(tmp_path / "data", schedule={"length": "2 steps"})
    for sample in tiny_run.train(tmp_path, config).summary["samples"]:
        assert sample["prompt"] and "\N{REPLACEMENT CHARACTER}" not in sample["prompt"]


class Stop(Callback):
    """Stops the run after seven steps."""

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        self.stop = stop

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        if row["step"] == 7:
            self.stop.requested = "enough"


def test_drawn_with_a_temperature_and_resumed(languages: Path, tmp_path: Path) -> None:
    """The resumed run is bitwise equal. The plan and the summary have the epochs counted row by row."""
    config = tiny_run.config(
        languages, data={"language_temperature": 5.0}, schedule={"length": "20 steps"}, batch={"tokens": 512}
    )
    straight = tiny_run.train(tmp_path, config, "straight")
    assert training_run.start(config, (tmp_path, "run", "run"), "a test", watch=Stop()).status == "enough"
    resumed = training_run.resume(tmp_path / "run")
    assert tiny_run.curve(tmp_path / "run") == tiny_run.curve(straight.run.path)

    dataset = PackedDataset(languages, "train", 32, language_temperature=5.0)
    component, _ = dataset.locate(config.seed, np.arange(20 * 512 // 32))
    counted = {
        name: (component == number).sum() / dataset.packings[number].num_rows
        for number, name in enumerate(dataset.component_names)
    }
    assert counted["xx"] > 1.5 * counted["en"] > 0
    for outcome in (straight, resumed):
        assert outcome.summary["mixture_epochs"] == pytest.approx(counted)
        assert tiny_run.plan(outcome.run.path)["mixture_epochs"] == pytest.approx(counted)
    assert counted["xx"] > 4 > counted["en"]
    (line,) = [line for line in tiny_run.events(resumed.run.path).splitlines() if "planned epochs" in line]
    assert f"xx {counted['xx']:.2f}; beyond 4" in line and ": xx; --data.language_temperature " in line
    temperature = float(line.split("--data.language_temperature ")[1].split()[0])
    repeated = PackedDataset(languages, "train", 32, language_temperature=temperature).epochs(20 * 512 // 32)
    assert repeated["xx"] == pytest.approx(4, rel=0.05)  # rows of a period are whole
    plain = tiny_run.config(languages, schedule={"length": "20 steps"}, batch={"tokens": 512})
    other = tiny_run.train(tmp_path, plain, "plain").run.path
    assert tiny_run.curve(other) != tiny_run.curve(straight.run.path)


def test_epochs_over_stages(languages: Path, tmp_path: Path) -> None:
    """The first half has rows of 16 tokens and the second of 32, and both count."""
    stages = [{"until": 0.5, "sequence_length": 16}, {"until": 1.0, "sequence_length": 32}]
    config = tiny_run.config(
        languages, data={"language_temperature": 2.0}, schedule={"length": "10 steps", "stages": stages}
    )
    found = tiny_run.train(tmp_path, config).summary["mixture_epochs"]
    expected = {"en": 0.0, "xx": 0.0}
    for length in (16, 32):
        dataset = PackedDataset(languages, "train", length, language_temperature=2.0)
        for name, epochs in dataset.epochs(5 * 256 // length).items():
            expected[name] += epochs
    assert found == pytest.approx(expected)


def test_a_temperature_and_weights_are_refused(languages: Path) -> None:
    with pytest.raises(ValueError, match="language_temperature"):
        tiny_run.config(languages, data={"language_temperature": 2.0, "weights": {"en": 1.0, "xx": 1.0}})
    with pytest.raises(ValueError, match="source_temperature"):
        tiny_run.config(languages, data={"language_temperature": 2.0, "source_temperature": 2.0})
    one = RunConfig.model_validate(tiny_run.settings(languages, data={"language_temperature": 2.0}, seed=1))
    assert one.data.language_temperature == 2.0


def test_a_temperature_needs_languages(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, data={"language_temperature": 2.0}, schedule={"length": "2 steps"})
    with pytest.raises(UsageError, match="language_temperature"):
        tiny_run.train(tmp_path, config)
