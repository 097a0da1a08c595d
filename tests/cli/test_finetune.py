"""Where fine-tuning commands keep their prepared data."""

from pathlib import Path

import pytest

from deskside.cli.finetune import PreparedData


def test_prepared_data_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made: list[Path] = []
    data = PreparedData("chats.jsonl", "sft", "conversations", "key", lambda path: "key", made.append)
    assert data.folder("~/d") == tmp_path / "d" and made == [tmp_path / "d"]
