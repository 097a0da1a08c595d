"""The benchmark of replicas, with two processes on a CPU in place of two GPUs."""

import json
from pathlib import Path

import pytest

from benchmarks import replicas
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from tests.train.tiny_run import ONE_THREAD, SHAPE, write_text


@pytest.mark.full
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    write_text(tmp_path / "text.txt")
    prepare([str(tmp_path / "text.txt")], tmp_path / "data", CorpusOptions(vocab_size=300))
    model = [f"--model.{key}={value}" for key, value in SHAPE.items()]
    words = f"--data {tmp_path / 'data'} --preset demo --tokens 256 --steps 6 --warmup 2 --rounds 1 --optimizers muon"
    more = "--gradient-dtypes bfloat16 --batch.sequence_length 32 --compute.device cpu --compute.attention reference"
    file = tmp_path / "result.json"
    folder = tmp_path / "runs"
    folder.mkdir()
    given = [*words.split(), *more.split(), *model, "--folder", str(folder), "--json", str(file)]
    assert replicas.main(given) == 0
    (result,) = json.loads(file.read_text())
    assert (result["optim.name"], result["parallel.gradient_dtype"]) == ("muon", "bfloat16")
    one, two = (sorted(result["tokens_per_second"][gpus]) for gpus in ("1", "2"))
    assert len(one) == len(two) == 4
    assert result["efficiency"] == pytest.approx((two[1] + two[2]) / (one[1] + one[2]) / 2)
    assert f"{result['efficiency']:.1%} of 2 times one" in capsys.readouterr().out
    assert not list(folder.iterdir())
