"""Figures as SVG are valid, have text as text and unique ids, and have a dark color for every color."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from deskside.report import run_experts, run_figures, run_languages
from deskside.report.colors import DARK_FIGURE_COLORS
from deskside.report.study_figures import draw
from deskside.report.svg import inline
from deskside.run.record import read_run
from deskside.study.stats.compare import compare
from tests.report.test_run_experts import LOAD, add_experts
from tests.report.test_run_languages import add_languages
from tests.report.test_run_report import make_run
from tests.study import made


@pytest.mark.full
def test_every_figure_is_right_on_a_light_and_a_dark_page(tmp_path: Path) -> None:
    results = compare(made.results())
    draw(results, tmp_path / "study")
    run = make_run(tmp_path / "run")
    run_figures.draw(read_run(run), run / "plots")
    add_languages(run, ["bn", "gu"])
    run_languages.draw(read_run(run), run / "plots")
    add_experts(run, {"hi": LOAD, "ta": LOAD[::-1]})
    run_experts.draw(read_run(run), run / "plots")
    paths = [*(tmp_path / "study").iterdir(), *(run / "plots").iterdir()]
    assert len(paths) > 20
    identities: set[str] = set()
    for path in paths:
        root = ElementTree.fromstring(path.read_text("utf-8"))
        colors = {e.get(name) for e in root.iter() for name in ("fill", "stroke")}
        colors = {c for c in colors if c not in (None, "none") and not str(c).startswith("url(#")}
        assert colors <= DARK_FIGURE_COLORS.keys(), path.name
        assert not any("style" in e.attrib for e in root.iter())
        own = [i for e in root.iter() if (i := e.get("id"))]
        assert len(set(own)) == len(own) and not identities & set(own)
        identities |= set(own)
        values = " ".join(value for e in root.iter() for value in e.attrib.values())
        assert set(re.findall(r"(?:^|[\s(])#([\w.-]+)", re.sub(r"#[0-9a-f]{6}\b", "", values))) <= set(own)
    text = "".join(ElementTree.parse(tmp_path / "study" / "forest_val_bpb.svg").getroot().itertext())
    assert "Validation loss against the baseline" in text and "GQA on" in text
    assert "xmlns" not in inline(paths[0]) and "<style" not in inline(paths[0])
