"""Contact sheets, and the images of the README."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.sources import ROOT

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
from benchmarks import contact_sheet  # noqa: E402

MAX_BYTES = 200_000  # GitHub loads them together with the page


def picture(folder: Path, name: str, size: tuple[int, int], color: str) -> None:
    Image.new("RGB", size, color).save(folder / f"{name}.png")


def test_a_sheet_has_a_row_for_each_name_and_a_column_for_each_form(tmp_path: Path) -> None:
    picture(tmp_path, "runs-desktop-light", (1440, 900), "red")
    # a screenshot of a whole page, of which one screen is shown
    picture(tmp_path, "runs-phone-dark", (390, 3000), "blue")
    picture(tmp_path, "other-phone-light", (390, 844), "lime")
    picture(tmp_path, "not-of-a-form", (10, 10), "black")
    sheet = contact_sheet.contact_sheet([tmp_path])
    assert sheet.size == (480 + 480 + 139 + 139 + 5 * 16, 2 * 336 + 16)
    colors = {"red": (255, 0, 0), "blue": (0, 0, 255), "lime": (0, 255, 0)}
    found = {name: [] for name in colors}
    for row in range(2):
        for column, left in enumerate((16, 512, 1008, 1163)):
            pixel = sheet.getpixel((left + 60, 16 + row * 336 + 20 + 290))
            for name, color in colors.items():
                if pixel == color:
                    found[name].append((row, column))
    assert found == {"lime": [(0, 2)], "red": [(1, 0)], "blue": [(1, 3)]}


def test_many_names_are_set_in_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        picture(tmp_path, f"{name}-desktop-light", (1440, 900), "red")
    monkeypatch.setattr(contact_sheet, "MAX_ROWS", 2)
    sheet = contact_sheet.contact_sheet([tmp_path])
    width = 480 + 480 + 139 + 139 + 5 * 16
    assert sheet.size == (2 * width, 2 * 336 + 16)
    shown = [sheet.getpixel((left + 60, top + 310)) for left in (16, 16 + width) for top in (16, 352)]
    assert shown == [(255, 0, 0)] * 3 + [(255, 255, 255)]


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no picture named"):
        contact_sheet.contact_sheet([tmp_path])


def test_every_page_of_the_dashboard_has_a_picture() -> None:
    pytest.importorskip("playwright", reason="playwright is not installed")
    from benchmarks import pictures
    from deskside.dashboard.page import PAGES

    names = [shot.name for shots in (pictures.dashboard_shots(), pictures.live_shots()) for shot in shots]
    assert len(set(names)) == len(names) and {f"dashboard-{spec.name}" for spec in PAGES} <= set(names)


class Pictures(HTMLParser):
    """Collects the files of <picture> elements and their alternative texts."""

    def __init__(self, text: str):
        super().__init__()
        self.files: dict[str, str] = {}
        self.alternatives: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "source":
            self.files["dark" if "dark" in (values["media"] or "") else "light"] = values["srcset"] or ""
        elif tag == "img":
            self.files["light"] = values["src"] or ""
            self.alternatives.append(values.get("alt") or "")


def test_the_picture_of_the_readme_is_small_and_described() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    found = Pictures(text)
    assert set(found.files) == {"light", "dark"}
    for name in found.files.values():
        path = ROOT / name
        assert path.stat().st_size < MAX_BYTES
        with Image.open(path) as image:
            assert image.size == (1440, 900)
    assert all(len(words) > 40 for words in found.alternatives)
    assert all(re.search(r"!\[[^\]]{20,}\]", line) for line in text.splitlines() if line.startswith("!["))
