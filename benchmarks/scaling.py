"""The scaling run: training on 1, 2, 4 and 8 GPUs of one machine, beside what the planner expects of it.

    python -m benchmarks.scaling forecast OUT --gpu h200               before anything is measured
    python -m benchmarks.scaling measure OUT --data DIR [--gpus 1,2,4,8] [--only 124m-muon] [--minutes 9]
    python -m benchmarks.scaling resume OUT --data DIR --gpus 8 [--then 2]
    python -m benchmarks.scaling table OUT [--markdown FILE]

A case is a preset, an optimizer, a number format, a number of GPUs and the tokens of a step in all of them. Its row in
OUT/measured.jsonl is appended when its runs have ended, and a row that exists is not measured again, so `measure` can
be stopped and repeated. --minutes starts no case after that time; --rounds repeats each, and the medians are of all.

    tokens/s   median of the steps after --warmup, with p10 and p90
    efficiency tokens/s over those of one GPU with as many tokens for each GPU, times the number of GPUs
    exposed    time of a step beyond that of one GPU with as many tokens for each: communication that nothing hides
    bus        bandwidth of an all-reduce of the case's gradients, 2 (n - 1) / n x bytes / time as in nccl-tests
    watts      of all GPUs together, from NVML's energy counters between the first and the last counted step

NCCL_P2P_DISABLE=1 in the environment is a case of its own. Options that are not listed go to `deskside train`.
`resume` stops a run in the middle with SIGTERM, and compares its losses with those of a run that was not stopped, after
going on with as many GPUs (equal to the last bit) and with --then GPUs (equal up to the order of sums).
"""

import argparse
import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deskside.budget.shape import num_params
from deskside.config.merge import build
from deskside.config.presets import for_pretraining
from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import make_request
from deskside.probe.point import quantile

TOKENS = 65_536  # for each GPU, and of the smaller batch for all
LARGE = 524_288  # of the larger batch for all
PRECISIONS = {"bf16": {"name": "bf16"}, "fp8": {"name": "fp8", "head": "fp8"}}
PRESETS = ("124m", "340m")
SHARDED = ("1.3b", "indicmoe-3b")
ALL_REDUCES = 20
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Case:
    """A training configuration and its number of GPUs. tokens: of a step, on all GPUs together."""

    preset: str
    optimizer: str
    precision: str
    gpus: int
    tokens: int
    mode: str = "replicate"
    p2p: bool = True

    @property
    def name(self) -> str:
        """A name such as 124m-muon-bf16-8x65536."""
        parts = [self.preset, self.optimizer, self.precision, f"{self.gpus}x{self.tokens // self.gpus}"]
        return "-".join(parts + ["shard"] * (self.mode == "shard") + ["no-p2p"] * (not self.p2p))

    @property
    def alone(self) -> "Case":
        """The case of one GPU with as many tokens for each GPU, by which the efficiency is measured."""
        return dataclasses.replace(self, gpus=1, tokens=self.tokens // self.gpus, mode="replicate", p2p=True)

    def config(self) -> dict[str, dict[str, Any]]:
        """Return the configuration on top of the preset."""
        config = {
            "optim": {"name": self.optimizer},
            "precision": PRECISIONS[self.precision],
            "batch": {"tokens": self.tokens},
        }
        return config | ({"parallel": {"mode": self.mode}} if self.gpus > 1 else {})


def cases(gpus: Sequence[int], p2p: bool = True) -> Iterator[Case]:
    """Yield the cases, each after that of one GPU by which its efficiency is measured."""
    seen: set[Case] = set()
    for preset, optimizer, precision in itertools.product(PRESETS, ("adamw", "muon"), PRECISIONS):
        for number in gpus:
            for tokens in (number * TOKENS, TOKENS, LARGE):
                case = Case(preset, optimizer, precision, number, tokens, p2p=p2p or number == 1)
                for wanted in (case.alone, case):
                    if wanted not in seen:
                        seen.add(wanted)
                        yield wanted
    for preset, number in itertools.product(SHARDED, gpus):
        if p2p and number > 1:
            yield Case(preset, "adamw", "bf16", number, number * 32_768, mode="shard")


def forecast(case: Case, gpu: str) -> dict[str, Any]:
    """Return what the planner expects: tokens per second and needed GiB, each as {low, expected, high}."""
    question = PlanQuestion(gpu=gpu, gpus=case.gpus, preset=case.preset, hours=1.0)
    band = make_plan(make_request(question, case.config())).to_json()["bands"][0]
    needed = {key: value / 2**30 for key, value in band["memory"]["needed"].items()}
    return {"case": case.name, "tokens_per_second": band["speed"]["tokens_per_second"], "needed_gib": needed}


class EnergyCounters:
    """NVML's energy counters of the first GPUs of this machine; `joules` is None where there are none."""

    def __init__(self, gpus: int):
        self._handles: list[Any] = []
        if torch.cuda.is_available():
            import pynvml

            pynvml.nvmlInit()
            self._read = pynvml.nvmlDeviceGetTotalEnergyConsumption
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(gpus)]

    def joules(self) -> float | None:
        """Return the joules that all GPUs have used since the driver was loaded."""
        return sum(self._read(handle) for handle in self._handles) / 1000 if self._handles else None


def train(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train a case. Return the speeds of its counted steps, its peak memory, and the watts of all GPUs.

    Raises CalledProcessError if the run fails.
    """
    run = folder / f"{case.name}-{len(list(folder.iterdir()))}"
    command = train_command(case, options, run)
    counters = EnergyCounters(case.gpus)
    start: tuple[float, float | None, int] | None = None
    last: tuple[float, float | None, int] = (0.0, None, 0)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            rows = metrics(run)
            if rows and rows[-1]["step"] > options.warmup and rows[-1]["step"] != last[2]:
                last = (time.monotonic(), counters.joules(), rows[-1]["step"])
                start = start or last
            time.sleep(POLL_SECONDS)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    counted = [row for row in metrics(run) if row["step"] > options.warmup]
    watts = None
    if start is not None and start[1] is not None and last[1] is not None and last[0] > start[0]:
        watts = (last[1] - start[1]) / (last[0] - start[0])
    return {
        "tokens_per_second": [row["tokens_per_second"] for row in counted],
        "peak_gib": max((row["memory_gib"] for row in counted if row.get("memory_gib")), default=None),
        "watts": watts,
        "command": " ".join(command[1:]).replace(str(folder), "RUNS").replace(options.data, "DATA"),
    }


def train_command(case: Case, options: argparse.Namespace, run: Path, *more: str) -> list[str]:
    """Return the command that trains a case in a directory."""
    keys = {f"{part}.{key}": value for part, values in case.config().items() for key, value in values.items()}
    keys |= {"data.path": options.data, "steps": options.steps, "gpus": case.gpus}
    keys |= {"runs": run.parent, "name": run.name}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    words += [*more, *options.others]
    return [sys.executable, "-m", "deskside", "train", case.preset, *words]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics that are written whole."""
    path = run / "metrics.jsonl"
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def bus_bandwidth(gpus: int, weights: int) -> float:
    """Return the bytes per second of an all-reduce of `weights` float32 gradients, as nccl-tests counts them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds"
        torch.multiprocessing.spawn(_all_reduce, (gpus, weights, str(file)), nprocs=gpus)
        seconds = float(file.read_text())
    return 2 * (gpus - 1) / gpus * 4 * weights / seconds


def _all_reduce(rank: int, gpus: int, weights: int, file: str) -> None:
    """Write the median seconds of an all-reduce. Runs in one process for each GPU."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    store = dist.FileStore(f"{file}.store", gpus)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=gpus)
    values = torch.zeros(weights, device=device)
    times = []
    for _ in range(ALL_REDUCES + 3):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    if rank == 0:
        Path(file).write_text(str(statistics.median(times[3:])))
    dist.destroy_process_group()


def measure(options: argparse.Namespace, p2p: bool) -> None:
    """Measure the cases that have no row yet, and append their rows."""
    out = options.out / "measured.jsonl"
    known = {row["case"] for row in read_rows(out)}
    end = time.monotonic() + 60 * options.minutes
    for case in cases(options.gpus, p2p):
        if case.name in known or options.only not in case.name:
            continue
        if time.monotonic() > end:
            print(f"{case.name} and those after it are left; repeat the command", flush=True)
            return
        with tempfile.TemporaryDirectory(prefix="deskside-scaling-", dir=options.folder) as folder:
            runs = [train(case, options, Path(folder)) for _ in range(options.rounds)]
        speeds = [speed for run in runs for speed in run["tokens_per_second"]]
        weights = num_params(build(for_pretraining(case.preset)).model)
        row = {
            "case": case.name,
            **dataclasses.asdict(case),
            **{name: quantile(speeds, share) for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))},
            "peak_gib": runs[0]["peak_gib"],
            "watts": runs[-1]["watts"],
            "bus_bandwidth": bus_bandwidth(case.gpus, weights) if case.gpus > 1 else None,
            "command": runs[0]["command"],
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        }
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{case.name}: {row['p50']:,.0f} tokens/s ({row['p10']:,.0f} to {row['p90']:,.0f})", flush=True)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, none if it does not exist."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def resume(options: argparse.Namespace) -> dict[str, Any]:
    """Stop runs in the middle, resume them on as many and on fewer GPUs, and compare with an uninterrupted run.

    Returns the largest relative difference of a loss after the stop, for each number of GPUs.
    """
    gpus = options.gpus[0]
    case = Case(options.preset, "muon", "bf16", gpus, gpus * options.tokens)
    differences = {}
    with tempfile.TemporaryDirectory(prefix="deskside-scaling-", dir=options.folder) as name:
        folder = Path(name)
        whole = folder / "whole"
        exact = ("--deterministic", "true")
        subprocess.run(train_command(case, options, whole, *exact), check=True, stdout=subprocess.DEVNULL)
        expected = {row["step"]: row["loss"] for row in metrics(whole)}
        for then in (gpus, options.then):
            run = folder / f"then-{then}"
            command = train_command(case, options, run, *exact)
            with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
                while process.poll() is None and len(metrics(run)) < options.steps // 2:
                    time.sleep(POLL_SECONDS)
                process.send_signal(signal.SIGTERM)
            stopped = len(metrics(run))
            words = ["train", "--resume", str(run), "--gpus", str(then)]
            subprocess.run([sys.executable, "-m", "deskside", *words], check=True, stdout=subprocess.DEVNULL)
            losses = {row["step"]: row["loss"] for row in metrics(run)}
            if losses.keys() != expected.keys() or not 0 < stopped < options.steps:
                raise SystemExit(f"the run was not stopped in the middle, or did not end: step {stopped}")
            differences[then] = max(
                abs(losses[step] / expected[step] - 1) for step in losses if step > stopped
            )
            print(
                f"{gpus} GPUs, stopped after step {stopped}, then {then}: {differences[then]:.3g}", flush=True
            )
    return {"case": case.name, "steps": options.steps, "largest_relative_difference": differences}


def table(rows: Sequence[dict[str, Any]], forecasts: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table: each case, measured beside the forecast."""
    measured = {row["case"]: row for row in rows}
    expected = {row["case"]: row["tokens_per_second"]["expected"] for row in forecasts}
    lines = [
        "| case | tokens/s | p10 to p90 | efficiency | exposed ms | bus GB/s | watts | GiB | forecast | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in measured.items():
        case = Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})
        alone = measured.get(case.alone.name) if case.gpus > 1 else None
        efficiency = exposed = ""
        if alone is not None:
            efficiency = f"{row['p50'] / (case.gpus * alone['p50']):.1%}"
            exposed = f"{1000 * (case.tokens / row['p50'] - case.alone.tokens / alone['p50']):.2f}"
        guess = expected.get(name)
        cells = [
            name,
            f"{row['p50']:,.0f}",
            f"{row['p10']:,.0f} to {row['p90']:,.0f}",
            efficiency,
            exposed,
            f"{row['bus_bandwidth'] / 1e9:.1f}" if row["bus_bandwidth"] else "",
            f"{row['watts']:,.0f}" if row["watts"] else "",
            f"{row['peak_gib']:.1f}" if row["peak_gib"] else "",
            f"{guess:,.0f}" if guess else "",
            f"{guess / row['p50'] - 1:+.1%}" if guess else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; `others` are those of `deskside train`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("action", choices=("forecast", "measure", "resume", "table"))
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of forecast.jsonl and measured.jsonl")
    parser.add_argument("--data", help="prepared dataset directory")
    parser.add_argument("--gpu", default="h200", help="the card of the forecast")
    parser.add_argument("--gpus", type=_numbers, default=(1, 2, 4, 8))
    parser.add_argument("--then", type=int, default=2, help="GPUs with which `resume` goes on")
    parser.add_argument("--preset", default="124m", help="of `resume`")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="for each GPU, of `resume`")
    parser.add_argument("--only", default="", metavar="PART", help="cases with this in their names")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=20, help="steps that do not count")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--folder", type=Path, help="of the runs; default: that for temporary files")
    parser.add_argument("--markdown", type=Path, help="file to which `table` is written too")
    options, others = parser.parse_known_args(argv)
    options.others = others
    if options.data is None and options.action in ("measure", "resume"):
        parser.error("--data is missing")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    p2p = os.environ.get("NCCL_P2P_DISABLE") != "1"
    if options.action == "forecast":
        rows = [forecast(case, options.gpu) for case in cases(options.gpus) if options.only in case.name]
        (options.out / "forecast.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif options.action == "measure":
        measure(options, p2p)
    elif options.action == "resume":
        (options.out / "resume.json").write_text(json.dumps(resume(options), indent=1) + "\n")
    else:
        rows = read_rows(options.out / "measured.jsonl")
        lines = table(rows, read_rows(options.out / "forecast.jsonl"))
        print("\n".join(lines))
        if options.markdown is not None:
            options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
