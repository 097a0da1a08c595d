"""The package's metadata: the supported Python versions, and extras that each install everything they import."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Extra -> the modules that are imported only where it is needed
MODULES = {
    "dashboard": {"streamlit", "plotly"},
    "serve": {"starlette", "uvicorn"},
    "gguf": {"gguf"},
    "llama-cpp": {"gguf", "llama_cpp"},
    "bleu": {"sacrebleu"},
}
DISTRIBUTIONS = {"llama_cpp": "llama-cpp-python"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~;\[ ]", each)[0].lower().replace("_", "-") for each in requirements}


def test_the_classifiers_are_the_supported_versions() -> None:
    listed = [c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert listed == ["3.11", "3.12", "3.13"] and PROJECT["requires-python"] == f">={listed[0]}"


@pytest.mark.parametrize("extra", MODULES)
def test_an_extra_brings_what_it_needs(extra: str) -> None:
    wanted = {DISTRIBUTIONS.get(module, module) for module in MODULES[extra]}
    assert wanted <= names(EXTRAS[extra])


def test_no_extra_needs_another_except_dev() -> None:
    assert [
        name for name, items in EXTRAS.items() if name != "dev" and any("deskside[" in i for i in items)
    ] == []


def test_every_hint_names_an_extra() -> None:
    """Checks `pip install 'deskside[NAME]'` in messages and documents."""
    files = [*(ROOT / "deskside").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    hints = {
        name for f in files for name in re.findall(r"deskside\[([a-z0-9-]+)\]", Path(f).read_text("utf-8"))
    }
    assert hints and hints <= EXTRAS.keys()


def test_no_dependency_excludes_a_supported_python() -> None:
    """Checks the installed versions, which are those pinned in the constraints."""

    for name in names(PROJECT["dependencies"]) | names([i for items in EXTRAS.values() for i in items]):
        try:
            wanted = metadata(name).json.get("requires_python")
        except PackageNotFoundError:
            continue  # an extra that is not installed here
        if wanted is not None:
            assert all(f"{version}.9" in SpecifierSet(wanted) for version in ("3.11", "3.12", "3.13")), name
