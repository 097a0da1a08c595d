from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deskside.cli import data
from deskside.cli.data import run
from deskside.utils.errors import RunError, UsageError
from tests.data.data_corpus import make_corpus


def test_prepare_verify_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_corpus(tmp_path / "a.jsonl", 60)
    out = str(tmp_path / "out")
    command = ["prepare", str(tmp_path / "a.jsonl"), "--out", out, "--vocab-size", "300", "--workers", "1"]
    assert run([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["documents"]["train"] + report["documents"]["val"] == 60 and report["made"] == 2
    assert run([*command[:4], "--vocab_size", "300", "--workers", "1"]) == 0
    assert "2 kept" in capsys.readouterr().out
    assert run(["verify", out]) == 0
    assert "checksums match" in capsys.readouterr().out
    assert run(["show", out]) == 0
    shown = capsys.readouterr().out
    assert "rows of 2048 filled" in shown and "src-hi" in shown
    assert run(["show", out, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["vocab_size"] == 300 and 0 < facts["splits"]["train"]["utilisation"]["512"] <= 1
    # The one shard ends with an end-of-text token that belongs to no document.
    train = facts["splits"]["train"]
    assert train["tokens"] == sum(tag["tokens"] for tag in train["tags"]) + 1
    assert re.search(r"\b1 end-of-text token\b", shown)
    assert run([*command[:4], "--vocab-size", "310", "--workers", "1", "--no-resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocab_size"] == 310


def test_next_commands_follow_the_amount_of_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_corpus(tmp_path / "a.jsonl", 60)
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "a.jsonl", "--out", "out", "--vocab-size", "300", "--workers", "1"]

    def suggested(*options: str) -> list[str]:
        assert run([*command, *options]) == 0
        lines = capsys.readouterr().out.partition("next:\n")[2].splitlines()
        return [line.strip().removeprefix("deskside ") for line in lines]

    own_corpus = "go --hours 1 --data out --own-corpus"
    assert suggested() == ["go --preset demo --hours 0.05 --data out", own_corpus]
    published = tmp_path / "published"
    published.mkdir()
    (tmp_path / "out" / "tokenizer.json").rename(published / "tokenizer.json")
    with pytest.raises(UsageError, match="--vocab-size"):  # has no effect with a given tokenizer
        suggested("--tokenizer", "published", "--no-resume")
    command = ["prepare", "a.jsonl", "--out", "out", "--workers", "1"]
    assert suggested("--tokenizer", "published", "--no-resume") == [own_corpus]
    monkeypatch.setattr(data, "_SMALL_CORPUS", 1)
    large = ["plan --here --hours 24 --data.path out", "go --hours 24 --data out"]
    assert suggested("--tokenizer", "published") == large


def test_show_lists_the_largest_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file that a shell pattern matches is a separate source."""
    files = [tmp_path / f"text-{letter}.txt" for letter in "abcdefghijklmno"]
    for number, file in enumerate(files):
        file.write_text(f"a line of text {number}\n" * (100 + number))
    out = str(tmp_path / "out")
    command = ["prepare", *map(str, files), "--out", out, "--vocab-size", "300", "--workers", "1", "--json"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert not [warning for warning in report["warnings"] if "no text of source" in warning]
    trained = report["documents"]["train"]
    assert 10 < trained < 15
    for options, listed in ((["show", out], 10), (["show", out, "--details"], trained)):
        assert run(options) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len([line for line in lines if line.startswith("text-")]) == listed
    assert run(["show", out, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["splits"]["train"]["tags"]) == trained


def test_damage_exits_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, text = tmp_path / "copy", tmp_path / "corpus.txt"
    text.write_text("".join(f"line {number} of a text\n\n" for number in range(2000)))
    run(["prepare", str(text), "--out", str(copy), "--vocab-size", "300", "--workers", "1"])
    capsys.readouterr()
    (copy / "val-00000.bin").write_bytes(b"")
    assert run(["verify", str(copy), "--json"]) == 1
    assert "val-00000.bin" in json.loads(capsys.readouterr().out)["damaged"]
    with pytest.raises(RunError, match=r"val-00000\.bin"):
        run(["verify", str(copy)])


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="did you mean --seed"):
        run(["prepare", "--sead", "1"])
    with pytest.raises(SystemExit) as error:
        run(["prepare", "--help"])
    assert error.value.code == 0
    assert "deskside data prepare corpus/*.jsonl.gz --val held.jsonl" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"SOURCE\.\.\. is missing"):
        run(["prepare", "--out", str(tmp_path / "x")])
    with pytest.raises(UsageError, match="not a prepared data set"):
        run(["show", str(tmp_path)])


def test_languages_by_field_and_by_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Documents without a language get that of --lang, and the counts equal those of the text itself."""
    records = make_corpus(tmp_path / "a.jsonl", 60)
    lines = [
        {"text": r["text"], "language": r["lang"]} if r["lang"] == "hi" else {"text": r["text"]}
        for r in records
    ]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = str(tmp_path / "out")
    command = ["prepare", str(tmp_path / "b.jsonl"), "--out", out, "--vocab-size", "300", "--workers", "1"]
    labelled = [*command, "--lang-field", "language", "--lang", "en"]
    assert run(labelled) == 0 and run(["show", out, "--json"]) == 0
    splits = json.loads(capsys.readouterr().out.splitlines()[-1])["splits"]
    for lang in ("en", "hi"):
        texts = [r["text"] for r in records if r["lang"] == lang]
        found = [splits[split]["languages"][lang] for split in ("train", "val")]
        assert sum(one["documents"] for one in found) == len(texts)
        assert sum(one["text_bytes"] for one in found) == sum(len(text.encode()) for text in texts)
        assert sum(one["words"] for one in found) == sum(len(text.split()) for text in texts)
        for one in found:
            text_tokens = one["tokens"] - one["documents"]
            assert one["fertility"] == pytest.approx(text_tokens / one["words"])
            assert one["bytes_per_token"] == pytest.approx(one["text_bytes"] / text_tokens)
    assert run(["show", out]) == 0
    assert "fertility" in capsys.readouterr().out
    with pytest.raises(UsageError, match="lang"):  # its arguments differ from those of the data in --out
        run(command)


def test_languages_by_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LANG=SOURCE sets the language of text files and of records without one.
    File names may contain an equals sign.
    """
    for name in ("a.txt", "b.txt", "lang=c.txt"):
        (tmp_path / name).write_text(f"{name} some words\n" * 400)
    (tmp_path / "d.jsonl").write_text('{"text": "own", "lang": "own"}\n{"text": "none"}\n')
    out = str(tmp_path / "out")
    sources = [f"xx={tmp_path / 'a.txt'}", str(tmp_path / "b.txt"), str(tmp_path / "lang=c.txt")]
    command = ["prepare", *sources, f"yy={tmp_path}/d.json*", "--out", out, "--vocab-size", "300"]
    command += ["--workers", "1", "--lang", "zz", "--val-fraction", "0"]
    assert run(command) == 0 and run(["show", out, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["splits"]["train"]["languages"]
    assert {language: one["documents"] for language, one in found.items()} == {
        "xx": 1, "zz": 2, "own": 1, "yy": 1,
    }  # fmt: skip
    assert run(command) == 0 and "kept" in capsys.readouterr().out
    with pytest.raises(UsageError, match="sources"):
        run([word.replace("xx=", "qq=") for word in command])


def test_a_pattern_with_an_equals_sign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition directories such as year=2024 are not languages."""
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2024" / "a.txt").write_text("some words\n" * 400)
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "year=2024/*.txt", "--out", "out", "--vocab-size", "300", "--val-fraction", "0"]
    assert run([*command, "--workers", "1"]) == 0 and run(["show", "out", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["splits"]["train"]["languages"]
    assert list(found) == ["unknown"]
