"""parse_long is compared with Python's own JSON parser."""

from __future__ import annotations

import functools
import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.corpus import lines
from deskside.data.corpus.lines import parse_long, utf8_error


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parse_long omit strings of more than 8 bytes, and unescape in pieces of 16 bytes."""
    monkeypatch.setattr(lines, "_LONG_STRING", 8)
    monkeypatch.setattr(lines, "CHUNK", 16)


TEXT = st.text(alphabet='ab"\\/\n\t é🎉\u2028{}:,u', max_size=120)
VALUES = st.recursive(
    TEXT | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("ascii_only", [True, False])
def test_long_lines_parse_as_json_loads(ascii_only: bool) -> None:
    @given(st.dictionaries(st.sampled_from(["text", "source", 'a "long" key \\']), VALUES, max_size=3))
    @settings(max_examples=300, deadline=None)
    def check(record: dict[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=ascii_only).encode()
        found = parse_long(line, "text")
        assert isinstance(found, dict)
        text = found.get("text")
        assert (text.decode() if isinstance(text, bytes) else text) == record.get("text") or isinstance(
            text, list
        )
        if isinstance(record.get("text"), str) and len(json.dumps(record["text"])) > 80:
            assert isinstance(text, bytes)

    check()


@pytest.mark.usefixtures("small_limits")
@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_invalid_json_is_refused(raw: bytes) -> None:
    line = b'{"text": "abcdefghijklmnop' + raw + b'"}'
    try:
        wanted = json.loads(line)["text"].encode() if isinstance(json.loads(line), dict) else None
    except (ValueError, RecursionError):
        with pytest.raises((ValueError, RecursionError)):
            parse_long(line, "text")
        return
    found = parse_long(line, "text")
    assert isinstance(found, dict) and found["text"] in (wanted, wanted.decode() if wanted else None)


@pytest.mark.usefixtures("small_limits")
def test_pairs_of_surrogates_and_backslashes_are_not_divided() -> None:
    for padding in range(40):
        text = "x" * padding + "🎉" * 9 + "\\" * 33 + '"' + "é" * 9
        found = parse_long(json.dumps({"text": text}).encode(), "text")
        assert found == {"text": text.encode()}
    with pytest.raises(UnicodeEncodeError):
        parse_long(b'{"text": "' + b"x" * 60 + b'\\ud83c"}', "text")


def test_structure_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_STRUCTURE_LIMIT", 1000)
    with pytest.raises(ValueError, match="besides long strings"):
        parse_long(b"[" + b"{}," * 1000 + b"{}]", "text")


@given(st.binary(max_size=80))
@settings(max_examples=200, deadline=None)
def test_utf8_error_is_where_python_finds_it(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "CHUNK", 7)
        found = utf8_error(data)
    try:
        data.decode("utf-8")
        assert found is None
    except UnicodeDecodeError as error:
        assert found == error.start


@functools.cache
def two_gzip_members() -> bytes:
    text = b"".join(b'{"text": "document %d"}\n' % (i * i) for i in range(60_000))
    return gzip.compress(text, 1) + gzip.compress(text[: len(text) // 2], 9)


@given(kind=st.sampled_from(["whole", "cut", "flip", "after"]), at=st.floats(0, 1, exclude_max=True))
@settings(max_examples=40, deadline=None)
def test_gzip_files_are_read_as_python_reads_them(
    tmp_path_factory: pytest.TempPathFactory, kind: str, at: float
) -> None:
    packed = bytearray(two_gzip_members())
    place = int(len(packed) * at)
    if kind == "cut":
        del packed[place:]
    elif kind == "flip":
        packed[place] ^= 16
    elif kind == "after":
        packed += bytes(place % 9) + b"x" * (place % 3)
    path = tmp_path_factory.mktemp("gzip") / "a.jsonl.gz"
    path.write_bytes(packed)
    expected, is_damaged = b"", False
    with gzip.open(path) as file:
        try:
            while chunk := file.read(lines.CHUNK):
                expected += chunk
        except (EOFError, OSError, zlib.error):
            is_damaged = True
    damage: list[int] = []
    found = [
        bytes(line)
        for _, line in lines.iter_lines(path, 1000, print, lambda number, _: damage.append(number))
    ]
    whole = expected.split(b"\n")
    if is_damaged or not whole[-1]:
        whole.pop()
    assert found == [line for line in whole if len(line) <= 1000] and damage == (
        [len(whole)] if is_damaged else []
    )
