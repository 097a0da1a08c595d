"""Progress lines without a terminal."""

import re

import pytest

from deskside.utils.progress import ProgressBar


@pytest.mark.parametrize(
    ("unit", "amount", "shown"), [("questions", 1, "20 of 20"), ("MB", 0.25, "5.0 of 5.0")]
)
def test_whole_things_are_counted_without_decimals(
    unit: str, amount: float, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressBar("render", 20 * amount, unit) as bar:
        for _ in range(20):
            bar.advance(amount)
    assert re.fullmatch(rf"render: {shown} {unit}, [\d.e-]+ s elapsed\n", capsys.readouterr().err)
