"""The scaling run: training on 1, 2, 4 and 8 GPUs of one machine, beside what the planner expects of it.

    python -m benchmarks.scaling forecast OUT --gpu h200               before anything is measured
    python -m benchmarks.scaling bandwidth OUT [--gpus 2,4,8]
    python -m benchmarks.scaling measure OUT [--gpus 1,2,4,8] [--only 124m-muon,4x65536] [--minutes 9]
    python -m benchmarks.scaling resume OUT --data DIR --gpus 8 [--then 2]
    python -m benchmarks.scaling table OUT [--markdown FILE]

A case is a preset, an optimizer, a number format, a number of GPUs and the tokens of a step in all of them. Its row in
OUT/rows-*.jsonl is written as soon as it is measured, and moves to OUT/measured.jsonl when its group of GPUs ends, or
with the next call. A case that has a row is not measured again, so `measure` can be stopped and repeated. The cases
with the most GPUs come first. Groups of fewer GPUs than the machine has work beside each other. The usual case of one
GPU is measured on every GPU at once, because cards of one kind differ by some percent, and several wait for the
slowest. A case that fails is appended to OUT/failed.jsonl, and the others go on. The exit code of `measure` is 1 if a
case failed in this call; the next call tries it again. Ctrl-C and SIGTERM end the workers first, and then the command.

    tokens/s   median of the counted steps, with p10 and p90; of one GPU: of the median card
    efficiency tokens/s over those of one GPU with as many tokens for each GPU, times the number of GPUs: the median of
               the same cards, or the only card with such a row
    slowest    the same relative to the slowest of these cards: what is left is not a difference between cards
    longer     milliseconds of a step beyond that of the median card with as many tokens
    exposed    milliseconds of NCCL's kernels during which nothing else runs, from a trace, on the rank with the fewest:
               the others wait in NCCL's kernels for it
    bus        GB/s of an all-reduce of the size of the gradients, 2 (n - 1) / n x bytes / time as in nccl-tests
    watts      of all GPUs together, from NVML's energy counters over the counted steps

Rows also have the seconds in which each rank's host launched a step, and those of a reading of its GPU's sensors.

NCCL_P2P_DISABLE=1 in the environment is a case of its own. Other options are configuration keys, such as
--parallel.gradient_dtype bfloat16; give such rows an OUT of their own.
`resume` stops a run in the middle with SIGTERM, and compares its losses with those of a run that was not stopped, after
going on with as many GPUs (equal to the last bit) and with --then GPUs (equal up to the order of sums).
"""

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.scaling_cases import TOKENS, Case, cases, forecast
from benchmarks.scaling_resume import resume
from benchmarks.scaling_table import table
from benchmarks.step import configuration_keys
from deskside.utils import launched
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import UsageError
from deskside.utils.signals import raise_on_termination, signal_number

POLL_SECONDS = 0.2


def measure(options: argparse.Namespace, p2p: bool) -> bool:
    """Measure the cases that have no row in OUT/measured.jsonl, and append theirs. Return True if none failed."""
    for rows in sorted(options.out.glob("rows-*.jsonl")):  # of a call that was stopped
        collect(rows, options.out)
    measured = {(row["case"], row["card"]) for row in read_rows(options.out / "measured.jsonl")}
    known = {case for case, _ in measured}
    succeeded = True
    end = time.time() + 60 * options.minutes
    for number in sorted(options.gpus, reverse=True):
        todo = [
            case
            for case in cases(options.gpus, p2p)
            if case.gpus == number
            and (case.is_usual or case.name not in known)
            and any(part in case.name for part in options.only.split(","))
            and (p2p or number > 1)
        ]
        # The usual cases of one GPU are measured on each of them.
        everywhere = [case for case in todo if case.is_usual]
        others = [case for case in todo if case not in everywhere]
        groups = max(options.gpus) // number
        shares = [
            [case for case in everywhere if (case.name, str(group)) not in measured] + others[group::groups]
            for group in range(groups)
        ]
        stopped = threading.Event()
        with ThreadPoolExecutor(groups) as pool:
            results = [
                pool.submit(measure_share, share, group, number, end, options, stopped)
                for group, share in enumerate(shares)
                if share
            ]
            try:
                for result in results:
                    succeeded = result.result() and succeeded
            except KeyboardInterrupt:  # or SIGTERM; leaving the pool waits for the workers' end
                stopped.set()
                raise
    return succeeded


def measure_share(
    share: Sequence[Case],
    group: int,
    gpus: int,
    end: float,
    options: argparse.Namespace,
    stopped: threading.Event,
) -> bool:
    """Measure cases one after another in one group of processes. Return True if none failed.

    After a failure, go on with the next case, unless `stopped` is set.
    """
    rows = options.out / f"rows-{gpus}-{group}.jsonl"
    succeeded = True
    for shared_rows in (False, True):
        left = [case for case in share if (case.mode == "context") == shared_rows]
        while left and time.time() < end and not stopped.is_set():
            cases = [worker_case(case, options.others) for case in left]
            spec = {"cases": cases, "end": end, "rows": str(rows), "context": gpus if shared_rows else 1}
            failure = run_workers(group, gpus, options, spec, stopped)
            done = collect(rows, options.out)
            if failure is None or done == len(left):  # it may also fail at its end, which was printed
                break
            if stopped.is_set():
                break
            failed, left = left[done], left[done + 1 :]
            append(options.out / "failed.jsonl", [{"case": failed.name, "error": failure}])
            succeeded = False
    return succeeded and not stopped.is_set()


def collect(rows: Path, out: Path) -> int:
    """Move the rows that workers have written to OUT/measured.jsonl. Return their number."""
    found = read_rows(rows)
    known = read_rows(out / "measured.jsonl")  # a call may have been stopped between the next two lines
    append(out / "measured.jsonl", [row for row in found if row not in known])
    rows.unlink(missing_ok=True)
    return len(found)


def worker_case(case: Case, others: dict[str, Any]) -> dict[str, Any]:
    """Return a case as `scaling_worker.measure` takes it, with its entries of the row."""
    config: dict[str, Any] = {**others}
    for part, values in case.config().items():
        config[part] = {**config.get(part, {}), **values}
    names = {"preset": case.preset, "optimizer": case.optimizer, "tokens": case.tokens}
    return {**names, "config": config, "row": {"case": case.name, **dataclasses.asdict(case)}}


def run_workers(
    group: int, gpus: int, options: argparse.Namespace, spec: dict[str, Any], stopped: threading.Event
) -> str | None:
    """Run `scaling_worker` on the GPUs of a group. Return the end of its output if it failed, else None."""
    cards = ",".join(str(group * gpus + index) for index in range(gpus))
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": cards}
    environment |= {"OMP_NUM_THREADS": str(max(1, cpu_cores() // max(options.gpus)))}
    device = options.others.get("compute", {}).get("device", "auto")
    common = {"device": device, "seconds": options.seconds, "profile": options.profile, "bandwidth": False}
    with tempfile.TemporaryDirectory(prefix="deskside-scaling-") as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps({**common, "p2p": p2p_enabled(), **spec}))
        launcher = ["benchmarks.scaling_launcher", "--standalone", f"--nproc-per-node={gpus}"]
        command = [sys.executable, "-m", *launcher, "-m", "benchmarks.scaling_worker", str(file)]
        code, output = run_to_end(command, environment, stopped)
    print(output, end="", flush=True)
    return None if code == 0 else output[-3000:]


def run_to_end(
    command: Sequence[str], environment: Mapping[str, str], stopped: threading.Event
) -> tuple[int, str]:
    """Run a launcher, and return its exit code and output once all of its workers have ended.

    When `stopped` is set, or a signal interrupts this thread, ask it to end its workers, and wait for that.
    """
    process = subprocess.Popen(
        command,
        env={**environment, **launched.environment()},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C and the SIGTERM of `timeout` reach it once, from here
    )
    try:
        asked = False
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, _ = process.communicate(timeout=POLL_SECONDS)
                return process.returncode, output
            if stopped.is_set() and not asked:
                asked = True
                process.terminate()
    except KeyboardInterrupt:
        process.terminate()
        process.communicate()  # its workers hold the pipe, too
        raise


def measure_bandwidth(options: argparse.Namespace) -> None:
    """Measure the bandwidth of an all-reduce by size; rows are appended to OUT/bandwidth.jsonl."""
    for number in sorted({number for number in options.gpus if number > 1}, reverse=True):
        rows = str(options.out / "bandwidth.jsonl")
        spec = {"cases": [], "end": 0.0, "rows": rows, "context": 1, "bandwidth": True}
        if failure := run_workers(0, number, options, spec, threading.Event()):
            raise SystemExit(failure)


def p2p_enabled() -> bool:
    """Return False if NCCL may not copy from card to card."""
    return os.environ.get("NCCL_P2P_DISABLE") != "1"


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a file of JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines that are written whole, none if it does not exist."""
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `others` are configuration keys, nested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("action", choices=("forecast", "bandwidth", "measure", "resume", "table"))
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of forecast.jsonl and measured.jsonl")
    parser.add_argument("--data", help="prepared dataset directory, for `resume`")
    parser.add_argument("--gpu", default="h200", help="the card of the forecast")
    parser.add_argument("--gpus", type=_numbers, default=(1, 2, 4, 8))
    parser.add_argument("--then", type=int, default=2, help="GPUs with which `resume` goes on")
    parser.add_argument("--preset", default="124m", help="of `resume`")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="for each GPU, of `resume`")
    parser.add_argument("--steps", type=int, default=60, help="of `resume`")
    parser.add_argument(
        "--only", default="", metavar="PART,...", help="cases with one of these in their names"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="counted seconds of a case")
    parser.add_argument("--profile", action="store_true", help="trace two steps of each case")
    parser.add_argument("--minutes", type=float, default=1e6, help="start no case after this time")
    parser.add_argument("--folder", type=Path, help="of the runs; default: that for temporary files")
    parser.add_argument("--markdown", type=Path, help="file to which `table` is written too")
    options, others = parser.parse_known_args(argv)
    try:
        options.others = configuration_keys(others)
    except UsageError as error:
        parser.error(str(error))
    if options.data is None and options.action == "resume":
        parser.error("--data is missing")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 1 if a case failed, and 128 plus the number of a signal that stopped it."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        with raise_on_termination():
            return run(options)
    except KeyboardInterrupt as error:
        print("stopped", file=sys.stderr)
        return 128 + signal_number(error)


def run(options: argparse.Namespace) -> int:
    """Run the command with these options. Return its exit code."""
    if options.action == "forecast":
        rows = [forecast(case, options.gpu) for case in cases(options.gpus)]
        (options.out / "forecast.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif options.action == "bandwidth":
        measure_bandwidth(options)
    elif options.action == "measure":
        return int(not measure(options, p2p_enabled()))
    elif options.action == "resume":
        (options.out / "resume.json").write_text(json.dumps(resume(options), indent=1) + "\n")
    else:
        names = ("measured", "forecast", "bandwidth")
        lines = table(*(read_rows(options.out / f"{name}.jsonl") for name in names))
        print("\n".join(lines))
        if options.markdown is not None:
            options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
