"""The sentences with which commands end."""

from pathlib import Path

import pytest

from deskside.cli.answer import pretraining_answer
from deskside.run.directory import RunDirectory
from tests.train import tiny_run


@pytest.mark.parametrize(
    ("bpb", "said"),
    [
        (2.0, ["less than gzip -9 (3.600)."]),
        (2.6, ["less than gzip -9 (3.600)", "more than a unigram model (2.500)"]),
        (3.7, ["more than gzip -9 (3.600)", "more than a unigram model (2.500)"]),
    ],
)
def test_the_answer_names_every_baseline_that_is_not_reached(
    bpb: float, said: list[str], tmp_path: Path
) -> None:
    config = tiny_run.config("data").model_dump(mode="json")
    run = RunDirectory(tmp_path)
    run.write_json("run.json", {"schema_version": 1, "config": config})
    known = {"val_bpb": bpb, "gzip_bpb": 3.6, "unigram_bpb": 2.5, "val_share": 0.06}
    answer = pretraining_answer(run, {"tokens": 1000, "seconds": 9.0, "clock": "wall", **known})
    assert all(words in answer for words in said) and "6 % of" in answer
    assert ("unigram" in answer) == (bpb > 2.5)
