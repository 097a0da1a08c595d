"""A name of the hub without its owner is answered with the whole name."""

import pytest

from deskside.cli.main import main
from deskside.facts.checkpoint_names import hub_name_hint


@pytest.mark.parametrize("written", ["gpt2", "GPT2", "hf:gpt2"])
def test_the_owner_is_added(written: str) -> None:
    assert (
        hub_name_hint(written)
        == "did you mean openai-community/gpt2? Models of the hub are written owner/name"
    )


@pytest.mark.parametrize("written", ["", "mine", "runs/gpt2", "openai-community/gpt2"])
def test_other_names_have_no_hint(written: str) -> None:
    assert hub_name_hint(written) is None


@pytest.mark.parametrize(
    "line",
    [
        "eval gpt2",
        "plan --gpu rtx4090 --tokens 1B --init gpt2",
        "data prepare text.txt --out out --tokenizer gpt2",
    ],
)
def test_commands_say_so(
    line: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("text.txt", "w") as file:
        file.write("some words\n" * 1000)
    assert main(line.split()) == 2
    err = capsys.readouterr().err
    assert "id you mean openai-community/gpt2?" in err and "deskside: " in err.splitlines()[-1]
