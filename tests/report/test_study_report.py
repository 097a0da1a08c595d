"""The report of synthetic studies: its numbers are those of the results, even if parts are missing or hostile."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deskside.cli.report import run
from deskside.report import study_claims, study_report, study_text
from deskside.report.document import Table, render_html, render_markdown
from deskside.report.study_claims import claims_markdown
from deskside.report.study_figures import Figures
from deskside.report.study_tables import unfinished_trials
from deskside.report.write import write_report
from deskside.study.metrics import BY_KEY, PRIMARY
from deskside.study.narrative.findings import GOALS, insights
from deskside.study.results import Arm, ClaimResult, Comparison, Group, Results
from deskside.study.stats.compare import compare
from deskside.utils.errors import RunError, UsageError
from tests.report.test_run_report import Page
from tests.study import made

HOSTILE = "<script>alert(1)</script> | `x` $\\frac{1}$ [a](http://b) \x07\ud800 \u4e2d"


def pages(results: Results, folder: Path) -> tuple[str, str]:
    """Return (the text of the HTML, the Markdown), each on one line and without
    pictures. Checks that all tags are closed.
    """
    document = study_report.compose(results, folder, Figures(), {})
    page = Page(render_html(document))
    assert not page.open
    return tuple(" ".join(text.split()) for text in (" ".join(page.words), render_markdown(document, folder)))  # type: ignore[return-value]


def save(results: Results, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results.to_json()))
    return folder


def pending(results: Results) -> Results:
    arms = [
        replace(arm, trials=[made.trial(t.seed, {}, "pending") for t in arm.trials]) for arm in results.arms
    ]
    return compare(replace(results, arms=arms, complete=False))


def claims() -> list[ClaimResult]:
    faster = ClaimResult(
        "a",
        "GQA trains 5 % faster",
        "a guide",
        "+5 %",
        9.62,
        9.03,
        10.21,
        "%",
        3,
        "124m",
        "holds in direction",
        "",
    )
    worse = ClaimResult(
        "b", "MQA: perplexity 7x", "a guide | part 2", "7x", 1.03, 1.01, 1.05, "x", 3, "124m", "contradicted",
        "The claim compares models of different sizes.",
    )  # fmt: skip
    less = replace(
        faster, id="c", text="FP4: 70 % less memory", claimed="-70 %", verdict="needs other hardware"
    )
    return [faster, worse, replace(less, measured=None, low=None, high=None, n=0)]


def row(text: str, beginning: str) -> list[str]:
    """Return the cells of the row in the Markdown table that begins with this text."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {beginning}"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_table_has_the_numbers_of_the_results(tmp_path: Path) -> None:
    results = compare(made.results())
    text = render_markdown(study_report.compose(results, tmp_path, Figures(), {}), tmp_path)
    for place, arm in enumerate(results.arms, start=1):
        cells = row(text, f"{place}. {arm.label}")
        loss, speed, memory = (arm.estimates[key] for key in PRIMARY)
        assert cells[2] == f"{loss.mean:.4f} ({loss.low:.4f} to {loss.high:.4f})"
        assert cells[4] == f"{speed.mean:,.0f}" + (" (emulated)" if arm.emulated else "")
        assert cells[6] == f"{memory.mean:.2f}"
        assert cells[9] == f"{1000 * arm.estimates['joules_per_token'].mean:.3f}"
        for at, key in ((3, "val_bpb"), (5, "tokens_per_second"), (7, "peak_memory_gib")):
            found = next((c for c in arm.comparisons if c.metric == key), None)
            if found is None:
                assert cells[at] == "" and arm.id == arm.baseline
            elif found.verdict == "no difference shown":
                low, high = (float(x) for x in re.findall(r"[-+][0-9.]+|(?<= )0(?= )", cells[at]))
                assert cells[at].startswith("no difference shown (")
                assert (low, high) == pytest.approx(
                    (100 * found.relative_low, 100 * found.relative_high), abs=0.06
                )
            elif found.verdict != "exact":
                assert float(cells[at].split(" %")[0]) == pytest.approx(100 * found.relative, abs=0.06)
    assert row(text, "6. medium")[1] == "2 of 3; 1 out of memory"
    assert row(text, "8. medium")[1] == "2 of 3; 1 diverged"


def test_sections_hold_findings_counts_and_reasons(tmp_path: Path) -> None:
    results = compare(made.results())
    for text in pages(results, tmp_path):
        assert all(sentence in text for goal in GOALS for sentence in insights(results, goal))
        assert (
            "6 arms (4 of them emulated)" in text
            and results.question in text
            and results.groups[0].budget in text
        )
        assert all(t.reason in text for arm in results.arms for t in arm.trials if t.status != "finished")
        assert "22 of 24" in text and "a card that was made up" in text and "Benjamini" in text
        assert "deskside study" not in text  # it is complete


def test_arms_of_two_groups_with_the_same_label_have_rows_of_their_own() -> None:
    results = made.results()
    lost = next(arm for arm in results.arms if len(arm.finished()) < len(arm.trials))
    groups = [*results.groups, replace(results.groups[0], name="other")]
    arms = [lost, replace(lost, id=f"other-{lost.id}", group="other")]
    (table,) = unfinished_trials(replace(results, groups=groups, arms=arms))
    assert isinstance(table, Table)
    assert [(row[0], row[1]) for row in table.rows] == [("main", lost.label), ("other", lost.label)]


def test_interactions_and_fronts_are_those_of_the_results(tmp_path: Path) -> None:
    results = compare(made.results())
    text = render_markdown(study_report.compose(results, tmp_path, Figures(), {}), tmp_path)
    assert results.interactions and results.fronts
    for found in results.interactions:
        names = " x ".join(f"{name} {found.levels[name]}" for name in (found.first, found.second))
        cells = row(text, f"{names} | {BY_KEY[found.metric].label} |")
        assert cells[2] == study_text.relative_text(found.effect, found.low, found.high, found.verdict)
        assert cells[3] == str(found.n)
    front = next(front for front in results.fronts if front.metrics == ["tokens_per_second", "val_bpb"])
    cells = row(text, "speed, validation loss")
    labels = {
        f"{arm.label}{' (emulated)' if arm.emulated else ''}" for arm in results.arms if arm.id in front.arms
    }
    assert set(cells[1].split("; ")) == labels


def test_one_seed_has_no_interval_and_says_so(tmp_path: Path) -> None:
    text = pages(compare(made.results(seeds=1)), tmp_path)[1]
    assert "too few seeds" in text and "no difference shown" not in text
    assert re.search(r"\| 1\.\d{4} \| \+", text)  # only a mean, without brackets


def test_power_is_not_shown_where_it_was_not_measured(tmp_path: Path) -> None:
    text = pages(compare(made.results(gpu=False)), tmp_path)[1]
    assert "mJ per token" not in text
    assert "reserved memory, power, energy" in text


def test_a_metric_that_one_arm_lacks_is_not_zero(tmp_path: Path) -> None:
    results = made.results()
    first = results.arms[2]
    stripped = [
        replace(t, metrics={k: v for k, v in t.metrics.items() if k != "watts"}) for t in first.trials
    ]
    results = compare(
        replace(results, arms=[*results.arms[:2], replace(first, trials=stripped), *results.arms[3:]])
    )
    text = render_markdown(study_report.compose(results, tmp_path, Figures(), {}), tmp_path)
    assert row(text, "3. small")[8] == "not measured"
    assert f"Without power, 1 arm: {first.label}." in " ".join(text.split())


def one_arm(results: Results) -> Results:
    return compare(replace(results, arms=results.arms[:1]))


def test_a_study_of_one_arm_says_that_nothing_is_compared(tmp_path: Path) -> None:
    document = study_report.compose(one_arm(made.results()), tmp_path, Figures(), {})
    html = render_html(document)
    assert "Nothing to compare" in html and "<p></p>" not in html


def no_arms(results: Results) -> Results:
    return replace(results, arms=[], groups=results.groups)


def two_groups(results: Results) -> Results:
    second = [replace(a, id=f"b-{a.id}", baseline=f"b-{a.baseline}", group="b") for a in results.arms[:4]]
    group = Group("b", "A second matrix", "774m", "full", "100M tokens", results.groups[0].factors[1:], [])
    return compare(replace(results, groups=[*results.groups, group], arms=[*results.arms, *second]))


@pytest.mark.parametrize("change", [pending, one_arm, no_arms, two_groups])
def test_small_and_unfinished_studies(tmp_path: Path, change: Callable[[Results], Results]) -> None:
    results = change(made.results())
    words, text = pages(results, tmp_path)
    if change is pending:
        assert "24 not run yet" in words and "24 trials" in words
        assert f"deskside study {tmp_path} --resume" in words
    if change is two_groups:
        assert "<details><summary>A second matrix (4 arms, 100M tokens)</summary>" in text
        assert "<details><summary>main (8 arms, 4 minutes of training)</summary>" in text


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    results = made.results()
    arms = [
        replace(arm, label=HOSTILE, trials=[replace(t, reason=HOSTILE, run=HOSTILE) for t in arm.trials])
        for arm in results.arms
    ]
    results = compare(
        replace(
            results, name=HOSTILE, question=HOSTILE, arms=arms, notes=[HOSTILE], machine={HOSTILE: HOSTILE}
        )
    )
    document = study_report.compose(results, tmp_path, Figures(), {})
    page = Page(render_html(document))
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link"}
    assert all((attrs["href"] or "").startswith("#section-") for tag, attrs in page.tags if tag == "a")
    assert "<script>alert(1)</script>" in " ".join(page.words)
    text = render_markdown(document, tmp_path)
    assert "<script>" not in text and "[a](" not in text and "\x07" not in text
    heads = [line.count(" | ") for line in text.splitlines() if line.startswith("| 1. ")]
    assert heads == [9]  # a vertical bar in a name makes no new column


def test_claims(tmp_path: Path) -> None:
    results = replace(compare(made.results()), claims=claims())
    words, markdown = pages(results, tmp_path)
    assert "1 of 3 published claims is contradicted on a card that was made up, and 0 hold." in words
    assert "1 contradicted; 1 holds in direction; 1 needs other hardware" in markdown
    document = " ".join(claims_markdown(results).split())
    assert "3 claims: 1 contradicted, 1 holds in direction, 1 needs other hardware." in document
    for text in (words, markdown, document):
        assert "+9.62 % (+9.03 to +10.2)" in text and "1.03 x (1.01 to 1.05)" in text
        assert "The claim compares models of different sizes." in text
    whole = claims_markdown(results)
    assert whole.startswith("# Claims, measured") and whole.endswith("\n")
    assert (
        whole.index("## Contradicted") < whole.index("## Holds in direction") < whole.index("## Needs other")
    )
    assert row(whole, "FP4: 70")[3:5] == ["not measured", ""]
    assert "a card that was made up" in whole and "4 minutes of training" in whole
    both = [replace(one, id=f"{one.id}{copy}") for one in claims() for copy in (1, 2)]
    assert "2 contradicted, 2 hold in direction, 2 need other hardware." in " ".join(
        claims_markdown(replace(results, claims=both)).split()
    )
    assert claims_markdown(replace(results, claims=[])).startswith("# Claims")


def test_command_writes_everything_and_prints_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = made.results()
    results = replace(compare(replace(results, arms=results.arms[:2])), claims=claims())
    folder = save(results, tmp_path / "made")
    target = tmp_path / "claims.md"
    assert run([str(folder), "--json", "--claims", str(target)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert Path(told["report"]).is_file() and Path(told["markdown"]).is_file()
    assert all(Path(path).is_file() for path in (*told["plots"], *told["results"].values()))
    assert set(told["results"]) == {"json", "parquet"}
    table = pq.read_table(folder / "results.parquet").to_pylist()
    assert [r["val_bpb"] for r in table] == [t.metrics["val_bpb"] for arm in results.arms for t in arm.trials]
    assert target.read_text("utf-8") == claims_markdown(study_claims.judge_with_others(results, []))
    page = Page((folder / "report.html").read_text("utf-8"))
    figures = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(figures) == len(told["plots"]) and all(attrs["role"] == "img" for attrs in figures)
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
    linked = re.findall(r"!\[[^]]*\]\((plots/[^)]+)\)", (folder / "report.md").read_text("utf-8"))
    assert {folder / link for link in linked} == {Path(path) for path in told["plots"]}


def test_parquet_is_made_anew_only_when_it_is_older(tmp_path: Path) -> None:
    folder = save(pending(made.results()), tmp_path / "made")
    write_report(folder)
    table = folder / "results.parquet"
    first = table.stat().st_mtime_ns
    write_report(folder)
    assert table.stat().st_mtime_ns == first
    save(compare(made.results()), folder)
    (folder / "plots").write_text("in the way")
    with pytest.raises(RunError, match="cannot be written"):
        write_report(folder)
    assert len([r for r in pq.read_table(table).to_pylist() if r["status"] == "finished"]) == 22


def test_directories_that_are_no_study(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        write_report(tmp_path)
    (tmp_path / "results.json").unlink()
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"--claims: .* is not a study"):
        run([str(tmp_path), "--claims", str(tmp_path / "claims.md")])
    folder = save(compare(made.results()), tmp_path / "made")
    with pytest.raises(UsageError, match="no claim"):
        run([str(folder), "--claims", str(tmp_path / "claims.md")])
    save(replace(compare(made.results()), claims=claims()), folder)
    for place in ("none/claims.md", "run.json/claims.md", "made"):
        with pytest.raises(UsageError, match="--claims"):
            run([str(folder), "--claims", str(tmp_path / place)])
    assert not (folder / "report.html").exists()


def compared(relative: float, low: float | None, high: float | None, verdict: str) -> Arm:
    found = Comparison("val_bpb", "base", 3, 0.1, low, high, relative, low, high, "paired t", verdict)
    return Arm("x", "x", "main", {}, "base", comparisons=[found])


@given(st.floats(-0.9, 30), st.floats(0, 3), st.sampled_from(["lower", "higher", "no difference shown"]))
def test_differences_are_rounded_and_not_changed(middle: float, reach: float, verdict: str) -> None:
    low, high = middle - reach, middle + reach
    text = study_text.difference_text(compared(middle, low, high, verdict), "val_bpb")
    shown = [float(number.replace(",", "")) for number in re.findall(r"(?:[-+]|\b)[0-9][0-9,.]*", text)]
    expected = [low, high] if verdict == "no difference shown" else [middle, low, high]
    assert len(shown) == len(expected)
    for seen, real in zip(shown, expected, strict=True):
        assert math.isclose(seen, 100 * real, abs_tol=0.51 if abs(middle) >= 1 else 0.051)
    assert text.startswith("no difference shown (") == (verdict == "no difference shown")


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ((0.0052, 0.0011, 0.0093, "higher"), "+0.52 % (+0.11 to +0.93 %)"),
        ((-0.2, -0.201, -0.198, "lower"), "-20.0 % (-20.1 to -19.8 %)"),
        ((0.001, -0.002, 0.004, "no difference shown"), "no difference shown (-0.20 to +0.40 %)"),
        (
            (-0.05, -0.101, -0.0043, "no difference shown"),
            f"no difference shown (-10.10 to -0.43 %; {study_text.NOT_ENOUGH})",
        ),
        ((-0.1, -0.1, -0.1, "exact"), "-10.0 %, exactly"),
        ((0.0, 0.0, 0.0, "exact"), "the same, exactly"),
        ((0.03, None, None, "too few seeds"), "+3.00 %; too few seeds"),
        ((math.nan, None, None, "higher"), ""),
    ],
)
def test_differences_in_words(arguments: Any, expected: str) -> None:
    assert study_text.difference_text(compared(*arguments), "val_bpb") == expected


@pytest.mark.parametrize(
    "numbers, unit, expected",
    [
        ((-20.25, -21.0, -19.4), "%", "-20.2 % (-21 to -19.4)"),
        ((14.6, 14.6, 14.6), "%", "+14.6 %"),
        ((1.845, 1.8, 1.9), "times", "1.84 times (1.8 to 1.9)"),
        ((5.31, None, None), "$", "$5.31"),
        ((12322.0, 8009.0, 16635.0), "tokens/s", "12,322 tokens/s (8,009 to 16,635)"),
        ((None, None, None), "%", "not measured"),
        ((math.inf, 1.0, 2.0), "%", "not measured"),
    ],
)
def test_what_a_claim_measured_in_words(numbers: Any, unit: str, expected: str) -> None:
    middle, low, high = numbers
    claim = replace(claims()[0], measured=middle, low=low, high=high, unit=unit)
    assert study_claims.measured_text(claim) == expected
