"""What an unknown option, preset or size is answered with."""

import pytest

from deskside.cli.main import main
from deskside.cli.suggestions import commands_with


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # The command has the thing under another name.
        ("go --model 124m", "--model: there is no such option; did you mean --preset 124m?"),
        ("go --params 1.5B", "--params: there is no such option; did you mean --preset d30?"),
        ("go --params many", "--params: there is no such option; did you mean --preset?"),
        ("train 124m --data data/x", "--data: there is no such option; did you mean --data.path?"),
        ("plan --gpu rtx4090 --steps 100", "--steps: there is no such option; did you mean --tokens?"),
        ("study own --steps 100", "--steps: there is no such option; did you mean --schedule.steps?"),
        # It is an argument without a name.
        ("train --preset 124m", "PRESET is written without a name: deskside train 124m"),
        ("train --preset=124m", "PRESET is written without a name: deskside train 124m"),
        ("train --params 1.5B", "PRESET is written without a name: deskside train d30"),
        ("sft --preset 124m", "MODEL is written without a name: deskside sft MODEL"),
        ("chat --model runs/x", "MODEL is written without a name: deskside chat runs/x"),
        # Another command has it, and this one has not, however near another name is.
        ("go --gpu rtx4090", "deskside plan and deskside models have it; see deskside go --help"),
        ("go --unique-tokens 3M", "--unique-tokens: there is no such option; deskside plan has it; see"),
        ("go --unique_tokens 3M", "--unique_tokens: there is no such option; deskside plan has it; see"),
        # It is misspelt, or nothing is near.
        ("serve x --prot 3", "did you mean --port?"),
        ("go --model.norms 3", "did you mean --model.norm?"),
        ("go --cards 3", "--cards: there is no such option; see deskside go --help"),
        # Sizes are no presets, but have one.
        ("train 1.5B", "1.5B: no such preset; did you mean d30 (1.45B)? Otherwise use one of"),
        ("go --preset 1.5B --hours 1", "1.5B: no such preset; did you mean d30 (1.45B)?"),
        ("train 3B", "3B: no such preset; did you mean 3b?"),
        ("train 0B", "0B: no such preset; use one of"),
        ("train 9999B", "9999B: no such preset; use one of"),
    ],
)
def test_one_line_that_helps(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_commands_with_an_option() -> None:
    assert commands_with("--unique-tokens") == ["plan"]
    assert {"train", "sft", "go"} <= set(commands_with("--resume")) and commands_with("--optim.lr") == []
