"""The wheel and the sdist contain the package's tracked files and nothing else,
and the wheel works where it is unpacked.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import wheel_walk
from benchmarks.wheel_walk import copy_sources, sdist_problems, tracked, wheel_problems

BACKEND = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # the backend replaces sys.argv
print(build_meta.build_wheel(folder), build_meta.build_sdist(folder))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist, built without the network by the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_sources(folder / "source")
    done = subprocess.run(
        [sys.executable, "-c", BACKEND, str(folder)], cwd=folder / "source", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    wheel, sdist = done.stdout.split()[-2:]
    return folder / wheel, folder / sdist


def test_they_hold_what_git_tracks(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    assert wheel_problems(wheel) == []
    assert sdist_problems(sdist) == []


def test_a_wheel_with_other_contents_is_noticed(built: tuple[Path, Path], tmp_path: Path) -> None:
    left_out = next(name for name in sorted(tracked()) if name.endswith(".toml"))
    changed = tmp_path / built[0].name
    with zipfile.ZipFile(built[0]) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr("deskside/old.py" if name == left_out else name, old.read(name))
    assert wheel_problems(changed) == [f"lacks {left_out}", "has deskside/old.py"]


def test_it_works_where_it_is_unpacked(built: tuple[Path, Path], tmp_path: Path) -> None:
    """All data files are found in the wheel: presets, prices, templates and the bundled text."""
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(tmp_path / "site")
    check = (
        "import sys, pathlib; sys.path.insert(0, 'site'); import deskside; "
        "assert pathlib.Path(deskside.__file__).is_relative_to(pathlib.Path('site').resolve()); "
        "from deskside.cli.main import main; "
        "sys.exit(main(['presets']) or main(['plan', '--gpu', 'rtx4090', '--hours', '24', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"target"' in done.stdout and "124m" in done.stdout


def test_every_extra_is_installed_alone_or_needs_a_gpu() -> None:
    from tests.benchmarks.test_extras import EXTRAS

    assert EXTRAS.keys() - wheel_walk.IMPORTS.keys() == {"dev", "flash-attn-4", "quack", "transformer-engine"}
    assert wheel_walk.IMPORTS.keys() <= EXTRAS.keys()
