"""The scaling run: training on 1, 2, 4 and 8 GPUs of one machine, beside what the planner expects of it.

    python -m benchmarks.scaling forecast OUT --gpu h200               before anything is measured
    python -m benchmarks.scaling bandwidth OUT [--gpus 2,4,8]
    python -m benchmarks.scaling measure OUT [--gpus 1,2,4,8] [--only 124m-muon,4x65536] [--minutes 9]
    python -m benchmarks.scaling resume OUT --data DIR --gpus 8 [--then 2]
    python -m benchmarks.scaling table OUT [--markdown FILE]

A case is a preset, an optimizer, a number format, a number of GPUs and the tokens of a step in all of them. Its row in
OUT/measured.jsonl is appended as soon as it is measured, and a case that has a row is not measured again, so `measure`
can be stopped and repeated. The cases with the most GPUs come first. Groups of fewer GPUs than the machine has work
beside each other. The usual case of one GPU is measured on every GPU at once, because cards of one kind differ by some
percent, and several wait for the slowest. A case that fails is written to OUT/failed.jsonl, and the others go on.

    tokens/s   median of the counted steps, with p10 and p90; of one GPU: of the median card
    efficiency tokens/s over those of one GPU with as many tokens for each GPU, times the number of GPUs
    slowest    the same relative to the slowest card: what is left is not a difference between cards
    longer     milliseconds of a step beyond that of the median card with as many tokens
    exposed    milliseconds of NCCL's kernels during which nothing else runs on the slowest rank, from a trace: the
               others wait in NCCL's kernels for it
    bus        GB/s of an all-reduce of the size of the gradients, 2 (n - 1) / n x bytes / time as in nccl-tests
    watts      of all GPUs together, from NVML's energy counters over the counted steps

NCCL_P2P_DISABLE=1 in the environment is a case of its own. Other options are configuration keys, such as
--parallel.gradient_dtype bfloat16; give such rows an OUT of their own.
`resume` stops a run in the middle with SIGTERM, and compares its losses with those of a run that was not stopped, after
going on with as many GPUs (equal to the last bit) and with --then GPUs (equal up to the order of sums).
"""

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.step import configuration_keys
from deskside.budget.shape import num_params
from deskside.config.merge import build
from deskside.config.presets import for_pretraining
from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import make_request
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import UsageError

TOKENS = 65_536  # for each GPU, and of the smaller batch for all
LARGE = 524_288  # of the larger batch for all
PRECISIONS = {"bf16": {"name": "bf16"}, "fp8": {"name": "fp8", "head": "fp8"}}
PRESETS = ("124m", "340m")
SHARDED = ("1.3b", "indicmoe-3b")
SHARDED_TOKENS = 32_768  # for each GPU
SHARED_ROWS = ("340m", "indicmoe-3b")
ROW_TOKENS = 65_536  # of a row that all GPUs share
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Case:
    """A training configuration and its number of GPUs.

    tokens: of a step, on all GPUs together. mode: replicate, shard (FSDP2), or context, one row that all GPUs share.
    """

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
        return "-".join(parts + [self.mode] * (self.mode != "replicate") + ["no-p2p"] * (not self.p2p))

    @property
    def alone(self) -> "Case":
        """The case of one GPU by which the efficiency is measured: as many tokens for each GPU, or the same row."""
        if self.mode == "context":
            return dataclasses.replace(self, gpus=1, p2p=True)
        return dataclasses.replace(self, gpus=1, tokens=self.tokens // self.gpus, mode="replicate", p2p=True)

    def config(self) -> dict[str, dict[str, Any]]:
        """Return the configuration on top of the preset."""
        config: dict[str, dict[str, Any]] = {
            "optim": {"name": self.optimizer},
            "precision": PRECISIONS[self.precision],
            "batch": {"tokens": self.tokens},
        }
        if self.mode == "context":
            config["batch"]["sequence_length"] = self.tokens
            config["model"] = {"max_position_embeddings": self.tokens}
        if self.gpus > 1:
            context = self.mode == "context"
            config["parallel"] = {"context": self.gpus} if context else {"mode": self.mode}
        return config


def cases(gpus: Sequence[int], p2p: bool = True) -> list[Case]:
    """Return the cases with those of one GPU by which their efficiency is measured, the most important ones first."""
    kinds = list(itertools.product(PRESETS, ("adamw", "muon"), PRECISIONS))
    found: dict[Case, None] = {}  # a set in the order of insertion
    for tokens_of in (lambda number: number * TOKENS, lambda number: TOKENS, lambda number: LARGE):
        for (preset, optimizer, precision), number in itertools.product(kinds, gpus):
            case = Case(preset, optimizer, precision, number, tokens_of(number), p2p=p2p or number == 1)
            found |= {case: None, case.alone: None}
    if p2p:
        for preset, number in itertools.product(SHARDED, gpus):
            mode = "shard" if number > 1 else "replicate"
            found[Case(preset, "adamw", "bf16", number, number * SHARDED_TOKENS, mode=mode)] = None
        for preset, number in itertools.product(SHARED_ROWS, gpus):
            found[Case(preset, "adamw", "bf16", number, ROW_TOKENS, mode="context")] = None
    return list(found)


def forecast(case: Case, gpu: str) -> dict[str, Any]:
    """Return what the planner expects: tokens per second and needed GiB, each as {low, expected, high}."""
    question = PlanQuestion(gpu=gpu, gpus=case.gpus, preset=case.preset, hours=1.0)
    band = make_plan(make_request(question, case.config())).to_json()["bands"][0]
    needed = {key: value / 2**30 for key, value in band["memory"]["needed"].items()}
    return {"case": case.name, "tokens_per_second": band["speed"]["tokens_per_second"], "needed_gib": needed}


def measure(options: argparse.Namespace, p2p: bool) -> None:
    """Measure the cases that have no row yet; rows are appended to OUT/measured.jsonl."""
    known = {
        row["case"] for name in ("measured", "failed") for row in read_rows(options.out / f"{name}.jsonl")
    }
    end = time.time() + 60 * options.minutes
    for number in sorted(options.gpus, reverse=True):
        todo = [
            case
            for case in cases(options.gpus, p2p)
            if case.gpus == number
            and case.name not in known
            and any(part in case.name for part in options.only.split(","))
            and (p2p or number > 1)
        ]
        # The usual cases of one GPU are measured on each of them.
        everywhere = [case for case in todo if case.gpus == 1 and case.tokens == TOKENS]
        others = [case for case in todo if case not in everywhere]
        groups = max(options.gpus) // number
        shares = [everywhere + others[group::groups] for group in range(groups)]
        with ThreadPoolExecutor(groups) as pool:
            results = [
                pool.submit(measure_share, share, group, number, end, options)
                for group, share in enumerate(shares)
                if share
            ]
        for result in results:
            result.result()


def measure_share(
    share: Sequence[Case], group: int, gpus: int, end: float, options: argparse.Namespace
) -> None:
    """Measure cases one after another in one group of processes. After a failure, go on with the next case."""
    rows = options.out / f"rows-{gpus}-{group}.jsonl"
    for shared_rows in (False, True):
        left = [case for case in share if (case.mode == "context") == shared_rows]
        while left and time.time() < end:
            rows.unlink(missing_ok=True)
            cases = [worker_case(case, options.others) for case in left]
            spec = {"cases": cases, "end": end, "rows": str(rows), "context": gpus if shared_rows else 1}
            failure = run_workers(group, gpus, options, spec)
            done = read_rows(rows)
            append(options.out / "measured.jsonl", done)
            if failure is None:
                break
            failed, left = left[len(done)], left[len(done) + 1 :]
            append(options.out / "failed.jsonl", [{"case": failed.name, "error": failure}])
    rows.unlink(missing_ok=True)


def worker_case(case: Case, others: dict[str, Any]) -> dict[str, Any]:
    """Return a case as `scaling_worker.measure` takes it, with its entries of the row."""
    config: dict[str, Any] = {**others}
    for part, values in case.config().items():
        config[part] = {**config.get(part, {}), **values}
    names = {"preset": case.preset, "optimizer": case.optimizer, "tokens": case.tokens}
    return {**names, "config": config, "row": {"case": case.name, **dataclasses.asdict(case)}}


def run_workers(group: int, gpus: int, options: argparse.Namespace, spec: dict[str, Any]) -> str | None:
    """Run `scaling_worker` on the GPUs of a group. Return the end of its output if it failed, else None."""
    cards = ",".join(str(group * gpus + index) for index in range(gpus))
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": cards}
    environment |= {"OMP_NUM_THREADS": str(max(1, cpu_cores() // max(options.gpus)))}
    device = options.others.get("compute", {}).get("device", "auto")
    common = {"device": device, "seconds": options.seconds, "profile": options.profile, "bandwidth": False}
    with tempfile.TemporaryDirectory(prefix="deskside-scaling-") as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps({**common, "p2p": p2p_enabled(), **spec}))
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        command = [sys.executable, "-m", *launcher, "-m", "benchmarks.scaling_worker", str(file)]
        done = subprocess.run(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    print(done.stdout, end="", flush=True)
    return None if done.returncode == 0 else done.stdout[-3000:]


def measure_bandwidth(options: argparse.Namespace) -> None:
    """Measure the bandwidth of an all-reduce by size; rows are appended to OUT/bandwidth.jsonl."""
    for number in sorted({number for number in options.gpus if number > 1}, reverse=True):
        rows = str(options.out / "bandwidth.jsonl")
        spec = {"cases": [], "end": 0.0, "rows": rows, "context": 1, "bandwidth": True}
        if failure := run_workers(0, number, options, spec):
            raise SystemExit(failure)


def p2p_enabled() -> bool:
    """Return False if NCCL may not copy from card to card."""
    return os.environ.get("NCCL_P2P_DISABLE") != "1"


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Append rows to a file of JSON lines."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, none if it does not exist."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def train_command(case: Case, options: argparse.Namespace, run: Path) -> list[str]:
    """Return the command that trains a case deterministically in a directory."""
    keys = {f"{part}.{key}": value for part, values in case.config().items() for key, value in values.items()}
    for part, values in options.others.items():
        keys |= {f"{part}.{key}": value for key, value in values.items()}
    keys |= {"data.path": options.data, "steps": options.steps, "gpus": case.gpus, "deterministic": "true"}
    keys |= {"runs": run.parent, "name": run.name}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", "deskside", "train", case.preset, *words]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics that are written whole."""
    path = run / "metrics.jsonl"
    text = path.read_text("utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def resume(options: argparse.Namespace) -> dict[str, Any]:
    """Stop a run in the middle, resume it on as many and on fewer GPUs, and compare with an uninterrupted run.

    Returns the largest relative difference of a loss after the stop, for each number of GPUs, and the median tokens/s
    of the uninterrupted run: `deskside train` with its data loader.
    """
    gpus = options.gpus[0]
    case = Case(options.preset, "muon", "bf16", gpus, gpus * options.tokens)
    differences = {}
    with tempfile.TemporaryDirectory(prefix="deskside-scaling-", dir=options.folder) as name:
        folder = Path(name)
        whole = folder / "whole"
        subprocess.run(train_command(case, options, whole), check=True, stdout=subprocess.DEVNULL)
        expected = {row["step"]: row["loss"] for row in metrics(whole)}
        speeds = [row["tokens_per_second"] for row in metrics(whole)[options.steps // 3 :]]
        run = folder / "stopped"
        with subprocess.Popen(train_command(case, options, run), stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and len(metrics(run)) < options.steps // 2:
                time.sleep(POLL_SECONDS)
            process.send_signal(signal.SIGTERM)
        stopped = len(metrics(run))
        for then in (gpus, options.then):
            resumed = folder / f"then-{then}"
            shutil.copytree(run, resumed)
            words = ["train", "--resume", str(resumed), "--gpus", str(then)]
            subprocess.run([sys.executable, "-m", "deskside", *words], check=True, stdout=subprocess.DEVNULL)
            losses = {row["step"]: row["loss"] for row in metrics(resumed)}
            if losses.keys() != expected.keys() or not 0 < stopped < options.steps:
                raise SystemExit(f"the run was not stopped in the middle, or did not end: step {stopped}")
            differences[then] = max(
                abs(losses[step] / expected[step] - 1) for step in losses if step > stopped
            )
            print(
                f"{gpus} GPUs, stopped after step {stopped}, then {then}: {differences[then]:.3g}", flush=True
            )
    return {
        "case": case.name,
        "steps": options.steps,
        "stopped_after": stopped,
        "largest_relative_difference": differences,
        "tokens_per_second": statistics.median(speeds),
    }


def table(
    rows: Sequence[dict[str, Any]],
    forecasts: Sequence[dict[str, Any]],
    bandwidths: Sequence[dict[str, Any]] = (),
) -> list[str]:
    """Return the lines of a Markdown table: each case, measured beside the forecast."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    expected = {row["case"]: row for row in forecasts}
    heads = ("case", "tokens/s", "p10 to p90", "efficiency", "slowest", "longer ms", "exposed ms")
    heads += ("bus GB/s", "watts", "GiB", "forecast", "error", "forecast GiB")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, of_case in sorted(by_case.items(), key=lambda item: _order(item[1][0])):
        row = _median_card(of_case)
        case = Case(**{field.name: row[field.name] for field in dataclasses.fields(Case)})
        efficiency = slowest = longer = ""
        if case.gpus > 1 and (alone := by_case.get(case.alone.name)):
            one = _median_card(alone)["p50"]
            efficiency = f"{row['p50'] / (case.gpus * one):.1%}"
            if len(alone) > 1:
                slowest = f"{row['p50'] / (case.gpus * min(card['p50'] for card in alone)):.1%}"
            longer = f"{1000 * case.tokens * (1 / row['p50'] - 1 / (case.gpus * one)):.2f}"
        guess = expected.get(name)
        speed = guess and guess["tokens_per_second"]["expected"]
        cells = [
            name,
            f"{row['p50']:,.0f}",
            f"{row['p10']:,.0f} to {row['p90']:,.0f}",
            efficiency,
            slowest,
            longer,
            _exposed(row) if case.gpus > 1 else "",
            _bus(case, bandwidths),
            f"{sum(row['watts']):,.0f}" if row["watts"] else "",
            f"{max(row['peak_gib']):.1f}",
            f"{speed:,.0f}" if speed else "",
            f"{speed / row['p50'] - 1:+.1%}" if speed else "",
            f"{guess['needed_gib']['expected']:.1f}" if guess else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    per_gpu = row["tokens"] // row["gpus"]
    return row["preset"], row["optimizer"], row["precision"], not row["p2p"], -per_gpu, row["gpus"]


def _median_card(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of one card with the median speed of all."""
    speeds = {name: statistics.median(row[name] for row in rows) for name in ("p10", "p50", "p90")}
    return {**rows[0], **speeds, "watts": [statistics.fmean(sum(row["watts"]) for row in rows)]}


def _exposed(row: dict[str, Any]) -> str:
    """Return the exposed communication of the rank that computes longest. Old rows have the profile of rank 0 only."""
    profiles = row.get("profile") or []
    profiles = profiles if isinstance(profiles, list) else [profiles]
    slowest = max(profiles, key=lambda profile: profile["compute_ms"], default=None)
    return "" if slowest is None else f"{slowest['exposed_ms']:.2f}"


def _bus(case: Case, rows: Sequence[dict[str, Any]]) -> str:
    """Return the bandwidth of an all-reduce of the size that is closest to that of the case's gradients."""
    size = 4 * num_params(build(for_pretraining(case.preset)).model)
    found = [row for row in rows if row["gpus"] == case.gpus and row["p2p"] == case.p2p]
    nearest = min(found, key=lambda row: abs(row["bytes"] - size), default=None)
    return "" if nearest is None else f"{nearest['bus_bandwidth'] / 1e9:.1f}"


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
    """Run the command. Return 1 if a case failed."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.action == "forecast":
        rows = [forecast(case, options.gpu) for case in cases(options.gpus)]
        (options.out / "forecast.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif options.action == "bandwidth":
        measure_bandwidth(options)
    elif options.action == "measure":
        measure(options, p2p_enabled())
        return int((options.out / "failed.jsonl").exists())
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
