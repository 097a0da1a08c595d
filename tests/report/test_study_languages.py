"""The languages in the report of a made-up study."""

import json
from dataclasses import replace
from pathlib import Path

from deskside.report import study_languages
from deskside.report.document import Details, Image, Sample, Table
from deskside.report.write import write_report
from deskside.study.results import Results
from deskside.study.stats.languages import MEAN, by_language, read_records
from tests.report.test_run_report import Page
from tests.report.test_study_report import row, save
from tests.study.made_languages import LANGUAGES, RISING, bits_per_byte, write


def blocks(results: Results, folder: Path) -> list[study_languages.Block]:
    return study_languages.blocks(results, read_records(results, folder), folder / "plots")


def test_the_report_has_table_plots_samples_and_cautions(tmp_path: Path) -> None:
    values = bits_per_byte()
    results = write(tmp_path, values, RISING, mixture_epochs={"bn": 2.0, "gu": 9.0})
    save(results, tmp_path)
    html = write_report(tmp_path).read_text("utf-8")
    text = (tmp_path / "report.md").read_text("utf-8")
    for language in LANGUAGES:
        cells = row(text, f"{language} |")
        dense, moe = (sum(values[arm, n][language] for n in (1, 2, 3)) / 3 for arm in ("dense", "moe"))
        assert cells[1:3] == [f"{dense:.4f}", f"{moe:.4f}"]
    assert row(text, "bn |")[3].startswith("-") and ", better (" in row(text, "bn |")[3]
    assert row(text, "ta |")[3].startswith("not shown (-")
    assert [row(text, f"{name} |")[4] for name in ("gu", "ta", MEAN)] == ["9.0", "not known", ""]
    for name in ("languages_2", "expert_languages_2"):
        assert (tmp_path / "plots" / f"{name}.svg").stat().st_size > 2000
    assert "2 of 2 arms overfit" in " ".join(text.split("## ")[0].split())
    assert "Overfitting in \u201cdense\u201d" in " ".join(text.split())
    page = Page(html)
    assert not page.open and not {tag for tag, _ in page.tags} & {"script", "b"}
    assert "<strong>&lt;b&gt;gu&lt;/b&gt; </strong>moe 1 &lt;script&gt;" in html
    # Without the runs, their numbers are gone, and so are the plots of the last report.
    for run in (tmp_path / "runs").iterdir():
        (run / "summary.json").unlink()
    write_report(tmp_path)
    assert "## Languages" not in (tmp_path / "report.md").read_text("utf-8")
    assert not (tmp_path / "plots" / "languages_2.svg").exists()


def test_experts_and_samples_are_those_of_the_first_seed_that_has_them(tmp_path: Path) -> None:
    results = write(tmp_path, bits_per_byte())
    summary = tmp_path / "runs" / "moe-s1" / "summary.json"
    content = json.loads(summary.read_text())
    summary.write_text(json.dumps(content | {"samples": [], "val_expert_load": {}}))
    found = blocks(results, tmp_path)
    experts = [one for one in found if isinstance(one, Image) and "experts" in one.caption]
    assert [one.caption.split(":")[0] for one in experts] == ["moe, seed 2"]
    samples = [one for one in found if isinstance(one, Details)]
    assert [one.summary for one in samples] == ["Samples of dense, seed 1", "Samples of moe, seed 2"]
    texts = [one.completion for one in samples[1].blocks if isinstance(one, Sample)]
    assert texts == ["moe 2 <script>"] * len(LANGUAGES)


def test_the_plot_has_a_row_per_language_at_its_difference(tmp_path: Path) -> None:
    results = write(tmp_path, bits_per_byte())
    compared = by_language(results, results.groups[0], read_records(results, tmp_path))
    assert compared is not None
    blocks(results, tmp_path)
    svg = (tmp_path / "plots" / "languages_2.svg").read_text("utf-8")
    for language in LANGUAGES:
        (comparison,) = (c for c in compared.arms["moe", language].comparisons if c.metric == "val_bpb")
        assert f">{language}</text>" in svg and f"{100 * comparison.relative:+.2f} %</text>" in svg
    assert MEAN not in svg


def test_several_groups_and_missing_languages_are_told(tmp_path: Path) -> None:
    values = bits_per_byte()
    del values["moe", 2]["gu"]
    results = write(tmp_path, values)
    dense = results.arms[0]
    other = replace(results.groups[0], name="b", title="Another")
    arms = [*results.arms, replace(dense, id="b", label="alone", group="b", baseline="b")]
    found = blocks(replace(results, groups=[*results.groups, other], arms=arms), tmp_path)
    assert [one for one in found if isinstance(one, str)][1:] == ["main:", "Another:"]
    tables = [one for one in found if isinstance(one, Table)]
    assert [table.head for table in tables] == [
        ["language", "dense", "moe", "moe: difference"], ["language", "alone"],
    ]  # fmt: skip
    assert any("moe, seed 2: no result for gu." in getattr(one, "items", ()) for one in found)


def test_a_study_in_one_language_has_no_section(tmp_path: Path) -> None:
    results = write(tmp_path, {(arm, 1): {"en": 1.0} for arm in ("dense", "moe")})
    assert blocks(results, tmp_path) == [] and not (tmp_path / "plots").exists()
