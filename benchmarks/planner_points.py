"""Measured steps of the hand-written execution mode (since 2026-11-21) in docs/data, with the planner's predictions.

There are four kinds: steps of `benchmarks/step.py`, `benchmarks/memory.py` and of the scaling run on one GPU, whole
runs of `benchmarks/parity.py`, the arms of the study `claims`, and steps of small passes that this module measured.
Repetitions of one configuration are one point with the median of their speeds, so that configurations that were
repeated often do not dominate a fit.

    python -m benchmarks.planner_points --out FILE [--device cpu] [--seconds 100]

measures more points: steps of small passes, whose time is limited by the host. The file has the format of
`benchmarks/step.py --json`. All points are measured one after another in one process, because importing torch takes
longer than a measurement. Nothing else may use the machine in the meantime. Points that do not start within --seconds
are skipped with a message.
"""

import argparse
import gc
import io
import json
import statistics
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import zstandard

from benchmarks.scaling_cases import Case
from benchmarks.step_config import configuration
from deskside.budget.format_costs import LowFormat
from deskside.budget.speed import Rates
from deskside.config.run import RunConfig
from deskside.plan.estimate import mean_step_seconds, peak_memory
from deskside.plan.setting import Setting, setting_from_config

ROOT = Path(__file__).parents[1] / "docs/data"
STEP_FOLDERS = (
    "2026-11-21-step",
    "2026-11-22-h200/step",
    "2026-11-22-release/step",
    "2026-11-22-release/memory",
)
SCALING_FILE = "2026-11-28-scaling/first/measured.jsonl"
PASSES_FILE = "2026-11-23-card/passes.json"
RUN_FOLDERS = ("2026-11-21-step/parity", "2026-11-22-h200/parity", "2026-11-22-release/parity")
STUDY_ARCHIVE = "2026-11-22-release/study/claims.tar.zst"
TRIAL_FILES = ("run.json", "plan.json", "summary.json", "metrics.jsonl")
SKIPPED_STEPS = 4  # left out of the median of a run, for compilation and warm-up

Kind = Literal["steps", "run", "study", "passes"]


@dataclass(frozen=True)
class MeasuredPoint:
    """One measured configuration.

    speed: tokens per second, the median of `speeds`; gib: peak that torch allocated, None if measurements before it in
    the same process had left some memory in use; sources: files under docs/data.
    """

    kind: Kind
    name: str
    setting: Setting
    speeds: tuple[float, ...]
    gib: float | None
    sources: tuple[str, ...]

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    @property
    def modelled_gib(self) -> float:
        return peak_memory(self.setting).allocated / 2**30

    def step(self, rates: Rates) -> dict[str, float]:
        """Return the modelled seconds of each part of a mean step."""
        return mean_step_seconds(self.setting, rates)

    def modelled_speed(self, rates: Rates) -> float:
        return self.setting.tokens_per_step / sum(self.step(rates).values())

    @property
    def small_passes(self) -> bool:
        """True if passes are so small that the host may be slower to launch kernels than the device to run them."""
        return self.setting.micro_tokens <= 16384


@cache
def points() -> tuple[MeasuredPoint, ...]:
    """Return every measured configuration, in a fixed order."""
    by_setting: dict[tuple[Kind, Setting], list[MeasuredPoint]] = {}
    for point in [*_steps(), *_scaling(), *_runs(), *_study(), *_passes()]:
        by_setting.setdefault((point.kind, point.setting), []).append(point)
    return tuple(_merge(repetitions) for repetitions in by_setting.values())


def _merge(repetitions: list[MeasuredPoint]) -> MeasuredPoint:
    first = repetitions[0]
    return MeasuredPoint(
        first.kind,
        first.name,
        first.setting,
        tuple(speed for point in repetitions for speed in point.speeds),
        max((point.gib for point in repetitions if point.gib is not None), default=None),
        tuple(dict.fromkeys(source for point in repetitions for source in point.sources)),
    )


def _setting(config: RunConfig, recipe: str, native: bool, micro_tokens: int) -> Setting:
    native_formats: frozenset[LowFormat] = frozenset({"fp8", "fp8-grouped"}) if native else frozenset()
    config = config.model_copy(
        update={"batch": config.batch.model_copy(update={"micro_tokens": micro_tokens})}
    )
    setting = setting_from_config(config, 1, recipe, native=native_formats)  # type: ignore[arg-type]  # a recipe that ran
    return replace(setting, graphs="off")  # all were measured before runs decided by themselves


def _steps() -> Iterator[MeasuredPoint]:
    for folder in STEP_FOLDERS:
        for path in sorted((ROOT / folder).glob("*.json")):
            content = json.loads(path.read_text("utf-8"))
            for row in content.get("results", content.get("arms", [])):
                result = row.get("value") or row.get("result")
                if isinstance(result, dict) and result.get("compile") == "fused" and "phases" in result:
                    yield _step(row["arm"], result, str(path.relative_to(ROOT)))


def _step(arm: str, result: dict[str, Any], source: str) -> MeasuredPoint:
    # Arms are as in benchmarks/step.py; those of benchmarks/memory.py also name the optimizer states.
    words = arm.split(":")
    config: dict[str, Any] = {"precision": {}, "optim": {}, "compute": {}}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if equals:
            config["precision"][key] = value
        elif word == "offload":
            config["optim"]["offload"] = True
        else:
            config["optim"]["states"] = word
    if source.endswith("memory_1.5b.json"):
        config["compute"]["activation_checkpointing"] = "block"
    keys = ("preset", "optimizer", "tokens", "sequence_length", "precision")
    run = configuration({**{key: result[key] for key in keys}, "config": config})
    setting = _setting(run, result["precision"], result["native"], result["micro_tokens"])
    options = [word for word in words[1:] if word != "float32"]
    recomputed = ", block recomputed" if setting.activation_checkpointing == "block" else ""
    name = ", ".join([result["preset"], ":".join([result["precision"], *options]), result["optimizer"]])
    speed = result["phases"]["short"]["tokens_per_second"]
    return MeasuredPoint(
        "steps", name + recomputed, setting, (speed,), result["peak_allocated_gib"], (source,)
    )


def _scaling() -> Iterator[MeasuredPoint]:
    """Yield the cases of the scaling run on one GPU. Each card of the host is a repetition."""
    for line in (ROOT / SCALING_FILE).read_text("utf-8").splitlines():
        row = json.loads(line)
        if row["gpus"] > 1:
            continue
        case = Case(**{field.name: row[field.name] for field in fields(Case)})
        config = configuration({"preset": case.preset, "optimizer": case.optimizer, "config": case.config()})
        setting = _setting(config, row["recipe"], row["native"], row["micro_tokens"])
        rows = f", one row of {case.tokens:,}" if case.mode == "context" else ""
        name = f"{case.preset}, {case.precision}, {case.optimizer}{rows}"
        yield MeasuredPoint("steps", name, setting, (row["p50"],), row["peak_gib"][0], (SCALING_FILE,))


def _runs() -> Iterator[MeasuredPoint]:
    """Yield whole runs with Muon on real text: they evaluate between steps, and several ran at a time on one host."""
    for folder in RUN_FOLDERS:
        path = ROOT / folder / "parity.jsonl"
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            recipe, _, option = row["arm"].partition(":")
            setting = row["setting"]
            precision = dict([option.split("=")]) if option else {}
            spec = {
                "preset": setting["preset"], "precision": recipe, "optimizer": setting["optimizer"],
                "tokens": int(setting["tokens_per_step"]), "sequence_length": setting["sequence_length"],
                "config": {"precision": precision},
            }  # fmt: skip
            native = row["native"] is not False  # None: a recipe of 16 bits
            title = f"{setting['preset']}, {row['arm']}, {setting['optimizer']}"
            yield MeasuredPoint(
                "run",
                title,
                _setting(configuration(spec), recipe, native, spec["tokens"]),
                (row["tokens_per_second"],),
                row["peak_memory_gib"],
                (str(path.relative_to(ROOT)),),
            )


def _study() -> Iterator[MeasuredPoint]:
    """Yield the trials of the study. Speeds are medians over steps, because stalls of the shared host distort means."""
    for trial, files in _trials().items():
        plan, summary = json.loads(files["plan.json"]), json.loads(files["summary.json"])
        if plan["compile"] != "fused":
            continue
        config = RunConfig(**json.loads(files["run.json"])["config"])
        micro_rows = plan["fit"][-1]["micro_rows"]
        recipe, native = plan["precision"]["chosen"], plan["precision"]["native"]
        setting = _setting(config, recipe, native, micro_rows * config.stages()[-1].sequence_length)
        if len(setting.stages) > 1:
            speed = summary["tokens_per_second"]
        else:
            steps = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
            speeds = [step["tokens_per_second"] for step in steps if "tokens_per_second" in step]
            speed = statistics.median(speeds[SKIPPED_STEPS:-1])
        arm = trial.rpartition("-s")[0]
        yield MeasuredPoint("study", arm, setting, (speed,), summary["peak_memory_gib"], (STUDY_ARCHIVE,))


def _passes() -> Iterator[MeasuredPoint]:
    for row in json.loads((ROOT / PASSES_FILE).read_text("utf-8"))["results"]:
        point = _step(row["arm"], row["value"], PASSES_FILE)
        name = f"{point.name}, accumulation {row['value']['accumulation']}"
        yield replace(point, kind="passes", name=name, gib=None)


@cache
def _trials() -> dict[str, dict[str, str]]:
    """Return the text of each trial's files, by the trial's name."""
    packed = (ROOT / STUDY_ARCHIVE).read_bytes()
    trials: dict[str, dict[str, str]] = {}
    with (
        zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
    ):
        for member in archive:
            parts = Path(member.name).parts
            if len(parts) == 4 and parts[1] == "runs" and parts[3] in TRIAL_FILES:
                file = archive.extractfile(member)
                assert file is not None
                trials.setdefault(parts[2], {})[parts[3]] = file.read().decode("utf-8")
    return {trial: files for trial, files in sorted(trials.items()) if set(files) == set(TRIAL_FILES)}


TIMED_STEPS, WARMUP_STEPS = 12, 4
# (preset, recipe, sequence length, tokens per pass, passes, optimizer), the most useful first.
SMALL_PASSES = (
    ("124m", "bf16", 512, 2048, 8, "adamw"),
    ("124m", "fp8-rowwise", 512, 2048, 8, "adamw"),
    ("124m", "fp8-delayed", 512, 2048, 8, "adamw"),
    ("124m", "fp8-tensorwise", 512, 2048, 8, "adamw"),
    ("124m", "bf16", 512, 2048, 1, "muon"),
    ("340m", "bf16", 512, 2048, 4, "adamw"),
    ("124m", "fp8-delayed", 2048, 16384, 4, "adamw"),
    ("124m", "fp8-tensorwise", 2048, 65536, 1, "adamw"),
    ("124m", "fp8-rowwise", 2048, 32768, 2, "adamw"),
    ("124m", "bf16", 2048, 32768, 2, "muon"),
    ("124m", "bf16", 2048, 8192, 8, "adamw"),
    ("340m", "fp8-delayed", 512, 2048, 4, "adamw"),
    ("124m", "nvfp4", 512, 2048, 4, "adamw"),
    ("124m", "bf16", 512, 2048, 1, "adamw"),
    ("340m", "bf16", 2048, 16384, 2, "muon"),
)  # fmt: skip


def specification(row: tuple[str, str, int, int, int, str], device: str) -> dict[str, Any]:
    """Return the argument of `step_measure.measure`."""
    preset, recipe, sequence, micro, passes, optimizer = row
    return {
        "preset": preset,
        "precision": recipe,
        "tokens": micro * passes,
        "micro_tokens": micro,
        "sequence_length": sequence,
        "attention": "auto",
        "compile": "auto",
        "optimizer": optimizer,
        "device": device,
        "steps": TIMED_STEPS,
        "warmup": WARMUP_STEPS,
        "config": {},
    }


def main() -> None:
    import torch

    from benchmarks.step_measure import measure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="start no measurement after this many seconds"
    )
    options = parser.parse_args()
    began, results = time.monotonic(), []
    for row in SMALL_PASSES:
        if time.monotonic() - began > options.seconds:
            print(f"skipped, the time is up: {row}", flush=True)
            continue
        spec = specification(row, options.device) | {"began": time.monotonic()}
        try:
            result: dict[str, Any] = {"arm": row[1], "status": "ok", "error": "", "value": measure(spec)}
        except (RuntimeError, ValueError, AssertionError) as error:
            # A recipe that does not run here must not stop the others; the row records the error.
            result = {"arm": row[1], "status": "failed", "error": str(error), "value": None, "spec": spec}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        results.append(result)
        options.out.write_text(json.dumps({"benchmark": "step", "results": results}, indent=1), "utf-8")
        short = result["value"]["phases"]["short"] if result["value"] else {}
        outcome = short.get("step_ms", {}).get("median", result["error"])
        print(f"{time.monotonic() - began:5.0f} s  {row}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
