"""The benchmark of upcycling, with runs of a few steps on a tiny model."""

import json
from pathlib import Path

import pytest

from benchmarks import upcycling
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.run.record import read_run
from tests.train.tiny_run import ONE_THREAD, SHAPE, write_text


def test_all_ends_cost_the_same_time(tmp_path: Path) -> None:
    options = upcycling.parse(
        ["run", str(tmp_path), "--data", "D", "--minutes", "3", "--model.qk_norm", "true"]
    )
    made = upcycling.commands(2, options)
    minutes = {
        name: float(words[words.index("--hours") + 1].removesuffix("m")) for name, words in made.items()
    }
    assert list(minutes.values()) == [3, 3, 3, 6] and list(minutes) == [
        "dense-2", "dense-goes-on-2", "upcycled-2", "scratch-2"
    ]  # fmt: skip
    for words in made.values():
        assert words[words.index("--seed") + 1] == "2" and words[words.index("--model.qk_norm") + 1] == "true"


def test_the_table_pairs_seeds(tmp_path: Path) -> None:
    for arm, losses in (
        ("dense-goes-on", (1.0, 2.0, 4.0)),
        ("upcycled", (0.9, 1.8, 3.6)),
        ("scratch", (1.1,)),
    ):
        for seed, bpb in enumerate(losses, start=1):
            folder = tmp_path / f"{arm}-{seed}"
            folder.mkdir()
            (folder / "summary.json").write_text(json.dumps({"val_bpb": bpb}))
            (folder / "metrics.jsonl").write_text(
                json.dumps({"step": 1, "tokens": 1, "loss": 3.0 * seed}) + "\n"
            )
    (tmp_path / "upcycled-4").mkdir()  # has not finished
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in upcycling.table(tmp_path)[2:]]
    assert rows == [
        ["dense-goes-on", "3", "2.3333", "", "6.0000"],
        ["upcycled", "3", "2.1000", "-10.00% (-10.00% to -10.00%)", "6.0000"],
        ["scratch", "1", "1.1000", "+10.00%", "3.0000"],
    ]


def test_two_jobs_share_a_seed() -> None:
    def names(only: str) -> list[str]:
        return list(upcycling.commands(1, upcycling.parse(["run", "O", "--data", "D", "--only", only])))

    assert names("dense-goes-on,upcycled") == ["dense-1", "dense-goes-on-1", "upcycled-1"]
    assert names("scratch") == ["scratch-1"]
    with pytest.raises(SystemExit) as refused:
        names("nothing")
    assert refused.value.code == 2


@pytest.mark.full
def test_runs_begin_where_the_dense_model_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ONE_THREAD.items():
        monkeypatch.setenv(name, value)
    write_text(tmp_path / "text.txt")
    data = tmp_path / "data"
    prepare([str(tmp_path / "text.txt")], data, CorpusOptions(vocab_size=300))
    out = tmp_path / "runs"
    preset = tmp_path / "tiny.toml"
    preset.write_text("[model]\n" + "".join(f"{key} = {value}\n" for key, value in SHAPE.items()))
    more = "--batch.sequence_length 32 --batch.tokens 256 --compute.device cpu --evaluate.tokens 2048"
    words = ["--data", str(data), "--seeds", "1", "--minutes", "0.3", "--preset", str(preset)]
    mixture = ["--experts", "4", "--width", str(SHAPE["intermediate_size"] // 2)]
    given = ["run", str(out), *words, *mixture, *more.split()]
    assert upcycling.main(given) == 0
    first = {arm: read_run(out / f"{arm}-1").metrics[0]["loss"] for arm in upcycling.ARMS}
    assert first["upcycled"] == pytest.approx(first["dense-goes-on"], abs=1e-2) and first["scratch"] > 5
    before = capsys.readouterr().out.splitlines()[-4:]
    assert upcycling.main(given) == 0  # everything has finished
    assert capsys.readouterr().out.splitlines()[-4:] == before
