"""The arrows point down only: a package may import only packages that stand lower on the shelf."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "deskside"

# Highest first, as in the design. Modules of the top floor may import anything.
TOP = ("cli", "cli_align", "cli_align_dpo", "cli_align_grpo", "cli_study", "cli_train", "go", "__main__")
SHELF = (
    "dashboard", "serve", "report",
    "study", "plan", "probe",
    "align", "train", "export", "evaluate", "engine",
    "data", "optim", "precision", "model", "ops", "kernels",
    "config", "budget", "facts",
    "parsing", "errors", "signals",
)  # fmt: skip
NEVER = {("precision", "model"), ("optim", "model"), ("data", "model")}
NO_TORCH = ("config", "budget", "facts", "plan")
MODULES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in the file the import stands."""
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
    return {
        name.split(".")[1] for name in imports(path) if name.startswith("deskside.") and name.count(".") >= 1
    }


def test_every_package_has_its_place() -> None:
    present = {package_of(path) for path in MODULES} - {"__init__"}
    assert present <= {*SHELF, *TOP}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    package = package_of(path)
    if package in TOP:
        return
    for other in own_packages(path) - {package, "__version__", "STARTED"}:
        assert other in SHELF, f"{package} imports {other}, which stands on the top floor or nowhere"
        assert SHELF.index(other) > SHELF.index(package), (
            f"{package} imports {other}, which does not stand lower"
        )
        assert (package, other) not in NEVER
        if package == "plan" and SHELF.index(other) < SHELF.index("config"):
            assert {name for name in imports(path) if name.startswith("deskside.probe")} <= {
                "deskside.probe.store"
            }


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_arithmetic_imports_no_torch(path: Path) -> None:
    if package_of(path) in NO_TORCH:
        assert not {name for name in imports(path) if name.split(".")[0] == "torch"}
