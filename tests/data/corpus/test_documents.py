"""Documents as they are read from files, from the hub and from the bundled samples; bad input is counted."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.corpus import bad_input
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.documents import Document, iter_documents
from deskside.data.corpus.records import iter_records
from deskside.data.corpus.sources import Source
from deskside.utils.errors import UsageError


def read(spec: str | Path, field: str = "text") -> tuple[list[Document], BadInputLog]:
    log = BadInputLog()
    return list(iter_documents(Source.parse(str(spec)), log, text_field=field)), log


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(r, ensure_ascii=False).encode() + b"\n" for r in records)


GOOD = [{"text": "one", "source": "wiki:Page:3", "lang": "en"}, {"text": "दो"}, {"text": "three\nlines"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_jsonl(tmp_path: Path, name: str) -> None:
    data = lines(*GOOD)
    packed = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(
        name[-3:].strip("."), bytes
    )(data)
    (tmp_path / name).write_bytes(packed)
    found, log = read(tmp_path / name)
    assert [d.text for d in found] == ["one", "दो", "three\nlines"]
    assert (found[0].source, found[0].lang) == ("wiki", "en")
    assert (found[1].source, found[1].lang) == ("a", "")
    assert found[1].origin == f"{tmp_path / name}:2"
    assert log.total == 0


def test_several_zstd_frames_and_gzip_members(tmp_path: Path) -> None:
    first, second = lines(GOOD[0]), lines(GOOD[1])
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(pack(first) + pack(second))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(first) + gzip.compress(second))
    found, log = read(tmp_path)
    assert [d.text for d in found] == ["one", "दो"] * 2 and log.total == 0


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", None, "  ", "four"], "lang": ["en", "en", "hi", None]})
    pq.write_table(table, tmp_path / "a.parquet")
    found, log = read(tmp_path / "a.parquet")
    assert [(d.text, d.lang, d.origin[-2:]) for d in found] == [("one", "en", ":1"), ("four", "", ":4")]
    assert log.counts == {bad_input.NOT_TEXT: 1, bad_input.EMPTY: 1}
    _, log = read(tmp_path / "a.parquet", field="content")
    assert log.counts == {bad_input.NO_COLUMN: 1}
    _, log = read(tmp_path / "a.parquet", field="lang")
    assert bad_input.NO_COLUMN not in log.counts
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    assert read(tmp_path / "b.parquet")[1].counts == {bad_input.DAMAGED_FILE: 1}


def test_parquet_row_with_invalid_utf8(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary())
    bad = pa.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    found, log = read(tmp_path / "a.parquet")
    assert [d.text for d in found] == ["good", "fine"] and log.counts == {bad_input.NOT_UTF8: 1}


def test_repeated_columns_of_parquet(tmp_path: Path) -> None:
    def written(*names: str) -> Path:
        columns = [pa.array(["one", "two"]) for _ in names]
        pq.write_table(pa.Table.from_arrays(columns, names=list(names)), path := tmp_path / "a.parquet")
        return path

    assert read(written("text", "text"))[1].counts == {bad_input.REPEATED_COLUMN: 1}
    found, log = read(written("text", "source", "source", "lang", "lang"))
    assert [(d.text, d.source, d.lang) for d in found] == [("one", "a", ""), ("two", "a", "")]
    assert log.total == 0
    log = BadInputLog()
    source = Source.parse(str(written("prompt", "answer", "answer", "source", "source")))
    assert list(iter_records(source, ["answer"], log)) == []
    assert log.counts == {bad_input.REPEATED_COLUMN: 1}
    assert [r.source for r in iter_records(source, ["prompt"], log)] == ["a", "a"]


def test_damage_of_parquet_never_ends_the_reading(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", "two"], "source": ["a", "b"]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none", store_schema=False)
    whole = (tmp_path / "a.parquet").read_bytes()
    unreadable = 0
    for position in range(len(whole)):
        for flipped in (0x06, 0x80):  # another codec, such as LZO; a column's name that is not UTF-8
            damaged = bytearray(whole)
            damaged[position] ^= flipped
            (tmp_path / "b.parquet").write_bytes(damaged)
            unreadable += bad_input.DAMAGED_FILE in read(tmp_path / "b.parquet")[1].counts
            list(iter_records(Source.parse(str(tmp_path / "b.parquet")), ["text"], BadInputLog()))
    assert unreadable > 100


def test_parquet_pages_are_compared_with_their_checksums(tmp_path: Path) -> None:
    table = pa.table({"text": [f"document {i}" for i in range(100)]})
    pq.write_table(
        table, tmp_path / "a.parquet", compression="none", use_dictionary=False, write_page_checksum=True
    )
    assert len(read(tmp_path / "a.parquet")[0]) == 100
    changed = (tmp_path / "a.parquet").read_bytes().replace(b"document 50", b"document 05", 1)
    (tmp_path / "a.parquet").write_bytes(changed)
    found, log = read(tmp_path / "a.parquet")
    assert found == [] and log.counts == {bad_input.DAMAGED_FILE: 1}
    log = BadInputLog()
    assert list(iter_records(Source.parse(str(tmp_path / "a.parquet")), ["text"], log)) == []
    assert log.counts == {bad_input.DAMAGED_FILE: 1}


@pytest.mark.parametrize("field", ["source", "lang"])
def test_a_text_is_not_its_own_tag(tmp_path: Path, field: str) -> None:
    record = {field: "Hello: world", "target": "Hallo Welt"}
    (tmp_path / "a.jsonl").write_bytes(lines(record))
    pq.write_table(pa.table({key: [value] for key, value in record.items()}), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        (document,) = read(tmp_path / name, field=field)[0]
        assert (document.text, document.source, document.lang) == ("Hello: world", name[0], "")


def test_every_kind_of_bad_line_is_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        lines({"text": "good"})
        + b'{"text": "caf\xe9"}\n'
        + b'{"text": "cut\n'
        + lines({"body": "x"}, ["text"], {"text": 5}, {"text": None}, {"text": " \n"})
        + b'{"text": "half \\ud800 pair"}\n\n'
        + b"[" * 100_000
        + b"\n"
        + b'{"text": '
        + b"1" * 5000
        + b"}\n"
        + b'{"text": "last without newline"}'
    )
    found, log = read(path)
    assert [d.text for d in found] == ["good", "last without newline"]
    assert log.counts == {
        bad_input.NOT_UTF8: 2,
        bad_input.BAD_JSON: 3,
        bad_input.NO_FIELD: 2,
        bad_input.NOT_TEXT: 2,
        bad_input.EMPTY: 1,
    }
    assert log.examples[bad_input.NOT_UTF8][0].startswith(f"{path}:2")
    assert log.examples[bad_input.BAD_JSON][0].startswith(f"{path}:3")
    for line in range(2, 9):
        with pytest.raises(UsageError, match=r"bad\.jsonl:1.*--on-bad skip"):
            one = tmp_path / "bad.jsonl"
            one.write_bytes(path.read_bytes().split(b"\n")[line - 1] + b"\n")
            list(iter_documents(Source.parse(str(one)), BadInputLog("refuse")))


@given(keep=st.floats(0.02, 0.98), kind=st.sampled_from(["gz", "zst"]))
@settings(max_examples=40, deadline=None)
def test_truncated_archive_keeps_the_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, keep: float, kind: str
) -> None:
    records = [{"text": f"document {i} " + "word " * (i % 50)} for i in range(300)]
    data = lines(*records)
    packed = gzip.compress(data) if kind == "gz" else zstandard.ZstdCompressor().compress(data)
    path = tmp_path_factory.mktemp("cut") / f"a.jsonl.{kind}"
    path.write_bytes(packed[: int(len(packed) * keep)])
    found, log = read(path)
    assert log.counts == {bad_input.DAMAGED_FILE: 1}
    assert [d.text for d in found] == [r["text"] for r in records][: len(found)]


def test_flipped_bits_in_an_archive(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(lines(*GOOD)))
    packed[-5] ^= 0xFF  # the stored checksum
    (tmp_path / "a.jsonl.gz").write_bytes(packed)
    (tmp_path / "b.jsonl.gz").write_bytes(b"not an archive")
    (tmp_path / "c.jsonl.zst").write_bytes(b"not an archive")
    _, log = read(tmp_path)
    assert log.counts == {bad_input.DAMAGED_FILE: 3}


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfwith a mark\n")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    (tmp_path / "c.txt").write_bytes(b" \n")
    (tmp_path / "zeros.txt").write_bytes(bytes(100_000))
    (tmp_path / "utf16.txt").write_bytes("some words".encode("utf-16-le"))
    (tmp_path / "notes.md").write_text("# read")
    (tmp_path / "README.md").write_text("not read: it describes the data")
    source = Source.parse(str(tmp_path))
    found, log = read(tmp_path)
    assert [(d.text, d.source) for d in found] == [
        ("with a mark\n", tmp_path.name),
        ("# read", tmp_path.name),
    ]
    assert log.counts == {bad_input.NOT_UTF8: 1, bad_input.EMPTY: 1, bad_input.BINARY: 2}
    assert source.ignored == (str(tmp_path / "README.md"),)
    assert len(read(tmp_path / "*.txt")[0]) == 1
    assert len(read(tmp_path / "README.md")[0]) == 1


def test_missing_files_are_bad_input(tmp_path: Path) -> None:
    for name in ("no.txt", "no.jsonl.gz", "no.parquet"):
        found, log = read(tmp_path / name)
        assert found == [] and log.counts == {bad_input.MISSING: 1}
    with pytest.raises(UsageError, match=r"no\.txt.*missing"):
        list(iter_documents(Source.parse(str(tmp_path / "no.txt")), BadInputLog("refuse")))


def test_a_link_to_itself_is_bad_input(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"):
        (tmp_path / name).symlink_to(tmp_path / name)
        found, log = read(tmp_path / name)
        assert found == [] and log.counts == {bad_input.MISSING: 1}
        bad = BadInputLog()
        if name != "a.txt":
            assert list(iter_records(Source.parse(str(tmp_path / name)), ["text"], bad)) == []
            assert bad.counts == {bad_input.MISSING: 1}


def test_dictionary_encoded_text_in_parquet(tmp_path: Path) -> None:
    texts = ["one", None, "two", "one"]
    for name, kind in (("a", pa.string()), ("b", pa.large_string()), ("c", pa.int64())):
        column = pa.array(texts if name != "c" else [1, 2, 3, 1]).dictionary_encode()
        if name != "c":
            column = column.cast(pa.dictionary(pa.int32(), kind))
        pq.write_table(pa.table({"text": column}), tmp_path / f"{name}.parquet")
        found, log = read(tmp_path / f"{name}.parquet")
        assert [d.text for d in found] == (["one", "two", "one"] if name != "c" else [])
        assert log.counts == {bad_input.NOT_TEXT: 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_too_long_lines_are_counted_and_the_others_read(tmp_path: Path, name: str) -> None:
    texts = ["one", "x" * 4000, "two", "y" * 3_000_000, "é" * 100]
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"text": texts}), path)
    else:
        data = lines(*({"text": t} for t in texts))[:-1]
        pack = {"z": gzip.compress, "t": zstandard.ZstdCompressor().compress}.get(name[-1], bytes)
        path.write_bytes(pack(data))
    log = BadInputLog()
    found = list(iter_documents(Source.parse(str(path)), log, line_limit=1000))
    assert [d.text for d in found] == ["one", "two", "é" * 100]
    assert log.counts == {bad_input.TOO_LONG: 2}
    assert [place.split(" ")[0][-2:] for place in log.examples[bad_input.TOO_LONG]] == [":2", ":4"]
    with pytest.raises(UsageError, match=r":2 .*--max-line-mb"):
        list(iter_documents(Source.parse(str(path)), BadInputLog("refuse"), line_limit=1000))


@given(st.text(alphabet="ab \n\ré", max_size=200), st.integers(4, 50))
@settings(max_examples=200, deadline=None)
def test_a_text_file_over_the_limit_is_several_documents(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: int
) -> None:
    path = tmp_path_factory.mktemp("parts") / "a.txt"
    path.write_bytes(text.encode())
    log = BadInputLog()
    found = list(iter_documents(Source.parse(str(path)), log, line_limit=limit))
    assert "".join("".join(d.text for d in found).split()) == "".join(text.split())
    assert all(len(d.data) <= limit for d in found) and set(log.counts) <= {bad_input.EMPTY}
    assert not any(b"\r" in document.data for document in found)
    if "\r" not in text:
        for document in found[:-1]:
            assert document.data.endswith(b"\n") or b"\n" not in document.data
    whole = [document.text for document in iter_documents(Source.parse(str(path)), BadInputLog())]
    assert whole == ([path.read_text("utf-8")] if text.strip() else [])  # which has universal newlines


def test_line_ends_of_windows_cut_between_two_parts_are_one_newline(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc\r\ndef\r\n")
    for limit in range(5, 12):
        found = iter_documents(Source.parse(str(tmp_path / "a.txt")), BadInputLog(), line_limit=limit)
        assert "".join(document.text for document in found) == "abc\ndef\n"


PEAK = """
import resource, sys
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.documents import iter_documents
from deskside.data.corpus.sources import Source
log = BadInputLog()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = sum(len(d.data) for d in iter_documents(Source.parse(sys.argv[1]), log))
print(found, log.total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def peak(path: Path) -> tuple[int, int, int]:
    """Return a source's bytes of text, its items of bad input, and the peak memory of reading it in MiB.

    The memory of the imports is excluded.
    """
    run = subprocess.run([sys.executable, "-c", PEAK, str(path)], check=True, capture_output=True, text=True)
    text, bad, mebibytes = map(int, run.stdout.split())
    return text, bad, mebibytes


def test_an_archive_of_one_endless_line_takes_bounded_memory(tmp_path: Path) -> None:
    """An archive of a few kB decompresses to a line of half a GiB."""
    packer = zstandard.ZstdCompressor().compressobj()
    packed = [packer.compress(b'{"text": "')] + [packer.compress(bytes(1 << 20)) for _ in range(512)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join([*packed, packer.flush()]))
    text, bad, mebibytes = peak(tmp_path / "a.jsonl.zst")
    assert (text, bad) == (0, 1) and mebibytes < 350


def test_a_long_document_takes_little_more_than_its_size(tmp_path: Path) -> None:
    """The text contains emoji, for which `str` needs four bytes per character, as UTF-8 and as JSON escapes."""
    text = ("words of a long document 🎉 \n" * 100 + "\\") * 5000
    size = len(text.encode()) / 2**20
    for name, ascii_only in (("a", True), ("b", False)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=ascii_only) + "\n")
        found, bad, mebibytes = peak(tmp_path / f"{name}.jsonl")
        line = (tmp_path / f"{name}.jsonl").stat().st_size / 2**20
        assert (found, bad) == (len(text.encode()), 0) and mebibytes < line + 2.3 * size + 20


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_with_its_mark_is_named(tmp_path: Path, encoding: str) -> None:
    """Windows editors call this encoding "Unicode"."""
    (tmp_path / "a.txt").write_bytes("\ufeffsome words".encode(encoding))
    found, log = read(tmp_path)
    assert (
        not found and log.counts == {bad_input.NOT_UTF8: 1} and "iconv" in log.examples[bad_input.NOT_UTF8][0]
    )


def test_bundled_texts() -> None:
    shakespeare, _ = read("bundled:tiny_shakespeare.txt")
    assert len(shakespeare) == 1 and shakespeare[0].text.startswith("First Citizen:")
    indic, log = read("bundled:tiny_indic.jsonl")
    assert (
        len(indic) == 34
        and {d.lang for d in indic} == {"hi", "bn", "ta", "te", "mr", "ml"}
        and log.total == 0
    )


def test_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((name, config, split, streaming))
        return [{"text": "one"}, {"body": "no"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    found, log = read("hf:owner/name:config:validation")
    assert asked == [("owner/name", "config", "validation", True)]
    assert [(d.text, d.source) for d in found] == [("one", "owner/name")] and log.counts == {
        bad_input.NO_FIELD: 1
    }
    assert Source.parse("hf:owner/name").hub == ("owner/name", None, "train")

    def offline(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UsageError, match=r"hf:owner/name: .*Couldn't reach.*give their paths"):
        read("hf:owner/name")


def test_unreadable_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "open").mkdir()
    for folder in (tmp_path / "closed", tmp_path / "open"):
        (folder / "a.txt").write_text("text")
    scandir = os.scandir

    def refusing(path: str) -> Any:  # tests may run as root, which may list any directory
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found, log = read(tmp_path)
    assert [d.origin for d in found] == [str(tmp_path / "open" / "a.txt")]
    assert log.examples == {bad_input.MISSING: [f"{tmp_path / 'closed'} (Permission denied)"]}
    with pytest.raises(UsageError, match=r"closed \(Permission denied\): missing or unreadable"):
        list(iter_documents(Source.parse(str(tmp_path)), BadInputLog("refuse")))
    with pytest.raises(
        UsageError, match=r"no files in directory .*closed cannot be read \(Permission denied\)"
    ):
        Source.parse(str(tmp_path / "closed"))


def test_line_ends_of_records_stay(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\r\\nb"}\r\n')
    (document,) = iter_documents(Source.parse(str(tmp_path / "a.jsonl")), BadInputLog())
    assert document.data == b"a\r\nb"
