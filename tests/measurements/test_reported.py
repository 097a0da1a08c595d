"""Card reports: valid ones enter the table once, and implausible or hostile files are refused in one line."""

import contextlib
import copy
import datetime
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.cli.main import main
from deskside.measurements import reported
from deskside.measurements.card_report import MAX_FILE_BYTES, json_schema, make_report, parse_report
from deskside.measurements.plausible import check_report
from deskside.measurements.reported import add_report, reported_cards, reported_for, reported_speeds
from deskside.measurements.store import open_store
from deskside.utils.errors import UsageError
from tests.measurements.made_report import DATE, DOCTOR, H200, PROBES, faster, made
from tests.sources import ROOT

Report = dict[str, Any]


@pytest.fixture(autouse=True)
def _own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the repository's table, and write to a folder of this test."""
    monkeypatch.setenv("DESKSIDE_DATA", str(tmp_path / "added"))
    monkeypatch.setattr(reported, "PACKAGE", tmp_path / "package")


def write(folder: Path, report: Report, name: str = "card.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(report))
    return path


def with_value(path: str, value: Any) -> Callable[[Report], Report]:
    """Return a function that sets one value of a report, at a path such as points.0.tokens."""

    def change(report: Report) -> Report:
        *above, last = path.split(".")
        place: Any = report
        for name in above:
            place = place[int(name)] if name.isdigit() else place[name]
        place[last] = value
        return report

    return change


def times(path: str, factor: float) -> Callable[[Report], Report]:
    """Return a function that multiplies one number of a report."""

    def change(report: Report) -> Report:
        value: Any = report
        for name in path.split("."):
            value = value[int(name)] if name.isdigit() else value[name]
        return with_value(path, type(value)(factor * value))(report)

    return change


def twice(report: Report) -> Report:
    report["points"].append(copy.deepcopy(report["points"][0]))
    return report


def many_points(report: Report) -> Report:
    point = report["points"][0]
    report["points"] = [{**point, "tokens": n * point["tokens"]} for n in range(1, 66)]
    return report


def step_seconds(seconds: float) -> Callable[[Report], Report]:
    return with_value("points.0.step_seconds", dict.fromkeys(("median", "p10", "p90"), seconds))


# The change of a valid report, and the field or the words that the message must name.
WRONG_VALUES: dict[str, tuple[Callable[[Report], Report], str]] = {
    "another kind of file": (with_value("kind", "probe"), "not a card report"),
    "no schema": (lambda report: {k: v for k, v in report.items() if k != "schema"}, "schema"),
    "schema of the future": (with_value("schema", 2), "newer deskside"),
    "schema true": (with_value("schema", True), "schema true"),
    "a field for the host's name": (lambda report: {**report, "hostname": "anna-pc"}, "hostname"),
    "a field in a point": (with_value("points.0.path", "/home/anna"), "points.0.path"),
    "a model of countless blocks": (with_value("points.0.model.num_hidden_layers", 10**8), "num_hidden_layers"),
    "negative time": (step_seconds(-0.05), "step_seconds"),
    "time in milliseconds": (step_seconds(50_640.0), "step_seconds"),
    "no time": (step_seconds(0), "step_seconds"),
    "quantiles in the wrong order": (with_value("points.0.step_seconds.p10", 9.0), "median"),
    "a step faster than the card": (step_seconds(0.0005), "step_seconds"),
    "a card that is twice as fast": (lambda report: faster(report, 2.0), "matmul_flops"),
    "a step faster than its products": (step_seconds(0.015), "step_seconds"),
    "copies faster than the memory": (times("benchmark.copy_bytes_per_second", 1.5), "copy_bytes_per_second"),
    "products in TFLOP/s": (with_value("points.1.matmul_flops", 787.0), "matmul_flops"),
    "copies in GB/s": (with_value("benchmark.copy_bytes_per_second", 4149.0), "copy_bytes_per_second"),
    "memory in MiB": (with_value("memory_bytes", 143_156), "memory_bytes"),
    "another card's memory": (with_value("memory_bytes", 80 * 2**30), "memory_bytes"),
    "peak memory in MiB": (with_value("points.0.peak_allocated_bytes", 10_796), "peak_allocated_bytes"),
    "more memory than the card has": (with_value("points.0.device_used_bytes", 2**38), "device_used_bytes"),
    "allocated more than reserved": (times("points.0.peak_allocated_bytes", 1.5), "peak_allocated_bytes"),
    "watts in milliwatts": (times("points.0.watts", 1000), "watts"),
    "watts above the limit": (times("points.0.watts", 1.4), "points.0.watts"),
    "a power limit in kilowatts": (with_value("power_limit_watts", 0.7), "power_limit_watts"),
    "twice the power limit": (with_value("power_limit_watts", 1400), "power_limit_watts"),
    "a number as text": (with_value("points.0.tokens", "65536"), "points.0.tokens"),
    "true as a number": (with_value("points.0.tokens", True), "points.0.tokens"),
    "a fraction of a token": (with_value("points.0.tokens", 0.5), "points.0.tokens"),
    "a batch that does not divide": (with_value("points.0.micro_tokens", 1000), "micro_tokens"),
    "a model that cannot be": (with_value("points.0.model.num_key_value_heads", 5), "num_key_value_heads"),
    "a model of unknown fields": (with_value("points.0.model.flux", 5), "flux"),
    "a table in the model": (with_value("points.0.model.rope_scaling", {"factor": 2}), "rope_scaling"),
    "an endless model": (with_value("points.0.model.num_hidden_layers", 10_000), "step_seconds"),
    "an unknown card": (with_value("card", "NVIDIA Imaginary 1"), "Imaginary"),
    "a card of another maker": (
        lambda report: {**report, "card": "AMD Instinct MI300X", "memory_bytes": 192 * 2**30},
        "not an NVIDIA",
    ),
    "a path as the card": (with_value("card", "../../etc/passwd"), "card"),
    "control characters in the card": (with_value("card", "H200\x1b[2J\n"), "card"),
    "another alphabet in the card": (with_value("card", "NVIDIA H\uff12\uff10\uff10"), "card"),
    "a path in a version": (with_value("driver", "580/../../x"), "driver"),
    "markup in a version": (with_value("torch", "2<script>"), "torch"),
    "a line break in a field's name": (with_value("doctor", {"a\nb": "works"}), "doctor"),
    "an unknown verdict": (with_value("doctor", {"bf16": "great"}), "doctor"),
    "a verdict of 10 kB": (with_value("doctor", {"bf16": "x" * 10_000}), "doctor"),
    "a date of the future": (with_value("date", "2031-01-01"), "future"),
    "a date before deskside": (with_value("date", "2019-01-01"), "long ago"),
    "a date that is none": (with_value("date", "2026-02-30"), "not a date"),
    "no points": (with_value("points", []), "points"),
    "65 points": (many_points, "points"),
    "the same point twice": (twice, "same setting"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, words = WRONG_VALUES[name]
    refused(write(tmp_path, change(made())), words, capsys)


def refused(path: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Assert that `facts add` exits with 2 and one printable line that contains `words`, and adds nothing."""
    assert main(["facts", "add", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err[:-1].isprintable() and words in err
    assert len(err) < 600
    assert reported_cards() == ()


WRONG_TEXTS: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "not JSON"),
    "binary": (b"\x80\x04\x95\xff", "UTF-8"),
    "half a file": (json.dumps(made())[:500], "not JSON"),
    "NaN": (json.dumps(made()).replace("692.08", "NaN"), "not finite"),
    "infinity": (json.dumps(made()).replace("692.08", "1e999"), "not finite"),
    "a long integer": (json.dumps(made()).replace("16384", "9" * 5000), "digits"),
    "deep nesting": ("[" * 100_000, "nested"),
    "deep nesting in a field": (json.dumps(made())[:-1] + ', "x": ' + "[" * 200 + "]" * 200 + "}", "nested"),
    "a list": ("[]", "not a card report"),
    "a large file": (" " * (MAX_FILE_BYTES + 1), "bytes"),
}


@pytest.mark.parametrize("name", WRONG_TEXTS)
def test_wrong_texts_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = WRONG_TEXTS[name]
    path = tmp_path / "card.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(path, words, capsys)


def test_ten_gigabytes_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "card.json"
    with path.open("wb") as file:
        file.truncate(10 * 10**9)  # a sparse file, which takes no disk space
    refused(path, "10,000,000,000 bytes", capsys)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "card.json"
    if kind == "folder":
        path.mkdir()
    if kind == "pipe":
        os.mkfifo(path)  # reading it would block for ever
    refused(path, "No such file" if kind == "missing" else "not a file", capsys)


def test_a_setting_that_was_measured_as_auto_and_by_name_is_reported_once() -> None:
    rows = open_store(PROBES).rows(H200)
    again = copy.deepcopy(next(row for row in rows if row["kind"] == "point"))
    assert again["key"]["spec"]["precision"] == "auto"
    again["key"]["spec"]["precision"] = again["result"]["precision"]
    again["result"]["step_seconds"] = {"median": 0.5, "p10": 0.5, "p90": 0.5}
    points = make_report(H200, [*rows, again], DOCTOR, DATE).points
    assert len(points) == len(made()["points"])
    assert [point.step_seconds.median for point in points].index(0.5) == len(points) - 1


def test_a_report_enters_the_table_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, made())
    assert main(["facts", "add", str(path), "--json"]) == 0
    added = json.loads(capsys.readouterr().out)
    assert added["gpu"] == "H200 SXM" and added["part"] == "user"
    assert Path(added["table"]).parent == tmp_path / "added"
    (entry,) = reported_for("H200 SXM")
    assert entry.report.to_json() == made() and entry.digest == added["digest"]
    table = Path(added["table"]).read_bytes()
    # The same report with other whitespace, and another report with one of its points.
    path.write_text(json.dumps(made(), indent=7, sort_keys=True))
    other = made() | {"date": "2026-11-21", "points": made()["points"][:1]}
    for file in (path, write(tmp_path, other, "other.json")):
        assert main(["facts", "add", str(file)]) == 2
        assert "already" in capsys.readouterr().err
    assert Path(added["table"]).read_bytes() == table
    assert reported_cards() == ("H200 SXM",) and reported_for("RTX 4090") == ()


def test_a_plan_without_a_probe_uses_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of an H200 changes and says why, in text and JSON; that of another card does not change."""

    def plan(gpu: str, *more: str) -> Any:
        command = [
            "plan",
            "--gpu",
            gpu,
            "--preset",
            "124m",
            "--hours",
            "1",
            "--probes",
            str(tmp_path / "probes"),
        ]
        assert main([*command, *more]) == 0
        out = capsys.readouterr().out
        return json.loads(out) if "--json" in more else " ".join(out.split())

    before, other = plan("h200", "--json"), plan("h100 sxm", "--json")
    entry, _ = add_report(write(tmp_path, faster(made(), 0.6)), DATE)
    after = plan("h200", "--json")
    speeds = [found["bands"][0]["speed"]["tokens_per_second"]["expected"] for found in (before, after)]
    assert speeds[1] == pytest.approx(0.6 * speeds[0], rel=0.1)
    assert after["request"]["calibration"] == {
        **after["request"]["calibration"], "source": "reported", "reports": [entry.digest]
    }  # fmt: skip
    assert after["bands"][0]["speed"]["calibration"] == "reported"
    assert "rates reported: speed +-15%" in (text := plan("h200")) and "1 report by other owners" in text
    assert "rates reported: 4 points in 1 report" in plan("h200", "--details")
    assert any("1 report by other owners" in note for note in after["notes"])
    assert plan("h100 sxm", "--json")["bands"] == other["bands"]


def test_the_table_of_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every report in it would be accepted again, and belongs to the GPU whose folder it is in."""
    monkeypatch.undo()
    cards = reported_cards()
    assert "H200 SXM" in cards
    for card in cards:
        for entry in reported_for(card):
            assert check_report(entry.report, datetime.date.today()).name == card


def test_a_card_has_a_limited_number_of_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reported, "MAX_REPORTS", 2)
    for index in range(2):
        add_report(write(tmp_path, faster(made(), 1 - index / 100)), DATE)
    with pytest.raises(UsageError, match="2 reports"):
        add_report(write(tmp_path, faster(made(), 0.9)), DATE)
    low, median, high = reported_speeds(reported_for("H200 SXM"))[0].tokens_per_second
    assert low == pytest.approx(0.99 * high) and median == pytest.approx(0.995 * high)


def test_a_checkout_writes_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone has .git and pyproject.toml; an installed package has neither, and writes to the user's folder."""
    monkeypatch.delenv("DESKSIDE_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    (tmp_path / "package" / "facts").mkdir(parents=True)
    user = tmp_path / "share" / "deskside" / "reported.jsonl"
    assert add_report(write(tmp_path, made()), DATE)[1] == user
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").touch()
    entry, path = add_report(write(tmp_path, faster(made(), 0.9)), DATE)
    assert path == tmp_path / "package" / "facts" / "reported.jsonl" and entry.part == "deskside"
    assert [found.part for found in reported_for("H200 SXM")] == ["deskside", "user"]
    # A user's reports may come from a later version.
    path.write_bytes(path.read_bytes() + user.read_bytes())
    assert len(reported_for("H200 SXM")) == 2


@pytest.mark.parametrize("damage", ["half a line", "an edited number", "a list", "no card", "another card"])
def test_a_damaged_table_is_named(damage: str, tmp_path: Path) -> None:
    _, table = add_report(write(tmp_path, made()), DATE)
    add_report(write(tmp_path, faster(made(), 0.9)), DATE)
    first, second = table.read_bytes().splitlines()
    lines = {
        "half a line": first[: len(first) // 2],
        "an edited number": first.replace(b"692.08", b"612.08"),
        "a list": b"[]",
        "no card": b"{}",
        "another card": first.replace(b'"gpu": "H200 SXM"', b'"gpu": "B200"'),
    }
    table.write_bytes(second + b"\n" + lines[damage] + b"\n")
    with pytest.raises(UsageError, match=r"reported\.jsonl:2: ") as error:
        reported_for("B200" if damage == "another card" else "H200 SXM")
    assert "\n" not in str(error.value)


def test_of_two_that_add_a_report_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, check = write(tmp_path, made()), reported._check_new

    def slow_check(*arguments: Any) -> None:
        check(*arguments)
        time.sleep(0.2)

    def add(_: int) -> bool:
        with contextlib.suppress(UsageError):
            return bool(add_report(path, DATE))
        return False

    monkeypatch.setattr(reported, "_check_new", slow_check)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(add, range(2))) == [False, True]
    assert len(reported_for("H200 SXM")) == 1


def test_a_table_without_its_last_newline_is_continued(tmp_path: Path) -> None:
    _, table = add_report(write(tmp_path, made()), DATE)
    table.write_bytes(table.read_bytes().rstrip(b"\n"))
    add_report(write(tmp_path, faster(made(), 0.9)), DATE)
    assert len(reported_for("H200 SXM")) == 2


def test_the_schema_in_the_documentation() -> None:
    """Written by `deskside facts schema > docs/card-report.schema.json`. A validator that we did not write reads it."""
    written = json.loads((ROOT / "docs" / "card-report.schema.json").read_text())
    assert written == json_schema()
    jsonschema.Draft202012Validator.check_schema(written)
    validator = jsonschema.Draft202012Validator(written)
    assert validator.is_valid(made())
    for name in (
        "negative time",
        "a field for the host's name",
        "a path as the card",
        "an unknown verdict",
        "no points",
    ):
        assert not validator.is_valid(WRONG_VALUES[name][0](made())), name


def places(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value in a report."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (*above, name)
        yield from places(item, (*above, name))


PLACES = list(places(made() | {"points": made()["points"][:1]}))
WILD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(PLACES), WILD), min_size=1, max_size=3))
def test_wild_values_are_refused_or_harmless(changes: list[tuple[tuple[str | int, ...], Any]]) -> None:
    """A report with any wild value is refused in one line, or all of its numbers are finite and positive."""
    report: Any = made()
    for place, value in changes:
        inner = report
        with contextlib.suppress(KeyError, IndexError, TypeError):  # an earlier change has removed this path
            for name in place[:-1]:
                inner = inner[name]
            inner[place[-1]] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "card.json"
        path.write_text(json.dumps(report))
        try:
            entry, _ = add_report_to(Path(folder), path)
        except UsageError as error:
            assert str(error).isprintable()
            return
    for point in entry.report.points:
        assert math.isfinite(point.tokens_per_second) and point.tokens_per_second > 0
    check_report(parse_report(entry.report.to_json()), DATE)


def add_report_to(folder: Path, file: Path) -> tuple[reported.Reported, Path]:
    """Add a report to a separate table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DESKSIDE_DATA", str(folder / "added"))
        return add_report(file, DATE)
