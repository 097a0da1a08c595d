"""Spec strings that name sources, and those that name none."""

from pathlib import Path

import pytest

from deskside.data.corpus.sources import Source
from deskside.utils.errors import UsageError


@pytest.mark.parametrize(
    "spec", ["a.docx", "hf:name", "hf:a/b:c:d:e", "bundled:no.txt", "nowhere/*.jsonl", "~nobody"]
)
def test_invalid_specs_are_refused(spec: str) -> None:
    with pytest.raises(UsageError):
        Source.parse(spec)


@pytest.mark.parametrize(
    ("name", "hint"), [("a.pdf", "pdftotext"), ("a.DOCX", "pandoc"), ("a.json", "jsonl")]
)
def test_other_kinds_say_what_to_convert_with(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    for spec in (tmp_path / name, tmp_path):
        with pytest.raises(UsageError, match=hint):
            Source.parse(str(spec))


@pytest.mark.parametrize("name", ["texst", "texst/", "texst/a.pdf"])
def test_a_path_that_does_not_exist_is_not_called_a_file_type(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no such file or directory"):
        Source.parse(f"{tmp_path}/{name}")


@pytest.mark.parametrize("pattern", ["**/*.txt", "**/**/*.txt", "a/**/**/**/*.txt"])
def test_a_pattern_names_each_file_once(tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    for name in ("1.txt", "2.txt"):
        (folder / name).write_text(name)
    paths = Source.parse(f"{tmp_path}/{pattern}").paths
    assert paths == (folder / "1.txt", folder / "2.txt")
