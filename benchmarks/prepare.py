"""Time of `deskside data prepare`, and whether its shards are those of another version of deskside.

    python -m benchmarks.prepare data/en_*.jsonl.gz --out prepare.json [--tree OLD] [--repeat 3] [-- --tokenizer DIR]

Each run is a process of its own, of this version or of the source tree OLD; what follows `--` goes to the command. The
runs are added to the JSON file with the seconds of wall and processor, the load of the machine before, and a checksum
of all shards. Prints a line for each; the exit code is 1 if the checksums of runs with the same arguments differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from deskside.utils.child_process import cpu_cores, cpu_name

PACKAGES = ("fastokens", "isal", "tokenizers")


def measure(tree: Path, arguments: list[str]) -> dict[str, Any]:
    """Prepare data in a temporary folder, and return what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "data"
        command = [sys.executable, "-c", "from deskside.cli.main import main; raise SystemExit(main())"]
        command += ["data", "prepare", *arguments, "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        load, begin = os.getloadavg()[0], time.perf_counter()
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        messages = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        if status:
            raise SystemExit(f"{' '.join(command)} failed:\n{messages}")
        index = json.loads((out / "index.json").read_bytes())
    shards = [shard for split in index["splits"].values() for shard in split["shards"]]
    sums = "".join(shard["checksum"] + shard["table_checksum"] for shard in shards)
    megabytes = sum(split["text_bytes"] for split in index["splits"].values()) / 1e6
    return {
        "wall_seconds": round(seconds, 2),
        "user_seconds": round(used.ru_utime, 2),
        "system_seconds": round(used.ru_stime, 2),
        "text_mb": round(megabytes, 1),
        "mb_per_second": round(megabytes / seconds, 1),
        "load_before": round(load, 2),
        "encoder": index.get("encoder"),
        "tokenizer": index["tokenizer"]["checksum"],
        "shards": xxhash.xxh3_128_hexdigest(sums.encode()),
    }


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to add the runs to")
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--label", default="this version", help="name of the version in the JSON file")
    parser.add_argument("--repeat", type=int, default=1)
    given = [*sys.argv[1:], "--"]
    options, rest = parser.parse_args(given[: given.index("--")]), given[given.index("--") + 1 : -1]
    runs = json.loads(options.out.read_text("utf-8")) if options.out.is_file() else []
    machine = f"{cpu_cores()} cores, {cpu_name()}"
    shown = [*(Path(source).name for source in options.sources), *(Path(part).name for part in rest)]
    for _ in range(options.repeat):
        run = measure(options.tree, [*options.sources, *rest])
        packages = {package: installed(package) for package in PACKAGES}
        runs.append(
            {"label": options.label, "arguments": shown, **run, "machine": machine, "packages": packages}
        )
        print(json.dumps(run), flush=True)
        options.out.write_text(json.dumps(runs, indent=1) + "\n", "utf-8")
    same = {run["shards"] for run in runs if run["arguments"] == shown}
    print(
        f"{len(runs)} runs, those with these arguments have {'the same' if len(same) == 1 else 'DIFFERENT'} shards"
    )
    return 0 if len(same) == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main())
