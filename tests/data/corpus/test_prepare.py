from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data import encoder
from deskside.data import tokenizer as bpe
from deskside.data.corpus import shard_worker
from deskside.data.corpus.analyze import CorpusOptions, TextSampler
from deskside.data.corpus.heldout import Holdout, tail_start, text_hash
from deskside.data.corpus.prepare import prepare
from deskside.data.corpus.prepare_report import Report
from deskside.data.reading import shards
from deskside.data.reading.index import ShardInfo, read_index
from deskside.data.reading.index_file import INDEX
from deskside.data.reading.verify import STAMP, verify
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import TEMPORARY_SUFFIX
from tests.data.data_corpus import make_corpus

SMALL: dict[str, Any] = {"vocab_size": 400, "workers": 1, "shard_bytes": 60_000, "quiet": True}


class _StopHere(Exception):
    """Ends a preparation without the cleanup after usage errors, as a kill would."""


def texts_of(out: Path, split: str) -> list[str]:
    """Return every document of a split, decoded from the shards."""
    index = read_index(out)
    tokenizer = bpe.load(out)
    found = []
    for shard in index.splits[split].shards:
        tokens = shards.open_tokens(out, shard, index.dtype)
        starts = [*shards.open_table(out, shard)["start"].tolist(), len(tokens) - 1]
        for a, b in pairwise(starts):
            assert tokens[a] == tokens[b] == index.tokenizer.eos_id
            found.append(tokenizer.decode(tokens[a + 1 : b].tolist(), skip_special_tokens=False))
    return found


def files_of(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(out.iterdir()) if p.name != STAMP}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "corpus.jsonl", 300)
    return tmp_path / "corpus.jsonl"


def test_every_document_comes_back_in_one_split(prepared: Path) -> None:
    records = [json.loads(line) for line in (prepared.parent / "corpus.jsonl").read_text().splitlines()]
    train, val = texts_of(prepared, "train"), texts_of(prepared, "val")
    assert sorted(train + val) == sorted(r["text"] for r in records)
    assert 10 < len(val) < 60 and len(read_index(prepared).splits["train"].shards) > 2


def test_index_counts_and_baselines(prepared: Path) -> None:
    index = read_index(prepared)
    tokenizer = bpe.load(prepared)
    for name, split in index.splits.items():
        texts = texts_of(prepared, name)
        assert split.documents == len(texts)
        assert split.text_bytes == split.token_text_bytes == sum(len(t.encode()) for t in texts)
    val = texts_of(prepared, "val")
    data = "".join(val).encode()
    assert index.splits["val"].gzip_bpb == pytest.approx(
        8 * len(gzip.compress(data, 9)) / len(data), abs=0.02
    )
    counts = np.ones(tokenizer.get_vocab_size())
    for text in texts_of(prepared, "train"):
        np.add.at(counts, tokenizer.encode(text).ids, 1)
    counts[0] = 0  # the end-of-text token has no text
    bits = sum(-np.log2(counts[tokenizer.encode(t).ids] / counts.sum()).sum() for t in val)
    assert index.splits["val"].unigram_bpb == pytest.approx(bits / len(data))
    assert {(t.source, t.lang) for t in index.tags} == {("src-en", "en"), ("src-hi", "hi")}


def test_processes_make_the_same_files(corpus: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], tmp_path / "one", CorpusOptions(**SMALL))
    prepare([str(corpus)], tmp_path / "two", CorpusOptions(**{**SMALL, "workers": 2}))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert multiprocessing.active_children() == []


def test_split_is_stable_when_sources_are_added(corpus: Path, tmp_path: Path) -> None:
    make_corpus(tmp_path / "more.jsonl", 200, seed=7)
    prepare([str(corpus)], tmp_path / "a", CorpusOptions(val_fraction=0.1, **SMALL))
    prepare(
        [str(tmp_path / "more.jsonl"), str(corpus)], tmp_path / "b", CorpusOptions(val_fraction=0.1, **SMALL)
    )
    assert set(texts_of(tmp_path / "a", "val")) <= set(texts_of(tmp_path / "b", "val"))
    assert not set(texts_of(tmp_path / "b", "val")) & set(texts_of(tmp_path / "b", "train"))


def test_validation_of_one_document_is_its_tail(tmp_path: Path) -> None:
    text = "".join(f"line {i} of the only book\n" for i in range(4000))
    (tmp_path / "book.txt").write_text(text)
    prepare([str(tmp_path / "book.txt")], tmp_path / "out", CorpusOptions(**SMALL))
    train, val = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "val")
    assert train[0] + val[0] == text and val[0].startswith("line ")
    assert len(val[0]) == pytest.approx(len(text) / 10, rel=0.01)
    with pytest.raises(UsageError, match="too short"):
        (tmp_path / "tiny.txt").write_text("a")
        prepare([str(tmp_path / "tiny.txt")], tmp_path / "tiny", CorpusOptions(**SMALL))


@given(st.text(alphabet="ab \n", min_size=1, max_size=100), st.integers(1, 100))
@settings(deadline=None)
def test_tail_start_stays_inside(text: str, tail: int) -> None:
    assert 0 <= tail_start(text.encode(), tail) <= len(text)


def test_validation_of_few_documents_is_their_tails(tmp_path: Path) -> None:
    records = make_corpus(tmp_path / "few.jsonl", 8)
    prepare([str(tmp_path / "few.jsonl")], tmp_path / "out", CorpusOptions(**SMALL))
    train, val = texts_of(tmp_path / "out", "train"), texts_of(tmp_path / "out", "val")
    assert len(train) == 8 and {r["text"] for r in records} <= {a + b for a in train for b in ["", *val]}
    assert len(val) >= 4 and 0.05 < sum(map(len, val)) / sum(map(len, train)) < 0.2
    (tmp_path / "short.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    prepare([str(tmp_path / "short.jsonl")], tmp_path / "short", CorpusOptions(**SMALL))
    assert sorted(texts_of(tmp_path / "short", "val") + texts_of(tmp_path / "short", "train")) == ["x", "y"]
    (tmp_path / "same.jsonl").write_text('{"text": "x"}\n' * 3)
    with pytest.raises(UsageError, match="too short"):
        prepare([str(tmp_path / "same.jsonl")], tmp_path / "same", CorpusOptions(**SMALL))


def test_validation_sources_are_kept_out_of_training(corpus: Path, tmp_path: Path) -> None:
    records = [json.loads(line) for line in corpus.read_text().splitlines()]
    held = [{"text": f"  {records[i]['text']}\n"} for i in (3, 50, 51)] + [{"text": "only in validation"}]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(r) + "\n" for r in held))
    report = prepare(
        [str(corpus)], tmp_path / "out", CorpusOptions(val_sources=[str(tmp_path / "val.jsonl")], **SMALL)
    )
    assert report.duplicates_of_validation == 3
    train = set(texts_of(tmp_path / "out", "train"))
    assert len(train) == 297 and not train & {r["text"].strip() for r in held}
    assert texts_of(tmp_path / "out", "val") == [r["text"] for r in held]


def test_val_fraction_zero_gives_no_validation(corpus: Path, tmp_path: Path) -> None:
    report = prepare([str(corpus)], tmp_path / "out", CorpusOptions(val_fraction=0, **SMALL))
    assert set(report.tokens) == {"train"} and report.gzip_bpb is None


def test_validation_text_does_not_train_the_tokenizer(tmp_path: Path) -> None:
    secret = "zyzzyva qwghlm zyzzyva qwghlm " * 50
    (tmp_path / "val.jsonl").write_text(json.dumps({"text": secret}) + "\n")
    (tmp_path / "train.jsonl").write_text(
        "".join(
            json.dumps({"text": t}) + "\n"
            for t in [secret, "plain words here " * 20, "other words there " * 20]
        )
    )
    prepare(
        [str(tmp_path / "train.jsonl")],
        tmp_path / "out",
        CorpusOptions(val_sources=[str(tmp_path / "val.jsonl")], **SMALL),
    )
    assert not any("zyz" in token for token in bpe.load(tmp_path / "out").get_vocab())


def test_bad_input_is_counted_in_report_and_index(corpus: Path, tmp_path: Path) -> None:
    with corpus.open("ab") as file:
        file.write(b'{"text": "caf\xe9"}\n{"body": 1}\n{"text": ""}\n{"te')
    report = prepare([str(corpus), str(tmp_path / "no.txt")], tmp_path / "out", CorpusOptions(**SMALL))
    counts = {reason: entry["count"] for reason, entry in report.bad_input["train"].items()}
    assert sum(counts.values()) == 5 and report.bad_input == read_index(tmp_path / "out").bad_input
    assert f"{corpus}:301" in report.bad_input["train"]["not UTF-8"]["first"][0]
    with pytest.raises(UsageError, match=r"corpus\.jsonl:301.*not UTF-8"):
        prepare([str(corpus)], tmp_path / "refused", CorpusOptions(on_bad="refuse", **SMALL))


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"body": 1}\n'])
def test_nothing_to_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "empty.jsonl").write_bytes(content)
    with pytest.raises(UsageError, match="the sources hold no document"):
        prepare([str(tmp_path / "empty.jsonl")], tmp_path / "out", CorpusOptions(**SMALL))


def test_repeating_keeps_all_shards_and_refuses_other_arguments(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = prepare([str(corpus)], out, CorpusOptions(**SMALL))
    before = files_of(out)
    again = prepare([str(corpus)], out, CorpusOptions(**SMALL))
    assert (again.made, again.kept) == (0, first.made) and files_of(out) == before
    with pytest.raises(UsageError, match=r"other arguments \(vocab_size: 400 -> 500\)"):
        prepare([str(corpus)], out, CorpusOptions(**{**SMALL, "vocab_size": 500}))
    with corpus.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(UsageError, match=rf"other arguments \(sources: 1 changed file \({corpus.name}\)\)"):
        prepare([str(corpus)], out, CorpusOptions(**SMALL))
    assert files_of(out) == before
    assert (
        prepare([str(corpus)], out, CorpusOptions(resume=False, **{**SMALL, "vocab_size": 300})).vocab_size
        == 300
    )


def change_in_place(path: Path) -> None:
    """Change a text without changing the size or the time of modification of its file."""
    before, text = path.stat(), path.read_text("utf-8")
    path.write_text(text.replace("river", "rover", 1), "utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("finished", [True, False])
def test_a_changed_text_is_refused_and_loses_nothing(corpus: Path, tmp_path: Path, finished: bool) -> None:
    out = tmp_path / "out"
    prepare([str(corpus)], out, CorpusOptions(**SMALL))
    if not finished:
        (out / INDEX).unlink()
    before = files_of(out)
    change_in_place(corpus)
    with pytest.raises(UsageError, match=r"corpus\.jsonl has changed.*--no-resume"):
        prepare([str(corpus)], out, CorpusOptions(**SMALL))
    assert files_of(out) == before
    prepare([str(corpus)], out, CorpusOptions(resume=False, **SMALL))
    assert any("rover" in text for split in ("train", "val") for text in texts_of(out, split))


def test_changed_validation_text_is_refused(corpus: Path, tmp_path: Path) -> None:
    options = CorpusOptions(val_sources=[str(tmp_path / "val.txt")], **SMALL)
    (tmp_path / "val.txt").write_text("the river of the validation text")
    prepare([str(corpus)], tmp_path / "out", options)
    change_in_place(tmp_path / "val.txt")
    with pytest.raises(UsageError, match=r"val\.txt has changed"):
        prepare([str(corpus)], tmp_path / "out", options)


def test_a_copied_or_touched_source_keeps_all_shards(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    made = prepare([str(corpus)], out, CorpusOptions(**SMALL)).made
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copyfile(corpus, tmp_path / "elsewhere/corpus.jsonl")
    monkeypatch.setattr("deskside.data.corpus.prepare.documents_of", pytest.fail)
    os.utime(corpus, (1, 1))
    for source in (copy, corpus):
        again = prepare([str(source)], out, CorpusOptions(**SMALL))
        assert (again.made, again.kept) == (0, made)


def test_a_text_that_changes_while_it_is_read_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shard_worker.make_shard

    def make_and_change(job: shard_worker.ShardJob) -> ShardInfo:
        change_in_place(corpus)
        return real(job)

    monkeypatch.setattr("deskside.data.corpus.prepare.make_shard", make_and_change)
    with pytest.raises(UsageError, match=r"corpus\.jsonl has changed"):
        prepare([str(corpus)], tmp_path / "out", CorpusOptions(**SMALL))


def test_a_preparation_of_an_earlier_version_is_compared_with_the_text(corpus: Path, tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / "out/prepare.json"
    made, whole = prepare([str(corpus)], out, CorpusOptions(**SMALL)).made, files_of(out)

    def without_records() -> None:
        content = json.loads(state.read_text())
        del content["files"]
        state.write_text(json.dumps(content))

    without_records()
    assert prepare([str(corpus)], out, CorpusOptions(**SMALL)).kept == made and files_of(out) == whole
    without_records()
    before = files_of(out)
    change_in_place(corpus)
    for _ in range(2):
        with pytest.raises(UsageError, match="has changed"):
            prepare([str(corpus)], out, CorpusOptions(**SMALL))
        assert files_of(out) == before


def test_foreign_directories_are_left_alone(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("precious")
    for resume in (True, False):
        with pytest.raises(UsageError, match="holds no prepared data"):
            prepare([str(corpus)], out, CorpusOptions(resume=resume, **SMALL))
    with pytest.raises(UsageError, match="is a file"):
        prepare([str(corpus)], out / "thesis.txt", CorpusOptions(**SMALL))
    assert (out / "thesis.txt").read_text() == "precious"


FOREIGN = ["prepare-notes.json", "train-notes.txt", "train-00099.bin", "val-results.csv", "tokenizer-mine.json",
           "draft.tmp", "folder/draft.tmp"]  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_replacing_refuses_folders_with_foreign_files(name: str, corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(corpus)], out, CorpusOptions(**SMALL))
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("precious")
    assert prepare([str(corpus)], out, CorpusOptions(**SMALL)).made == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    what = re.escape(f"holds {name.split('/')[0]}, which `deskside data prepare` did not write")
    with pytest.raises(UsageError, match=what):
        prepare([str(corpus)], out, CorpusOptions(resume=False, **{**SMALL, "vocab_size": 300}))
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "out"]


def test_foreign_prepare_json_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "prepare.json").write_text('{"recipe": "soup"}')
    for resume in (True, False):
        with pytest.raises(RunError, match=r"prepare\.json: is damaged, or was not written by"):
            prepare([str(corpus)], tmp_path, CorpusOptions(resume=resume, **SMALL))
    assert (tmp_path / "prepare.json").read_text() == '{"recipe": "soup"}'


def test_sources_inside_out_survive(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([str(corpus)], out, CorpusOptions(**SMALL))
    corpus.rename(out / "train-corpus.jsonl")
    for resume in (True, False):
        with pytest.raises(UsageError):
            prepare([str(out / "train-corpus.jsonl")], out, CorpusOptions(resume=resume, **SMALL))
    (out / "train-corpus.jsonl").rename(corpus)
    # The tokenizer in the replaced folder is read before the replacement.
    report = prepare(
        [str(corpus)], out, CorpusOptions(tokenizer=out, resume=False, val_fraction=0.3, **SMALL)
    )
    assert report.vocab_size > 300 and not verify(out).damaged


@pytest.mark.parametrize("link", [False, True])
def test_old_data_stays_until_the_new_data_is_complete(
    link: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if link:
        (tmp_path / "disk").mkdir()
        out.symlink_to(tmp_path / "disk", target_is_directory=True)
    prepare([str(corpus)], out, CorpusOptions(**SMALL))
    (out / f"train-00099.bin{TEMPORARY_SUFFIX}").write_bytes(b"half")  # left by a kill
    before = {name: data for name, data in files_of(out).items() if not name.endswith(TEMPORARY_SUFFIX)}
    again = {**SMALL, "vocab_size": 300}
    real, made = shard_worker.make_shard, 0

    def make(job: shard_worker.ShardJob) -> ShardInfo:
        nonlocal made
        made += 1
        if made == 3:
            raise _StopHere
        return real(job)

    with monkeypatch.context() as patch:
        patch.setattr("deskside.data.corpus.prepare.make_shard", make)
        with pytest.raises(_StopHere):
            prepare([str(corpus)], out, CorpusOptions(resume=False, **again))
    assert files_of(out) == before
    report = prepare([str(corpus)], out, CorpusOptions(resume=False, **again))
    assert (report.kept, report.out) == (2, str(out))
    prepare([str(corpus)], tmp_path / "straight", CorpusOptions(**again))
    assert files_of(out) == files_of(tmp_path / "straight") and out.is_symlink() == link
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_the_working_directory_is_not_replaced(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare([str(corpus)], tmp_path / "out", CorpusOptions(**SMALL))
    monkeypatch.chdir(tmp_path / "out")
    assert prepare([str(corpus)], ".", CorpusOptions(**SMALL)).made == 0
    with pytest.raises(
        UsageError, match=r"--out \.: is or contains the current directory, and so cannot be replaced"
    ):
        prepare([str(corpus)], ".", CorpusOptions(resume=False, **SMALL))


def test_interrupted_replacement_accepts_other_arguments(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare([str(corpus)], out, CorpusOptions(**SMALL))

    def refuse(*args: object) -> None:
        raise OSError(16, "Device or resource busy")

    with (
        monkeypatch.context() as patch,
        pytest.raises(RunError, match=r"busy.*The new data is in .*\.out\.new"),
    ):
        patch.setattr("deskside.utils.files.os.rename", refuse)
        prepare([str(corpus)], out, CorpusOptions(resume=False, **{**SMALL, "vocab_size": 310}))
    assert read_index(out).arguments["vocab_size"] == 400
    assert (
        prepare([str(corpus)], out, CorpusOptions(resume=False, **{**SMALL, "vocab_size": 300})).vocab_size
        == 300
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["corpus.jsonl", "out"]


def test_failed_preparation_does_not_block_the_next_one(corpus: Path, tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.jsonl", tmp_path / "out"
    bad.write_text('{"text": "x"}\n' * 3)
    with pytest.raises(UsageError, match="too short"):
        prepare([str(bad)], out, CorpusOptions(**SMALL))
    assert not out.exists()
    out.mkdir()
    with pytest.raises(UsageError, match="the sources hold no document"):
        prepare([str(bad)], out, CorpusOptions(field="body", **SMALL))
    assert list(out.iterdir()) == []
    assert prepare([str(corpus)], out, CorpusOptions(**SMALL)).made > 0


def test_other_arguments_are_accepted_before_the_first_pass_ends(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **given: object) -> None:
        raise _StopHere  # as a kill would

    with monkeypatch.context() as patch, pytest.raises(_StopHere):
        patch.setattr("deskside.data.corpus.prepare.analyze", stop)
        prepare([str(corpus)], tmp_path / "out", CorpusOptions(**SMALL))
    assert (tmp_path / "out" / "prepare.json").exists()
    assert (
        prepare([str(corpus)], tmp_path / "out", CorpusOptions(**{**SMALL, "vocab_size": 300})).vocab_size
        == 300
    )


def test_only_damaged_shards_are_made_again(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = prepare([str(corpus)], out, CorpusOptions(**SMALL)).made
    before = files_of(out)
    for name in ("train-00001.bin", "val-00000.idx.npy"):
        data = bytearray((out / name).read_bytes())
        data[-3] ^= 1
        (out / name).write_bytes(data)
    again = prepare([str(corpus)], out, CorpusOptions(**SMALL))
    assert (again.made, again.kept) == (2, made - 2) and files_of(out) == before
    (out / "train-counts.npy").write_bytes(b"damaged")
    again = prepare([str(corpus)], out, CorpusOptions(**SMALL))
    assert (again.made, again.kept) == (0, made) and files_of(out) == before
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match=r"tokenizer\.json is damaged"):
        prepare([str(corpus)], out, CorpusOptions(**SMALL))


@pytest.mark.parametrize("after", [0, 1, 3])
def test_interrupted_after_some_shards(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    out = tmp_path / "out"
    made = 0
    real = shard_worker.make_shard

    def make(job: shard_worker.ShardJob) -> ShardInfo:
        nonlocal made
        if made == after:
            (out / f"train-00099.bin{TEMPORARY_SUFFIX}").write_bytes(b"half")
            raise _StopHere
        made += 1
        return real(job)

    monkeypatch.setattr("deskside.data.corpus.prepare.make_shard", make)
    with pytest.raises(_StopHere):
        prepare([str(corpus)], out, CorpusOptions(**SMALL))
    assert not list(out.glob(f"*{TEMPORARY_SUFFIX}")) and not (out / "index.json").exists()
    monkeypatch.undo()
    assert prepare([str(corpus)], out, CorpusOptions(**SMALL)).kept == after
    prepare([str(corpus)], tmp_path / "straight", CorpusOptions(**SMALL))
    assert files_of(out) == files_of(tmp_path / "straight")


def test_full_disk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    real = os.fsync
    count = 0

    def fsync(handle: int) -> None:
        nonlocal count
        count += 1
        if count == 12:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match=r"No space left.*free some space"):
        prepare([str(corpus)], out, CorpusOptions(**SMALL))
    assert not list(out.glob(f"*{TEMPORARY_SUFFIX}"))
    monkeypatch.undo()
    assert prepare([str(corpus)], out, CorpusOptions(**SMALL)).kept > 0
    assert verify(out).damaged == {}


def _kill_run(corpus: Path, out: Path, delay: float, signal_number: int) -> None:
    code = (
        "import sys\nfrom deskside.data.corpus.analyze import CorpusOptions\n"
        "from deskside.data.corpus.prepare import prepare\n"
        "if __name__ == '__main__':\n"
        "    options = CorpusOptions(vocab_size=400, workers=2, shard_bytes=60_000, quiet=True)\n"
        "    prepare([sys.argv[1]], sys.argv[2], options)\n"
    )
    script = out.parent / "run.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(script), str(corpus), str(out)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(delay)
    os.killpg(process.pid, signal_number)
    process.wait(timeout=60)


@pytest.mark.parametrize("seed", [0])
def test_killed_at_a_random_moment(corpus: Path, tmp_path: Path, seed: int) -> None:
    _check_kills(corpus, tmp_path, seed, kills=2)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_killed_at_many_random_moments(corpus: Path, tmp_path: Path, seed: int) -> None:
    _check_kills(corpus, tmp_path, seed, kills=8)


def _check_kills(corpus: Path, tmp_path: Path, seed: int, kills: int) -> None:
    rng = np.random.default_rng(seed)
    out = tmp_path / "out"
    for _ in range(kills):
        _kill_run(corpus, out, float(rng.uniform(0.4, 1.6)), signal.SIGKILL)
    report: Report = prepare([str(corpus)], out, CorpusOptions(**SMALL))
    assert report.made + report.kept == sum(len(s.shards) for s in read_index(out).splits.values())
    prepare([str(corpus)], tmp_path / "straight", CorpusOptions(**SMALL))
    assert files_of(out) == files_of(tmp_path / "straight")


def test_existing_tokenizer(corpus: Path, prepared: Path, tmp_path: Path) -> None:
    prepare([str(corpus)], tmp_path / "out", CorpusOptions(tokenizer=prepared, **SMALL))
    ours, theirs = read_index(tmp_path / "out"), read_index(prepared)
    assert ours.tokenizer == theirs.tokenizer


@pytest.mark.parametrize("library", ["fastokens", "tokenizers"])
def test_a_tokenizer_that_truncates_and_pads_loses_no_text(
    library: str, corpus: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "fastokens":
        pytest.importorskip("fastokens")
    else:
        monkeypatch.setattr(
            "deskside.data.corpus.prepare.choose_encoder", lambda *_: encoder.tokenizers_info("a test")
        )
    tokenizer = bpe.load(prepared)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=4000)
    bpe.save(tokenizer, tmp_path / "cut")
    for name, given_tokenizer in (("whole", prepared), ("out", tmp_path / "cut")):
        prepare([str(corpus)], tmp_path / name, CorpusOptions(tokenizer=str(given_tokenizer), **SMALL))
    whole, out = (read_index(tmp_path / name) for name in ("whole", "out"))
    assert out.encoder and out.encoder.library == library
    assert out.splits == whole.splits


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 258}, "at least 259"),
        ({"vocab_size": 99999999999}, "at most 1048576"),
        ({"vocab_size": 2**70}, "at most 1048576"),
        ({"val_fraction": 1.0}, "val-fraction"),
        ({"workers": 0}, "workers"),
        ({"val_sources": ("bundled:tiny_shakespeare.txt",), "val_fraction": 0.1}, "val-fraction"),
        ({"tokenizer": "nowhere"}, "no such tokenizer"),
        ({"tokenizer": "~nobody/tokenizer.json"}, "no such tokenizer"),
    ],
)
def test_wrong_arguments(corpus: Path, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare([str(corpus)], tmp_path / "out", CorpusOptions(**{**SMALL, **arguments}))
    with pytest.raises(UsageError, match="no source"):
        prepare([], tmp_path / "out")
    with pytest.raises(UsageError, match="an empty text names no source"):
        prepare([""], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@given(st.permutations(list(range(40))))
@settings(max_examples=30, deadline=None)
def test_sample_does_not_depend_on_order(order: list[int]) -> None:
    documents = [f"document {i} " * (1 + i * 37 % 23) for i in range(40)]

    def sample(numbers: list[int]) -> list[str]:
        sampler = TextSampler(1500, 0)  # bytes
        for i in numbers:
            text = documents[i].encode()
            sampler.add(text, text_hash(text), len(text), 0)
        return list(sampler.texts(Holdout()))

    chosen = sample(order)
    assert chosen == sample(list(range(40)))
    assert 500 < sum(map(len, chosen)) <= 1500


def test_fractions_nest() -> None:
    keys = [text_hash(b"%d" % i) for i in range(4000)]
    small = {k for k in keys if Holdout(0, 0.01).is_chosen(k)}
    large = {k for k in keys if Holdout(0, 0.05).is_chosen(k)}
    assert small < large and 120 < len(large) < 280
    assert {k for k in keys if Holdout(1, 0.05).is_chosen(k)} != large


def test_preparing_does_not_import_torch() -> None:
    modules = "deskside.data.corpus.prepare, deskside.cli.data, deskside.data.reading.rows"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_data_encoded_by_either_library_is_the_same(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastokens")
    records = [
        {"text": "<|endoftext|> <|im_start|>user\nforged <|im_end|>", "source": "web"},
        {
            "text": "\x00\x01 control \u0085 \u2028 e\u0301 \u0301 नमस्ते 🎉\u200d👩" * 50,
            "source": "web",
            "lang": "hi",
        },
        {"text": "12.34" * 50_000, "source": "books"},  # there is no place to cut
        {"text": "Many words in a long text.\n" * 2_000, "source": "books"},
    ]
    with corpus.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    options = CorpusOptions(**{**SMALL, "workers": 2})
    with monkeypatch.context() as patch:
        patch.setattr(
            "deskside.data.corpus.prepare.choose_encoder",
            lambda *_: encoder.tokenizers_info("is not asked for"),
        )
        prepare([str(corpus)], tmp_path / "slow", options)
    prepare([str(corpus)], tmp_path / "fast", options)
    slow, fast = (read_index(tmp_path / name) for name in ("slow", "fast"))
    assert slow.encoder and (slow.encoder.library, slow.encoder.reason) == ("tokenizers", "is not asked for")
    assert fast.encoder and (fast.encoder.library, fast.encoder.reason) == ("fastokens", "")
    assert slow.splits == fast.splits and slow.tags == fast.tags
    json_files = {"index.json", "prepare.json"}
    same = [
        {n: d for n, d in files_of(tmp_path / name).items() if n not in json_files}
        for name in ("slow", "fast")
    ]
    assert same[0] == same[1] and len(same[0]) > 9


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_process_in_one_folder_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    options, out, publish = CorpusOptions(**SMALL), tmp_path / "out", shards.publish
    refused = 0

    def prepare_again(folder: Path, info: ShardInfo) -> None:
        nonlocal refused
        with pytest.raises(UsageError, match="another process"):
            prepare([str(corpus)], out, replace(options, resume=resume))
        refused += 1
        publish(folder, info)  # the temporary files are still there

    with monkeypatch.context() as patch:
        patch.setattr(shards, "publish", prepare_again)
        prepare([str(corpus)], out, options)
        first = refused
        assert first > 1
        prepare([str(corpus)], out, replace(options, resume=False))  # replaces the complete data set
    assert refused == 2 * first and verify(out).damaged == {}
    assert prepare([str(corpus)], out, options).made == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".out")) == []


def test_a_resumed_preparation_says_why_it_changes_the_library(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastokens")
    prepare([str(corpus)], tmp_path / "out", CorpusOptions(**SMALL))
    state = json.loads((tmp_path / "out/prepare.json").read_text())
    assert state["scan"]["encoder"]["library"] == "fastokens"
    before = files_of(tmp_path / "out")
    state["scan"]["encoder"]["version"] = "0.0.1"
    (tmp_path / "out/prepare.json").write_text(json.dumps(state))
    (tmp_path / "out/train-00001.bin").unlink()
    prepare([str(corpus)], tmp_path / "out", CorpusOptions(**{**SMALL, "quiet": False}))
    assert re.search(r"encode with tokenizers .*0\.0\.1", capsys.readouterr().err)
    after = files_of(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} <= {"index.json", "prepare.json"}
