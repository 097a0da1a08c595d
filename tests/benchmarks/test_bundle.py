"""The bundle for a machine without internet: what is unpacked equals what was packed,
whatever the number and order of the parts.
"""

import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import bundle
from benchmarks.bundle import BundleError, pack, requirements, unpack, unzip

LISTS = sorted(Path(bundle.__file__).with_name("wheels").glob("*.txt"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@settings(max_examples=15, deadline=None)
@given(
    files=st.lists(st.binary(max_size=3000), min_size=1, max_size=5),
    size=st.integers(40, 2000),
    data=st.data(),
)
def test_pieces_in_any_order(files: list[bytes], size: int, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        source, out, there = (Path(scratch) / name for name in ("source", "out", "there"))
        for number, content in enumerate(files):
            (source / f"d{number % 2}").mkdir(parents=True, exist_ok=True)
            (source / f"d{number % 2}" / str(number)).write_bytes(content)
        parts = data.draw(st.permutations(pack({"x": source, "y": source / "d0"}, out, size)))
        assert all(path.stat().st_size <= size for path in out.rglob("*.part"))
        for position, part in enumerate(parts):
            missing = unpack([part], there)
            assert missing == sorted(int(other.name) for other in parts[position + 1 :])
        assert tree(there / "x") == tree(source) and tree(there / "y") == tree(source / "d0")
        assert unpack(parts[:1], there) == []  # a second call is harmless


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "noise").write_bytes(random.Random(1).randbytes(5000))
    return pack({"x": tmp_path / "source"}, tmp_path / "out", 2000)


def test_a_damaged_piece_is_refused(parts: list[Path], tmp_path: Path) -> None:
    piece = next(parts[1].glob("*.part"))
    piece.write_bytes(piece.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(BundleError, match="damaged"):
        unpack(parts, tmp_path / "there")
    assert not (tmp_path / "there" / "x").exists()


def test_unpacking_that_was_broken_off_is_done_again(
    parts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: tarfile.TarFile, path: Path, filter: str) -> None:
        (path / "x").mkdir()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tarfile.TarFile, "extractall", killed)
        unpack(parts, tmp_path / "there")
    assert unpack(parts, tmp_path / "there") == []
    assert tree(tmp_path / "there" / "x") == tree(tmp_path / "source")


def test_pieces_of_two_bundles_are_not_mixed(parts: list[Path], tmp_path: Path) -> None:
    (tmp_path / "source" / "noise").write_bytes(b"other")
    others = pack({"x": tmp_path / "source"}, tmp_path / "other", 2000)
    unpack(parts[:1], tmp_path / "there")
    with pytest.raises(BundleError, match="another bundle"):
        unpack(others, tmp_path / "there")


def test_the_other_side_needs_nothing_but_python(parts: list[Path], tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        bundle.__file__,
        "unpack",
        *map(str, parts),
        "--to",
        str(tmp_path / "there"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(tmp_path / "there" / "x") == tree(tmp_path / "source")


def test_wrong_usage_is_one_line(
    parts: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["pack", "--out", str(parts[0].parent), "--folder", f"x={tmp_path / 'source'}"],
        ["pack", "--out", str(tmp_path / "new"), "--folder", "x=/nowhere"],
        ["pack", "--out", str(tmp_path / "new"), "--folder", "x"],
        ["unpack", str(tmp_path / "nowhere"), "--to", str(tmp_path / "there")],
    ):
        assert bundle.main(arguments) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and told.count("\n") == 1


def test_a_wheel_keeps_the_libraries_that_are_named(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("a/__init__.py", "a/lib_cuda12.so", "a/lib_cuda13.so", "a/lib_cpu.so.1"):
            archive.writestr(name, name)
    unzip(wheel, ["*_cuda13.so", "*_cpu*"], tmp_path / "some")
    assert sorted(tree(tmp_path / "some")) == ["a/__init__.py", "a/lib_cpu.so.1", "a/lib_cuda13.so"]
    unzip(wheel, [], tmp_path / "all")
    assert len(tree(tmp_path / "all")) == 4


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_lists_are_pinned(path: Path) -> None:
    found = list(requirements(path))
    assert found and all(requirement.count("==") == 1 for requirement, _ in found)


def test_a_list_with_a_wrong_line(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a==1 without=b\n")
    with pytest.raises(BundleError, match="NAME==VERSION"):
        list(requirements(tmp_path / "list.txt"))
