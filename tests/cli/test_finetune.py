"""Where fine-tuning commands keep their prepared data, and files of options that they refuse."""

from pathlib import Path

import pytest

from deskside.cli.finetune import PreparedData
from deskside.cli.main import main


def test_prepared_data_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made: list[Path] = []
    data = PreparedData("chats.jsonl", "sft", "conversations", "key", lambda path: "key", made.append)
    assert data.folder("~/d") == tmp_path / "d" and made == [tmp_path / "d"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("data = 5", "data"),
        ("optim = 5", "optim"),
        ("batch = [1]", "batch"),
        ("[align]\ndata = 5", "align.data"),
        ("[align]\nval = true", "align.val"),
        ("[align]\ndata = {path = 'chats.jsonl'}", "align.data"),
    ],
)
def test_wrong_types_in_a_file_of_options(
    text: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.toml"
    file.write_text(text)
    assert main(["sft", "no-model", "--config", str(file), "--val", "v.jsonl"]) == 2
    assert capsys.readouterr().err.startswith(f"deskside: --config {file}: {key}")
