"""Tokens per word, bytes per token and premium of a tokenizer with known output: one token per byte."""

import json
from pathlib import Path

import pytest

from benchmarks import fertility
from deskside.data import tokenizer as bpe


def test_a_tokenizer_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"en": "two words", "hi": "दो शब्द"}, {"en": "and more", "hi": "और"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bpe.save(bpe.train([], bpe.MIN_VOCAB), tmp_path / "bytes")
    arguments = ["--text", str(tmp_path / "text.jsonl"), "--languages", "en,hi"]
    arguments += ["--tokenizer", f"bytes={tmp_path / 'bytes'}", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr("sys.argv", ["fertility", *arguments])
    fertility.main()
    found = json.loads((tmp_path / "out.json").read_text())["bytes"]
    assert found["vocabulary"] == bpe.MIN_VOCAB
    for language, words in (("en", 4), ("hi", 3)):
        size = sum(len(row[language].encode()) for row in rows)
        one = found["languages"][language]
        assert (one["tokens"], one["bytes_per_token"]) == (size, 1.0)
        assert one["fertility"] == pytest.approx(size / words)
    english = found["languages"]["en"]["tokens"]
    assert found["languages"]["hi"]["premium"] == found["languages"]["hi"]["tokens"] / english
    assert "| bytes | 259 | 4.25 |" in capsys.readouterr().out
