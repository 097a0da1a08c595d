"""results.json: written values are read back, and damage is reported in one line that names the place."""

import json
from pathlib import Path
from typing import Any

import pytest

from deskside.study import results as files
from deskside.study.claims.claim_results import judge
from deskside.study.stats.compare import compare
from deskside.utils.errors import RunError
from tests.study.made import results as made

WHOLE = judge(compare(made()), ["card*"])


def test_a_study_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps({**WHOLE.to_json(), "of_a_later_version": 1}))
    assert files.read(tmp_path) == WHOLE


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("groups", 0, "factors", 0, "levels", 1), None),
        (("arms", 1, "levels"), 3.5),
        (("arms", 2, "trials", 0, "metrics", "val_bpb"), {}),
        (("arms", 2, "trials", 0, "curve", 0, "tokens"), "many"),
        (("arms", 2, "estimates", "val_bpb", "low"), "<script>alert(1)</script>"),
        (("arms", 2, "comparisons", 0, "n"), None),
        (("interactions", 0, "metric"), [None]),
        (("fronts", 0, "arms", 0), {"a": 1}),
        (("claims", 0, "scale"), 7),
        (("arms", 2, "trials", 0, "status"), "exploded"),
        (("arms", 2, "comparisons", 0, "verdict"), "holds"),
        (("arms", 2, "comparisons", 0, "method"), "guessed"),
        (("interactions", 0, "verdict"), ""),
        (("groups", 0, "design"), "half"),
        (("claims", 0, "verdict"), "plausible"),
        (("claims", 0, "basis"), "hearsay"),
        (("seeds",), True),
        (("notes",), "a line"),
        (("schema_version",), 99),
    ],
)
def test_a_value_of_the_wrong_kind_is_told_by_its_place(
    tmp_path: Path, place: tuple[Any, ...], value: Any
) -> None:
    plain = json.loads(json.dumps(WHOLE.to_json()))
    at = plain
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    (tmp_path / "results.json").write_text(json.dumps(plain))
    with pytest.raises(RunError, match=r"results\.json: is damaged \(.*run the study again") as raised:
        files.read(tmp_path)
    assert "\n" not in str(raised.value)
    assert ".".join(str(key) for key in place) in str(raised.value) or place == ("schema_version",)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "3", '"x"', "{}", '{"schema_version": 1}', "[" * 5000, "\xff"]
)
def test_what_is_no_study_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match=r"results\.json: (is damaged|cannot be read)") as raised:
        files.read(tmp_path)
    assert "\n" not in str(raised.value)
