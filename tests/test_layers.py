"""Dependencies point down: a package may import only packages on lower floors. docs/architecture.md shows them.

Within a package too, neither files nor folders import each other in a circle.
"""

import ast
import re
from collections.abc import Collection, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
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
FOLDERS = sorted({path.parent for path in MODULES if path.name == "__init__.py"})
# Imports (from, of) that close a circle of files, and why they stay.
CIRCLES = {
    (
        "config/run_checks.py",
        "config/run.py",
    ): "only the type of what is checked; RunConfig runs these checks itself",
    **{
        (
            f"kernels/{name}.py",
            f"kernels/{name}_triton.py",
        ): "only once a tensor is on a GPU, as triton is optional"
        for name in ("cross_entropy", "decode_step", "dropout", "few_tokens", "muon")
    },
}


@cache
def imports(path: Path) -> set[str]:
    """Return everything that a file imports, inside functions and for type checkers too, by its whole name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
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


def file_of(name: str, package: Path) -> Path | None:
    """Return the file of `package` that has what is imported as `name`, or None if it is of another package."""
    root, *parts = name.split(".")
    while root == package.name and parts:
        path = package.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
        parts.pop()
    return None


def circle(
    folder: Path, modules: Sequence[Path], package: Path, allowed: Collection[tuple[str, str]]
) -> list[str]:
    """Return a circle of imports between the files and folders of `folder`, one line for each import; [] if none."""
    graph: dict[str, set[str]] = {}
    lines: dict[tuple[str, str], str] = {}
    for path in (path for path in modules if path.is_relative_to(folder)):
        for other in {file_of(name, package) for name in imports(path)} - {None}:
            if not other.is_relative_to(folder):
                continue
            line = path.relative_to(package).as_posix(), other.relative_to(package).as_posix()
            pair = path.relative_to(folder).parts[0], other.relative_to(folder).parts[0]
            if pair[0] != pair[1] and line not in allowed:
                graph.setdefault(pair[0], set()).add(pair[1])
                lines[pair] = " imports ".join(line)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        members = error.args[1]  # each is imported by the next one
        return [lines[later, earlier] for earlier, later in pairwise(members)]
    return []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_nothing_is_imported_in_a_circle(folder: Path) -> None:
    assert circle(folder, MODULES, PACKAGE, CIRCLES) == []


@pytest.mark.parametrize("pair", CIRCLES, ids=" ".join)
def test_allowed_circles_exist(pair: tuple[str, str]) -> None:
    folder = (PACKAGE / pair[0]).parent
    assert circle(folder, MODULES, PACKAGE, CIRCLES.keys() - {pair}), (
        f"CIRCLES: {pair} is not needed any more"
    )


def test_a_circle_of_folders_is_found(tmp_path: Path) -> None:
    """Through different files, late, and for type checkers."""
    package = tmp_path / "made"
    texts = {
        "low/__init__.py": "",
        "low/first.py": "def late():\n    from made.high import second\n",
        "low/third.py": "",
        "high/__init__.py": "",
        "high/second.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.low.third import Name\n",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, "utf-8")
    made = files(package, "*.py")
    found = ["high/second.py imports low/third.py", "low/first.py imports high/second.py"]
    assert sorted(circle(package, made, package, ())) == found
    assert circle(package / "low", made, package, ()) == []


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
