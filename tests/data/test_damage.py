"""index.json and prepare.json with a value of a wrong kind anywhere: the error is one line that names the file."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deskside.cli.data import run
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.rows import PackedDataset
from deskside.data.reading.verify import STAMP, checked_index
from deskside.utils.errors import RunError, UsageError
from tests.data.data_corpus import make_corpus

WRONG: list[Any] = [None, "x", -1, True, 1.5, float("nan"), 10**30, [], [3], {"x": 3}]
DELETED = object()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry in a JSON value. Of entries with the same
    fields, only those of the first are visited.
    """
    if path:
        yield path
    inside = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    visited: list[list[str]] = []
    for key, item in inside:
        fields = list(item) if isinstance(item, dict) else []
        if not fields or fields not in visited:
            visited.append(fields)
            yield from places(item, (*path, key))


def changed(whole: Any, path: tuple[Any, ...], value: object) -> Any:
    result = copy.deepcopy(whole)
    place = result
    for key in path[:-1]:
        place = place[key]
    if value is DELETED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def check(file: Path, use: Callable[[], object]) -> int:
    """Call `use` for every change of a JSON file, allowing only RunError and
    UsageError. Return the number of errors.
    """
    whole = json.loads(file.read_text())
    text = file.read_bytes()
    refused = 0
    for path in places(whole):
        for value in (*WRONG, DELETED):
            file.write_text(json.dumps(changed(whole, path, value)))
            try:
                use()
            except (RunError, UsageError) as error:
                refused += 1
                assert "\n" not in str(error) and str(file.parent) in str(error), (path, value, str(error))
            except Exception as error:
                error.add_note(f"{file.name}: {path} = {value!r}")
                raise
    file.write_bytes(text)
    for content in (b"", b"\xff", b"[]", b"3", b"[" * 9000):
        file.write_bytes(content)
        with pytest.raises((RunError, UsageError), match=file.name):
            use()
    file.write_bytes(text)
    use()
    return refused


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A data set with one shard per split, bad input and an ignored file."""
    make_corpus(tmp_path / "corpus.jsonl", 60)
    with (tmp_path / "corpus.jsonl").open("a") as file:
        file.write('{"body": 1}\n')
    (tmp_path / "more").mkdir()
    shutil.move(tmp_path / "corpus.jsonl", tmp_path / "more")
    (tmp_path / "more" / "picture.png").write_bytes(b"")
    prepare([str(tmp_path / "more")], tmp_path / "out", CorpusOptions(vocab_size=300, workers=1, quiet=True))
    return tmp_path / "out"


@pytest.mark.full
def test_index(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def use() -> None:
        for command in ("verify", "show"):
            run([command, str(small)])
        for split in ("train", "val"):
            PackedDataset(small, split, 64)

    assert check(small / "index.json", use) > 300


def test_prepare(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def use() -> None:
        (small / "index.json").unlink(missing_ok=True)
        prepare([str(small.parent / "more")], small, CorpusOptions(vocab_size=300, workers=1, quiet=True))

    state = small / "prepare.json"
    assert check(state, use) > 200


@pytest.mark.parametrize("content", [b"\xff", b"[", b"3", b"{}", b""])
def test_stamp(small: Path, content: bytes) -> None:
    """A damaged stamp is rewritten."""
    (small / STAMP).write_bytes(content)
    checked_index(small)
    assert json.loads((small / STAMP).read_text())["index.json"]


@pytest.mark.parametrize("content", [b"\xff", b"[", b"[]", b"3", b"{", b"[" * 9000])
def test_tokenizer_config(small: Path, content: bytes, tmp_path: Path) -> None:
    (small / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(
        RunError, match=r"tokenizer_config\.json is damaged: it (is not|does not hold a) JSON"
    ):
        prepare(
            [str(small.parent / "more")],
            tmp_path / "new",
            CorpusOptions(tokenizer=small, workers=1, quiet=True),
        )
    assert not (tmp_path / "new").exists()
