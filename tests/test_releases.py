"""The changelog's newest section and the newest release notes are those of the version that a wheel would have."""

import re
from pathlib import Path

from deskside import __version__

ROOT = Path(__file__).parents[1]
DATE = r"\d{4}-\d{2}-\d{2}"


def test_the_newest_section_is_of_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    found = re.fullmatch(rf"\[(.+)\]\((.+)\) - ({DATE})", headings[0])
    assert found and found[1] == __version__
    notes = (ROOT / found[2]).read_text("utf-8").splitlines()
    assert notes[0] == f"# Release {__version__}"
    assert notes[2].startswith(f"{found[3]}.")


def test_release_notes_are_linked_by_the_changelog_and_the_site() -> None:
    for path in (ROOT / "docs" / "releases").glob("*.md"):
        name = path.relative_to(ROOT).as_posix()
        assert f"]({name})" in (ROOT / "CHANGELOG.md").read_text("utf-8")
        assert name.removeprefix("docs/") in (ROOT / "mkdocs.yml").read_text("utf-8")
