"""Dependencies point down: a package may import only packages on lower floors. docs/architecture.md has the picture."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "deskside"

# Highest first. Packages on one floor do not import each other.
FLOORS = (
    ("cli", "__main__"),
    ("dashboard",),
    ("pipeline", "report"),
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
MODULES = sorted(ROOT.rglob("*.py"))


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
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


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
