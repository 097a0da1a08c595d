"""List every command-line option, JSON key and file name of a source tree, to compare two commits.

    python -m benchmarks.inventory [--tree DIR] [--out FILE]
    python -m benchmarks.inventory --compare OLD.json NEW.json --tree DIR

Options come from the help of every command (`--help all` where it exists), run in the tree itself. JSON
keys are the string keys of dict displays and assignments, and the fields of pydantic models; file names are string
constants with a known suffix. `--compare` prints what the new tree lacks. A key counts as lost only if its name does
not occur anywhere in the source of the new tree: after a refactoring the same key may come from a dataclass.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = "bin|csv|gguf|html|jinja|jsonl|json|lock|log|md|npy|png|pt|safetensors|toml|txt"
FILE_NAME = re.compile(rf"[\w.*-]*\.(?:{SUFFIXES})")
KEY = re.compile(r"[a-z][a-z0-9_]*")
OPTION = re.compile(r"(?m)(?:^|│)\s*(--[a-z][\w.-]*)")  # tyro draws boxes, also side by side
COMMANDS = re.compile(r"^  ([a-z]+)  ? *\S", re.MULTILINE)


def options(tree: Path) -> dict[str, list[str]]:
    """Return the options of every command, with hyphens."""
    commands = [name for name in COMMANDS.findall(_help(tree)) if name not in ("deskside", "example")]
    by_command: dict[str, list[str]] = {}
    for command in dict.fromkeys(commands):
        for line in [command] if command != "data" else ["data prepare", "data verify", "data show"]:
            text = _help(tree, *line.split(), "--help", "all") or _help(tree, *line.split(), "--help")
            listed = re.split(r"(?m)^\W*options\W*$", text, maxsplit=1)[-1]
            names = {name.replace("_", "-").rstrip(".-") for name in OPTION.findall(listed)}
            by_command[line] = sorted(names - {"--help"})
    return by_command


def _help(tree: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "deskside", *words],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
    )
    return done.stdout if done.returncode == 0 else ""


def keys_and_files(tree: Path) -> tuple[list[str], list[str]]:
    """Return the JSON keys and file names in the source of the package."""
    keys: set[str] = set()
    files: set[str] = set()
    for path in sorted((tree / "deskside").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            keys |= {key for key in _keys(node) if KEY.fullmatch(key)}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                files |= {name for name in [node.value.split("/")[-1]] if FILE_NAME.fullmatch(name)}
    return sorted(keys), sorted(files)


def _keys(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Dict):
        yield from (
            key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
        )
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
                yield str(target.slice.value)
    elif isinstance(node, ast.ClassDef):
        bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
        if bases & {"BaseModel", "Part", "FrozenModel", "TypedDict"}:
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id


def compare(old: dict[str, object], new: dict[str, object], tree: Path) -> dict[str, object]:
    """Return the options, keys and files of `old` that the new tree lacks."""
    paths = [path for path in (tree / "deskside").rglob("*") if path.suffix in (".py", ".toml")]
    source = "\n".join(path.read_text("utf-8") for path in paths)
    words = set(re.findall(r"\w+", source))
    before, after = dict(old["options"]), dict(new["options"])  # type: ignore[call-overload]
    lost = {name: sorted(set(listed) - set(after.get(name, []))) for name, listed in before.items()}
    return {
        "options": {name: missing for name, missing in lost.items() if missing},
        "keys": [key for key in old["keys"] if key not in words],  # type: ignore[attr-defined]
        "files": [name for name in old["files"] if name not in new["files"] and name not in source],  # type: ignore[attr-defined,operator]
    }


def main() -> None:
    """Print the inventory, or what was lost between two of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("OLD", "NEW"))
    arguments = parser.parse_args()
    if arguments.compare:
        old, new = (json.loads(path.read_text("utf-8")) for path in arguments.compare)
        result = compare(old, new, arguments.tree)
    else:
        keys, files = keys_and_files(arguments.tree)
        result = {"options": options(arguments.tree.resolve()), "keys": keys, "files": files}
    text = json.dumps(result, indent=1) + "\n"
    arguments.out.write_text(text, "utf-8") if arguments.out else print(text, end="")


if __name__ == "__main__":
    main()
