"""Bundle data and packages for a GPU machine without internet access that accepts only small files.

    python -m benchmarks.bundle pack --out DIR [--folder NAME=PATH ...] [--wheels LIST ...] [--python 3.12]
        [--part-mib 12]
    python benchmarks/bundle.py unpack DIR/* --to THERE   # on the remote machine; needs only the standard library

`pack` writes folders DIR/1, DIR/2 ..., each with one piece of a compressed archive and the same index.json. They can
be transferred one by one and in any order: `unpack` keeps the pieces that it is given, lists those still missing, and
unpacks once it has all of them and their SHA-256 hashes match.

A folder becomes THERE/NAME. A LIST of wheels (one requirement per line, as in benchmarks/wheels/) becomes a folder
named after the list, which contains the unpacked packages. Adding it to PYTHONPATH completes the installation. A
requirement can be followed by `only=PATTERN,PATTERN`: shared libraries of that wheel that match no pattern are left
out, because a wheel for all versions of CUDA is ten times as large as what one machine loads.
"""

import argparse
import fnmatch
import hashlib
import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

# pip expects the exact platform names, newest first.
PLATFORMS = ("_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "_2_12", "2010", "_2_5", "1")
HOOK = """import os, site

for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    site.addsitedir(folder)
"""


class BundleError(Exception):
    """A bundle cannot be packed or unpacked. The message says what to do."""


def requirements(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the requirements of a list, each with the patterns of the shared libraries to keep ([] keeps all)."""
    for line in path.read_text().splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or (len(words) == 2 and not words[1].startswith("only=")):
            raise BundleError(f"{path}: a line is NAME==VERSION [only=PATTERN,...]: {line}")
        yield words[0], words[1].removeprefix("only=").split(",") if len(words) == 2 else []


def unzip(wheel: Path, keep: Sequence[str], to: Path) -> None:
    """Extract a wheel without the shared libraries that match no pattern of `keep`."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            library = name.endswith(".so") or ".so." in name
            if not library or not keep or any(fnmatch.fnmatch(Path(name).name, pattern) for pattern in keep):
                archive.extract(name, to)


def install(requirements_file: Path, python: str, to: Path) -> None:
    """Unpack the packages of a list below `to`, for x86-64 Linux and the given version of Python.

    Raises BundleError if pip finds no such wheel.
    """
    to.mkdir()
    # Some packages rely on .pth files, which Python does not read from PYTHONPATH; a sitecustomize module reads them.
    (to / "sitecustomize.py").write_text(HOOK)
    platforms = [word for tag in PLATFORMS for word in ("--platform", f"manylinux{tag}_x86_64")]
    for requirement, keep in requirements(requirements_file):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
            ]
            command += [
                "--only-binary=:all:",
                "--python-version",
                python,
                "--implementation",
                "cp",
                *platforms,
            ]
            done = subprocess.run([*command, "--dest", folder, requirement], capture_output=True, text=True)
            if done.returncode != 0:
                raise BundleError(
                    f"{requirement}: pip found no wheel: {done.stderr.strip().splitlines()[-1]}"
                )
            for wheel in Path(folder).iterdir():
                unzip(wheel, keep, to)


def pack(folders: dict[str, Path], out: Path, part_bytes: int) -> list[Path]:
    """Pack folders (name -> folder) in pieces of at most `part_bytes` and return the folders of the pieces.

    Raises BundleError if a folder is missing or `out` is not empty.
    """
    for name, folder in folders.items():
        if not folder.is_dir():
            raise BundleError(f"{name}: {folder} is not a folder")
    if out.exists() and any(out.iterdir()):
        raise BundleError(f"{out} is not empty: choose another --out, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    whole = out / "whole.tar.xz"
    with lzma.open(whole, "wb", preset=6) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, folder in folders.items():
            archive.add(folder.resolve(), name)
    parts, digest = [], hashlib.sha256()
    with whole.open("rb") as source:
        while piece := source.read(part_bytes):
            digest.update(piece)
            parts.append(out / str(len(parts) + 1))
            parts[-1].mkdir()
            (parts[-1] / f"{len(parts)}.part").write_bytes(piece)
    whole.unlink()
    index = {"parts": len(parts), "sha256": digest.hexdigest()}
    for part in parts:
        (part / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    return parts


def unpack(folders: Sequence[Path], to: Path) -> list[int]:
    """Add the pieces in these folders and return the numbers of those still missing; extract all if there are none.

    Raises BundleError for pieces of two bundles and for damaged pieces.
    """
    parts = to / ".parts"
    parts.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        text = (folder / "index.json").read_text()
        if (parts / "index.json").exists() and (parts / "index.json").read_text() != text:
            raise BundleError(f"{folder} belongs to another bundle than the pieces in {to}: delete {parts}")
        (parts / "index.json").write_text(text)
        for part in folder.glob("*.part"):
            shutil.copyfile(part, parts / part.name)
    if not (parts / "index.json").exists():
        raise BundleError("no pieces were given")
    index = json.loads((parts / "index.json").read_text())
    numbers = range(1, index["parts"] + 1)
    if missing := [number for number in numbers if not (parts / f"{number}.part").exists()]:
        return missing
    if (parts / "unpacked").exists():
        return []
    whole, digest = parts / "whole.tar.xz", hashlib.sha256()
    with whole.open("wb") as target:
        for number in numbers:
            piece = (parts / f"{number}.part").read_bytes()
            digest.update(piece)
            target.write(piece)
    if digest.hexdigest() != index["sha256"]:
        raise BundleError(f"the pieces in {parts} are damaged: delete this folder and transfer them again")
    with lzma.open(whole) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        archive.extractall(to, filter="data")
    whole.unlink()
    (parts / "unpacked").touch()
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 on success, 2 for wrong usage and for damaged or missing files."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", allow_abbrev=False)
    packing.add_argument("--out", type=Path, required=True)
    packing.add_argument("--folder", action="append", default=[], metavar="NAME=PATH")
    packing.add_argument("--wheels", action="append", default=[], type=Path, metavar="LIST")
    packing.add_argument("--python", default="3.12", help="Python version of the remote machine")
    packing.add_argument("--part-mib", type=float, default=12.0)
    unpacking = commands.add_parser("unpack", allow_abbrev=False)
    unpacking.add_argument("parts", nargs="+", type=Path)
    unpacking.add_argument("--to", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        if options.command == "unpack":
            missing = unpack(options.parts, options.to)
            print(
                f"still missing: {', '.join(map(str, missing))}" if missing else f"unpacked in {options.to}"
            )
            return 0
        wrong = [option for option in options.folder if not all(option.partition("="))]
        if wrong or options.part_mib <= 0:
            raise BundleError(f"--folder is NAME=PATH, and --part-mib more than 0: {', '.join(wrong)}")
        with tempfile.TemporaryDirectory() as scratch:
            folders = {
                name: Path(path) for name, _, path in (option.partition("=") for option in options.folder)
            }
            for listed in options.wheels:
                folders[listed.stem] = Path(scratch) / listed.stem
                install(listed, options.python, folders[listed.stem])
            for part in pack(folders, options.out, int(options.part_mib * 2**20)):
                print(part)
        return 0
    except (BundleError, OSError, tarfile.TarError, lzma.LZMAError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
