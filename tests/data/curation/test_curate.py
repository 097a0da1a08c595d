"""`curate` as a whole: nothing is lost, it is idempotent and resumable, and it survives hostile input."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deskside.data.corpus.analyze import CorpusOptions, documents_of
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.sources import Source
from deskside.data.curation import worker
from deskside.data.curation.curate import CurationOptions, curate
from deskside.data.curation.state import STATE
from deskside.data.curation.words import PIECE, pieces
from deskside.utils import files
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import TEMPORARY_SUFFIX
from tests.data.curation.test_quality import SENTENCES, varied

QUIET = CorpusOptions(quiet=True, workers=1)


def settings_of(**changes: Any) -> CurationOptions:
    return CurationOptions(**{"reading": QUIET, "filters": (), **changes})


def write_lines(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")
    return str(path)


def read(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of kept/ or removed/, read with zstandard and json only."""
    import zstandard

    records = []
    for path in sorted((folder / kind).glob("*.zst")):
        with zstandard.open(path, "rt", encoding="utf-8", newline="\n") as lines:
            records += [json.loads(line) for line in lines]
    return records


def content(folder: Path) -> dict[str, bytes]:
    """Return the content of every file by its path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def edited(text: str, seed: int, edits: int = 1) -> str:
    rng, words = np.random.default_rng(seed), text.split(" ")
    for at in rng.integers(0, len(words), edits):
        words[at] = "edited"
    return " ".join(words)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    records = [{"text": varied(lang, 40), "lang": lang, "source": f"src:{lang}"} for lang in SENTENCES]
    records += [{"text": f" {r['text']}\n", "source": "copy"} for r in records[:3]]
    records += [{"text": edited(r["text"], 1), "lang": r["lang"], "source": "near"} for r in records[:9]]
    records += [{"text": "short", "lang": "en"}, {"text": ""}, 7]
    return write_lines(tmp_path / "corpus.jsonl", records)


def test_documents_are_kept_with_tags_or_listed_with_one_reason(corpus: str, tmp_path: Path) -> None:
    report = curate([corpus], tmp_path / "out", settings_of(filters=("gopher",), batch_bytes=20_000))
    kept, removed = read(tmp_path / "out", "kept"), read(tmp_path / "out", "removed")
    assert [(r["source"], r["lang"]) for r in kept] == [("src", lang) for lang in SENTENCES]
    assert Counter(r["reason"] for r in removed) == {
        "exact duplicate": 3,
        "near duplicate": 9,
        "gopher: words": 1,
    }
    ids = {r["id"]: r for r in kept}
    for record in removed:
        if "duplicate" in record["reason"]:
            # the language is identified if none was given
            assert ids[record["kept"]]["lang"] == record["lang"]
    assert report["documents"] == {"kept": 9, **Counter(r["reason"] for r in removed)}
    assert sum(e["count"] for e in report["bad_input"].values()) == 2
    unreadable = (tmp_path / "out/removed/unreadable.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["id"] for line in unreadable] == [f"{corpus}:23", f"{corpus}:24"]
    prepared = documents_of([Source.parse(str(tmp_path / "out/kept"))], BadInputLog("refuse"), QUIET)
    assert [(d.text, d.source, d.lang) for d in prepared] == [
        (r["text"], r["source"], r["lang"]) for r in kept
    ]
    assert not (tmp_path / "out/work").exists() and "gopher: words" in (tmp_path / "out/report.md").read_text(
        "utf-8"
    )


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["a b c d e f g h", "A b c d e f g h!", "a b c d e f g", " a b c d e f g h\n", "x"]),
        st.text(min_size=1, max_size=30).filter(
            lambda t: t.strip() and not any(0xD800 <= ord(c) < 0xE000 for c in t)
        ),
    ),
    min_size=1,
    max_size=12,
)


@given(TEXTS, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=12)
def test_idempotent_complete_and_independent_of_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], random: Any
) -> None:
    assume(any(map(is_document, texts)))  # otherwise the sources are refused
    folder = tmp_path_factory.mktemp("curate")
    options = settings_of(filters=("gopher",) if len(texts) % 3 == 0 else (), batch_bytes=60)
    source = write_lines(folder / "a.jsonl", [{"text": text, "lang": "xx"} for text in texts])
    report = curate([source], folder / "one", options)
    kept, removed = read(folder / "one", "kept"), read(folder / "one", "removed")
    assert sorted(r["text"] for r in kept + removed) + [""] * sum(
        e["count"] for e in report["bad_input"].values()
    ) == [*sorted(t for t in texts if is_document(t)), *([""] * sum(not is_document(t) for t in texts))]
    assert len({r["id"] for r in kept + removed}) == len(kept + removed)
    if kept:
        again = curate([str(folder / "one/kept")], folder / "two", options)
        assert again["documents"] == {"kept": len(kept)}
    random.shuffle(texts)
    source = write_lines(folder / "b.jsonl", [{"text": text, "lang": "xx"} for text in texts])
    curate([source], folder / "three", options)
    for name in ("one", "three"):
        text_of = {r["id"]: r["text"].strip() for r in read(folder / name, "kept")}
        for record in read(folder / name, "removed"):
            if record["reason"] in (worker.EXACT, worker.NEAR):
                equal = record["text"].strip() == text_of[record["kept"]]
                assert equal == (record["reason"] == worker.EXACT)


def is_document(text: str) -> bool:
    data = text.encode()
    return bool(text.strip()) and sum(b < 32 and b not in b"\t\n\v\f\r\b\x1b" for b in data) <= 0.1 * len(
        data
    )


@pytest.mark.full
def test_processes_write_the_same_bytes(corpus: str, tmp_path: Path) -> None:
    two = CorpusOptions(quiet=True, workers=2)
    for name, reading in (("one", QUIET), ("two", two)):
        curate([corpus], tmp_path / name, settings_of(reading=reading, batch_bytes=20_000))
    assert content(tmp_path / "one") == content(tmp_path / "two")


CHILD = """
import sys, time
from deskside.data.curation import curate as module, worker
from tests.data.curation.test_curate import settings_of
original, limit = getattr(worker, sys.argv[3]), int(sys.argv[4])
calls = 0
def slow(*arguments):
    global calls
    calls += 1
    if calls > limit:
        print("stopped", flush=True)
        time.sleep(600)
    return original(*arguments)
setattr(worker, sys.argv[3], slow)
module.curate([sys.argv[1]], sys.argv[2], settings_of(batch_bytes=20_000))
"""


@pytest.mark.parametrize(
    ("step", "calls"),
    [("write", 2), *(pytest.param(*case, marks=pytest.mark.full) for case in (("analyse", 2), ("write", 0)))],
)
def test_a_killed_curation_continues_with_the_same_bytes(
    corpus: str, tmp_path: Path, step: str, calls: int
) -> None:
    arguments = [sys.executable, "-c", CHILD, corpus, str(tmp_path / "out"), step, str(calls)]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "stopped\n"
        child.send_signal(signal.SIGKILL)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*-000*")}
    curate([corpus], tmp_path / "out", settings_of(batch_bytes=20_000))
    assert before and all(p.stat().st_mtime_ns == t for p, t in before.items() if p.exists())
    curate([corpus], tmp_path / "whole", settings_of(batch_bytes=20_000))
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_second_process_in_one_folder_is_refused(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, write, refused = tmp_path / "out", worker.write, 0

    def curate_again(*arguments: Any) -> Any:
        nonlocal refused
        for resume in (True, False):
            with pytest.raises(UsageError, match="another process"):
                curate(
                    [corpus], out, settings_of(reading=CorpusOptions(workers=1, quiet=True, resume=resume))
                )
        refused += 1
        return write(*arguments)

    monkeypatch.setattr(worker, "write", curate_again)
    curate([corpus], out, settings_of())
    assert refused > 0


def test_finished_work_is_verified_and_repaired(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    curate([corpus], out, settings_of(batch_bytes=20_000))
    expected = content(out)
    shard = next((out / "kept").glob("*.zst"))
    shard.write_bytes(b"damaged")
    curate([corpus], out, settings_of(batch_bytes=20_000))
    assert content(out) == expected
    with pytest.raises(UsageError, match="similarity"):
        curate([corpus], out, settings_of(similarity=0.9))
    mine = out / "kept/mine.txt"
    mine.write_text("not deskside's")
    replaced = settings_of(similarity=None, reading=CorpusOptions(quiet=True, workers=1, resume=False))
    assert curate([corpus], out, replaced)["documents"].get(worker.NEAR) is None
    assert mine.read_text() == "not deskside's"
    (out / STATE).write_text("{")
    with pytest.raises(RunError, match="damaged"):
        curate([corpus], out, settings_of())


def test_a_full_disk_is_one_line_and_loses_nothing(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", full)
        with pytest.raises(RunError, match="No space left"):
            curate([corpus], tmp_path / "out", settings_of())
    curate([corpus], tmp_path / "out2", settings_of())
    calls = 0
    sync = files.sync

    def later(path: Path) -> None:
        nonlocal calls
        calls += 1
        full(path) if calls == 8 else sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", later)
        with pytest.raises(RunError, match="No space left"):
            curate([corpus], tmp_path / "out3", settings_of())
    curate([corpus], tmp_path / "out3", settings_of())
    assert content(tmp_path / "out3") == content(tmp_path / "out2")


def test_hostile_text(tmp_path: Path) -> None:
    lines = [
        b'{"text": "\\ud800 lone surrogate"}',
        b'{"text": "null \\u0000 in a text that is otherwise fine"}',
        b'{"text": "' + b"\xff" * 20 + b'"}',
        b'{"text": ' + b"[" * 3000,
        json.dumps(
            {
                "text": "\u202e\ufeff\U0010ffff \u0301\u0301\u0301 combining",
                "source": "\ud800",
                "lang": "zz-\x00",
            }
        ).encode(),
        json.dumps({"text": "#" * 3000}).encode(),
        json.dumps({"text": "a " * 100_000}).encode(),
        json.dumps({"text": "b" * 1_100_000}).encode(),
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b damaged")
    report = curate(
        [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.gz")], tmp_path / "out", settings_of()
    )
    assert report["documents"]["kept"] == 5 and sum(e["count"] for e in report["bad_input"].values()) == 4
    filtered = curate([str(tmp_path / "a.jsonl")], tmp_path / "out2", settings_of(filters=("gopher",)))
    assert filtered["documents"]["kept"] == 0
    with pytest.raises(UsageError):
        curate([str(tmp_path / "b.jsonl.gz")], tmp_path / "out3", settings_of())


@pytest.mark.full
def test_a_line_of_100_mb(tmp_path: Path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        file.write('{"text": "' + varied("en", 10).replace("\n", " ") * 100_000 + '"}\n')
    assert (tmp_path / "a.jsonl").stat().st_size > 90e6
    start = time.monotonic()
    report = curate([str(tmp_path / "a.jsonl")], tmp_path / "out", settings_of(filters=("gopher",)))
    assert sum(report["documents"].values()) == 1 and time.monotonic() - start < 240


def test_languages(tmp_path: Path) -> None:
    records = [{"text": varied(lang, 5)} for lang in SENTENCES]
    records += [{"text": varied("ta", 6), "lang": "en"}, {"text": varied("ta", 7), "lang": "ta_Taml"}]
    source = write_lines(tmp_path / "a.jsonl", records)
    curate([source], tmp_path / "all", settings_of(similarity=None))
    kept, removed = read(tmp_path / "all", "kept"), read(tmp_path / "all", "removed")
    assert [r["lang"] for r in kept] == [*SENTENCES, "ta_Taml"]
    assert [(r["reason"], r["lang"]) for r in removed] == [("language", "en")]
    report = curate([source], tmp_path / "some", settings_of(languages=("ta", "hi"), similarity=None))
    assert report["documents"] == {"kept": 3, "language": 8}


def test_contaminated_documents_are_removed_and_name_the_task(tmp_path: Path) -> None:
    item = "Which of these twelve entirely ordinary words makes this question longer than thirteen of them?"
    records = [{"text": f"{varied('en', 5)} {item} {varied('en', 3)}"}, {"text": varied("en", 9)}]
    options = settings_of(items={"quiz": [item]})
    report = curate([write_lines(tmp_path / "a.jsonl", records)], tmp_path / "out", options)
    assert report["documents"] == {"kept": 1, "contaminated": 1}
    (sample,) = report["samples"]["contaminated"]
    assert sample["detail"].startswith("quiz: Which of these twelve")


def test_contamination_across_a_cut_of_a_long_document_is_found(tmp_path: Path) -> None:
    item = "Which of these twelve entirely ordinary words makes this question longer than thirteen of them?"
    around = varied("en", 40)
    long = (around * (PIECE // len(around) + 1))[: PIECE - 40]
    records = [{"text": f"{long} {item} {around}"}, {"text": f"{long} {around}"}]
    options = settings_of(items={"quiz": [item]}, similarity=None)
    report = curate([write_lines(tmp_path / "a.jsonl", records)], tmp_path / "out", options)
    assert report["documents"] == {"kept": 1, "contaminated": 1}
    cut = len(pieces(records[0]["text"])[0])
    assert 0 < cut - records[0]["text"].index(item) < len(item)


def test_a_copy_of_a_near_duplicate_is_a_near_duplicate(tmp_path: Path) -> None:
    text = varied("en", 30)
    records = [{"text": text}, {"text": edited(text, 1)}, {"text": edited(text, 1)}, {"text": text}]
    source = write_lines(tmp_path / "a.jsonl", records)
    curate([source], tmp_path / "out", settings_of())
    removed = [(r["reason"], r["kept"]) for r in read(tmp_path / "out", "removed")]
    assert removed == [(worker.NEAR, f"{source}:1")] * 2 + [(worker.EXACT, f"{source}:1")]


def test_long_documents_are_analysed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deskside.data.curation.words.PIECE", 2000)
    monkeypatch.setattr(worker, "_BLOCK", 3000)
    text = varied("en", 200)
    source = write_lines(
        tmp_path / "a.jsonl", [{"text": text}, {"text": edited(text, 3, 5)}, {"text": varied("hi", 90)}]
    )
    report = curate([source], tmp_path / "out", settings_of(filters=("gopher", "fineweb")))
    assert report["documents"] == {"kept": 2, "near duplicate": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"filters": ("gofer",)},
        {"similarity": 0.1},
        {"similarity": 2.0},
        {"reading": CorpusOptions(workers=0)},
        {"languages": ("en", "")},
    ],
)
def test_wrong_arguments(corpus: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        curate([corpus], tmp_path / "out", settings_of(**changes))
    assert not (tmp_path / "out").exists()


def test_other_files_in_out_are_refused(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("x")
    with pytest.raises(UsageError, match="not empty"):
        curate([corpus], tmp_path / "out", settings_of())
    with pytest.raises(UsageError, match="no source"):
        curate([], tmp_path / "new", settings_of())


def change_in_place(path: Path, old: str, new: str) -> None:
    """Change a text without changing the size or the time of modification of its file."""
    before, text = path.stat(), path.read_text("utf-8")
    assert text.count(old) == 1 and len(old) == len(new)
    path.write_text(text.replace(old, new), "utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("complete", [True, False])
def test_a_changed_text_is_refused_and_loses_nothing(tmp_path: Path, complete: bool) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(source, [{"text": varied("en", 9)}, {"text": "one two three"}])
    curate([str(source)], out, settings_of())
    if not complete:
        state = json.loads((out / STATE).read_text())
        (out / STATE).write_text(json.dumps({**state, "complete": False}))
    before = content(out)
    change_in_place(source, "one two three", "one two seven")
    with pytest.raises(UsageError, match=r"a\.jsonl has changed.*--no-resume"):
        curate([str(source)], out, settings_of())
    assert content(out) == before
    again = CorpusOptions(quiet=True, workers=1, resume=False)
    curate([str(source)], out, settings_of(reading=again))
    assert read(out, "kept")[1]["text"] == "one two seven"


def test_a_copied_or_touched_source_is_not_curated_again(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    report = curate([corpus], out, settings_of())
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copyfile(corpus, tmp_path / "elsewhere/corpus.jsonl")
    monkeypatch.setattr("deskside.data.curation.curate.documents_of", pytest.fail)
    assert curate([str(copy)], out, settings_of()) == report
    os.utime(corpus, (1, 1))
    assert curate([corpus], out, settings_of()) == report


def test_a_text_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.jsonl"
    write_lines(source, [{"text": varied("en", 9)}, {"text": "one two three"}])
    write = worker.write

    def write_and_change(*arguments: Any) -> Any:
        change_in_place(source, "one two three", "one two seven")
        return write(*arguments)

    monkeypatch.setattr(worker, "write", write_and_change)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"a\.jsonl has changed"):
            curate([str(source)], tmp_path / "out", settings_of())


def of_earlier_version(out: Path, **changes: Any) -> None:
    """Turn curate.json into that of a version that did not record the files of the sources."""
    state = json.loads((out / STATE).read_text())
    del state["files"]
    (out / STATE).write_text(json.dumps({**state, **changes}))


def test_a_curation_of_an_earlier_version_is_compared_with_the_text(tmp_path: Path) -> None:
    source, out = tmp_path / "a.jsonl", tmp_path / "out"
    write_lines(source, [{"text": varied("en", 9)}, {"text": "one two three"}])
    report, before = curate([str(source)], out, settings_of()), content(out)
    of_earlier_version(out)
    assert curate([str(source)], out, settings_of()) == report and content(out) == before
    of_earlier_version(out)
    change_in_place(source, "one two three", "one two seven")
    for _ in range(2):
        with pytest.raises(UsageError, match="has changed"):
            curate([str(source)], out, settings_of())


def test_another_text_of_the_same_size_makes_a_duplicate_unique(tmp_path: Path) -> None:
    """The text of a hub data set may change between two runs, as that of files could in earlier versions."""
    first, second = varied("en", 9), varied("hi", 9)
    records = [{"text": first}, {"text": second}, {"text": first}]
    source, out, options = str(tmp_path / "a.jsonl"), tmp_path / "out", settings_of(batch_bytes=1)
    write_lines(Path(source), records)
    assert curate([source], out, options)["documents"] == {"kept": 2, "exact duplicate": 1}
    records[0] = {"text": "x" * len(json.dumps(first)[1:-1])}
    write_lines(Path(source), records)
    of_earlier_version(out, complete=False)
    assert curate([source], out, options)["documents"] == {"kept": 3}
    assert [r["text"] for r in read(out, "kept")] == [r["text"] for r in records] and not read(out, "removed")


def test_an_error_names_the_file_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"text": "some words"}, *({"body": "x" * 90} for _ in range(200))]
    source, out = write_lines(tmp_path / "a.jsonl", lines), tmp_path / "out"
    curate([source], out, settings_of())
    (out / "kept/kept-00000.jsonl.zst").unlink()
    with monkeypatch.context() as patch:
        error = OSError(errno.EIO, "Input/output error", "data/a.jsonl")
        patch.setattr("deskside.data.curation.curate.documents_of", Mock(side_effect=error))
        with pytest.raises(OSError) as raised:
            curate([source], out, settings_of())
        assert raised.value.filename == "data/a.jsonl"
    (out / "removed/unreadable.jsonl").unlink()
    (out / "removed/unreadable.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"unreadable\.jsonl: cannot be written: No space left"):
        curate([source], out, settings_of())
    (out / "removed/unreadable.jsonl").unlink()
    curate([source], out, settings_of())
    assert len((out / "removed/unreadable.jsonl").read_text().splitlines()) == 200


def test_names_of_files_that_are_not_utf_8(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for suffix in ("txt", "png"):
        (folder / os.fsdecode(b"caf\xe9." + suffix.encode())).write_text("some words")
    report = curate([str(folder)], tmp_path / "out", settings_of())
    assert report["documents"] == {"kept": 1} and report["ignored_files"]["count"] == 1
    assert curate([str(folder)], tmp_path / "out", settings_of()) == report


def test_files_that_a_kill_left_unrecorded_are_deleted(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    expected = curate([corpus], out, settings_of())
    state = json.loads((out / STATE).read_text())
    (out / STATE).write_text(json.dumps({**state, "complete": False, "written": {}}))
    (out / "work").mkdir()
    left = [out / name for name in ("work/.part-00000.npz", "kept/.kept-00000.jsonl.zst", ".curate.json")]
    for path in left:
        path.with_name(path.name + TEMPORARY_SUFFIX).write_bytes(b"half")
    assert curate([corpus], out, settings_of()) == expected and not (out / "work").exists()
    assert not list(out.rglob(f"*{TEMPORARY_SUFFIX}"))
    (out / "kept/kept-00099.jsonl.zst").write_bytes(b"of a batch that was not recorded")
    again = CorpusOptions(quiet=True, workers=1, resume=False)
    assert curate([corpus], out, settings_of(reading=again)) == expected
    assert not (out / "kept/kept-00099.jsonl.zst").exists()


def test_by_default_short_documents_and_poems_are_kept(tmp_path: Path) -> None:
    lines = varied("en", 3).replace(", ", "\n").replace(".", "").splitlines()
    texts = [varied("hi", 1), varied("ta", 2), "\n".join(lines), "spam and eggs, " * 100]
    source = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    curate([source], tmp_path / "out", CurationOptions(reading=QUIET))
    assert [r["text"] for r in read(tmp_path / "out", "kept")] == texts[:3]


@pytest.mark.parametrize(("confidence", "removed"), [(0.74, False), (0.95, True)])
def test_a_label_is_wrong_only_if_that_is_almost_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, confidence: float, removed: bool
) -> None:
    monkeypatch.setattr(worker.LanguageIdentifier, "identify", lambda *_: ("sa", confidence))
    source = write_lines(tmp_path / "a.jsonl", [{"text": varied("mr", 3), "lang": "mr"}])
    assert ("language" in curate([source], tmp_path / "out", settings_of())["documents"]) == removed
