"""The comparison of two checkouts, using fake checkouts whose benchmarks write fixed numbers at once."""

import json
from pathlib import Path

import pytest

from benchmarks import old_new

STEP = """
import json, pathlib, sys
import installed_elsewhere
value = {{"phases": {{"short": {{"step_ms": {{"median": {ms}}}}}}}, "optimizer_ms": 1.0, "peak_allocated_gib": None,
         "cold_start": {{"first step done": 2.0}}}}
content = {{"results": [{{"arm": "bf16", "status": "ok", "value": value}}]}}
pathlib.Path(sys.argv[-1]).write_text(json.dumps(content))
"""


def checkout(folder: Path, ms: float) -> Path:
    (folder / "benchmarks").mkdir(parents=True)
    (folder / "benchmarks/step.py").write_text(STEP.format(ms=ms))
    (folder / "benchmarks/decode.py").write_text("raise SystemExit('no card')")
    return folder


def test_medians_and_their_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = checkout(tmp_path / "old", 10.0), checkout(tmp_path / "new", 9.0)
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/installed_elsewhere.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    out = tmp_path / "out.json"
    arguments = [str(old), str(new), "--job", "step --preset demo", "--job", "decode", "--json", str(out)]
    assert old_new.main(arguments) == 1  # decoding fails
    report = json.loads(out.read_text())
    rows = {row["name"]: row for row in report["compared"]}
    assert rows["bf16 step ms"]["ratio"] == pytest.approx(0.9)
    assert rows["bf16 step ms"]["runs"] == {"old": [10.0, 10.0], "new": [9.0, 9.0]}
    assert rows["bf16 first step s"]["ratio"] == 1.0
    assert report["failed"] == [{"job": "decode", "error": "no card"}]


@pytest.mark.parametrize(("noisy", "repeats"), [(False, True), (True, False)])
def test_losses_are_compared_to_the_last_bit(
    noisy: bool, repeats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step differs, and a checkout whose runs differ from each other is reported."""
    ran: list[Path] = []

    def run(folder: Path, job: str) -> dict[str, object]:
        ran.append(folder)
        second = (
            (1.5).hex() if folder.name == "old" and not (noisy and len(ran) == 3) else (1.5 + 2e-16).hex()
        )
        return {"bf16": {"losses": [(2.0).hex(), second], "weights": "x"}}

    monkeypatch.setattr(old_new, "run", run)
    (row,) = old_new.equal_losses("losses", {"old": tmp_path / "old", "new": tmp_path / "new"})
    assert row["first_difference"] == 2 and row["weights_equal"] and row["old_repeats"] is repeats
    assert [folder.name for folder in ran] == ["old", "new", "old"]
