"""Dependencies point down: a package may import only packages on lower floors. docs/architecture.md shows them."""

import ast
import re
from pathlib import Path

import pytest

from tests.sources import PACKAGE, ROOT, files

# Highest first. Packages on one floor do not import each other.
FLOORS = (
    ("cli", "__main__"),
    ("dashboard",),
    ("pipeline", "report", "records"),
    ("study", "align", "export", "probe", "doctor"),
    ("train",),
    ("evaluate", "serve"),
    ("engine", "weights"),
    ("model", "precision"),
    ("ops", "optim", "run", "plan"),
    ("kernels", "data", "measurements"),
    ("config",),
    ("budget",),
    ("facts",),
    ("utils",),
)
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
NEVER = {("optim", "model"), ("data", "model")}
NO_TORCH = ("config", "budget", "facts", "plan", "measurements", "utils")
MODULES = files(PACKAGE, "*.py")


def imports(path: Path) -> set[str]:
    """Return every module that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def own_packages(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("deskside.")} - {
        "__version__",
        "STARTED",
    }


def test_every_package_has_a_floor() -> None:
    assert {package_of(path) for path in MODULES} - {"__init__"} == FLOOR.keys()
    assert len(FLOORS) <= 14


@pytest.mark.parametrize("package", sorted(FLOOR))
def test_imports_point_down(package: str) -> None:
    for path in (path for path in MODULES if package_of(path) == package):
        for other in own_packages(path) - {package}:
            if (package, other) != ("__main__", "cli"):
                assert FLOOR[other] > FLOOR[package], f"{path} imports {other}, which is not on a lower floor"
            assert (package, other) not in NEVER, f"{path} imports {other}"


@pytest.mark.parametrize("package", NO_TORCH)
def test_arithmetic_imports_no_torch(package: str) -> None:
    for path in (path for path in MODULES if package_of(path) == package):
        assert not {name for name in imports(path) if name.split(".")[0] == "torch"}, path


def edges() -> dict[str, set[str]]:
    """Return the packages that each package imports, without those that follow from others."""
    direct: dict[str, set[str]] = {package: set() for package in FLOOR}
    for path in MODULES:
        if (package := package_of(path)) in direct:
            direct[package] |= own_packages(path) - {package}
    below: dict[str, set[str]] = {}
    for package in sorted(FLOOR, key=FLOOR.__getitem__, reverse=True):
        below[package] = direct[package].union(*(below[other] for other in direct[package]))
    return {
        package: {o for o in others if not any(o in below[b] for b in others - {o})}
        for package, others in direct.items()
        if others and package != "__main__"
    }


def test_the_document_shows_the_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    drawn = [f"{package} --> {' & '.join(sorted(others))}" for package, others in sorted(edges().items())]
    shown = re.findall(r"^    (\w+ --> .*)$", text, re.MULTILINE)
    assert shown == drawn, "the diagram should have these lines:\n" + "\n".join(drawn)
    assert set(re.findall(r"^\*\*(\w+)\*\* ", text, re.MULTILINE)) == FLOOR.keys() - {"__main__"}
