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


def test_a_line_a_minute_has_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("deskside.utils.progress.time.monotonic", lambda: now)
    with ProgressBar("render", 10, "texts") as bar:
        for now in (20.0, 40.0, 60.0, 80.0, 100.0, 120.0):  # noqa: B007 the clock
            bar.advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert [re.findall(r"\d+ of 10 |about .* left", line) for line in lines] == [
        ["3 of 10 ", "about 2 min 20 s left"],
        ["6 of 10 ", "about 80.0 s left"],
        ["6 of 10 ", "about 80.0 s left"],
    ]
