"""`deskside import-config`: a configuration of axolotl or unsloth as a TOML file for `deskside sft` and its like."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.config.from_axolotl import from_axolotl
from deskside.config.from_unsloth import from_unsloth
from deskside.config.imported import Imported
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.files import write_atomically
from deskside.utils.format import plural


@dataclass(kw_only=True)
class ImportOptions(JsonOption):
    """Translate a configuration of axolotl or unsloth (YAML) to a TOML file.

    Prints the command that uses it, and a report: what became of each key, and which have no counterpart here.

    Example: deskside import-config qlora.yml --out qlora.toml
    """

    file: str = option("axolotl's or unsloth's file", metavar="FILE", positional=True)
    out: str | None = option("TOML file to write; default: print it", None, metavar="FILE")


MAX_VALUES = 10_000  # of a file; references of YAML make small files large, or endless

COMMAND = Command("import-config", ImportOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside import-config` and return the exit code. Raises UsageError and RunError."""
    options = COMMAND.parse(argv)
    imported = read(Path(options.file))
    out = options.out or f"{Path(options.file).stem}.toml"
    if options.out is not None:
        if Path(out).exists():
            raise UsageError(f"--out {out}: exists already; name a new file")
        if not Path(out).absolute().parent.is_dir():
            raise UsageError(f"--out {out}: its folder does not exist; create it, or name another file")
        write_atomically(Path(out), imported.toml())
    command = shlex.join(["deskside", imported.command, imported.model or "MODEL", "--config", out])
    if options.json:
        report = {name: dict(getattr(imported, name)) for name in ("used", "same", "missing")}
        print_json({"command": command, "config": imported.layer, **report})
        return 0
    for title, rows in (
        ("translated", imported.used),
        ("changes nothing here", imported.same),
        ("no counterpart here", imported.missing),
    ):
        for key, text in rows:
            say(f"{title}: {key}: {text}")
    if options.out is None:
        print(f"# {command}")
        print(imported.toml(), end="")
        return 0
    from deskside.cli.answer import print_answer  # imports rich, which takes time
    from deskside.utils.printer import Printer

    answer = f"{plural(len(imported.used), 'key')} of {options.file} translated"
    if imported.missing:
        answer += f", {len(imported.missing)} without a counterpart here"
    print_answer(Printer(), f"{answer}.", {"written": Path(out)}, command.removeprefix("deskside "))
    return 0


def read(path: Path) -> Imported:
    """Translate a file. Raises UsageError if it is neither axolotl's nor unsloth's, or the result is invalid."""
    import yaml

    try:
        source: Any = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); give axolotl's or unsloth's YAML file") from None
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:120]
        raise UsageError(f"{path}: is not valid YAML ({reason}); correct it") from None
    if _is_large(source):
        raise UsageError(
            f"{path}: has more than {MAX_VALUES:,} values, its references followed; is it a configuration?"
        )
    if isinstance(source, dict) and "base_model" in source:
        return from_axolotl({str(key): value for key, value in source.items()})
    if isinstance(source, dict) and isinstance(source.get("training"), dict):
        return from_unsloth({str(key): value for key, value in source.items()})
    raise UsageError(
        f"{path}: is neither axolotl's (base_model, datasets, ...) nor unsloth's (model, data, training, lora)"
    )


def _is_large(source: Any) -> bool:
    """Return True if there are more than `MAX_VALUES` values in nested lists and tables."""
    waiting, count = [source], 0
    while waiting and count <= MAX_VALUES:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += inner
        count += 1
    return count > MAX_VALUES
