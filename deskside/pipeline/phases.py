"""The phases before training: doctor, probe and plan. Each returns plain data that is kept in go.json.

Doctor and probe may together take a tenth of the time budget, of a short one up to a minute. A phase that does not fit
is skipped, and the reason is kept: training itself checks and measures everything it depends on.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deskside.budget.shape import num_params
from deskside.config import merge, presets
from deskside.config.run import RunConfig
from deskside.doctor.examine import examine
from deskside.measurements.identity import Machine
from deskside.measurements.store import Busy, Row, Store
from deskside.plan.planner import make_plan
from deskside.plan.request import PlanQuestion, PlanRequest, ask
from deskside.plan.result import Plan, PlannedBand
from deskside.probe.grid import CARD_SECONDS, calibration_points, estimate_seconds
from deskside.probe.sweep import ProbeResult, Sweep
from deskside.run.directory import reached
from deskside.utils.errors import RunError, UsageError
from deskside.utils.format import count, duration, gib
from deskside.utils.signals import Interrupted

SHARE = 0.1  # of the time budget, for doctor and probe together
# A larger allowance for short budgets: enough for a quick doctor, the GPU benchmark and one probe point.
SHORT_SHARE, SHORT_SECONDS = 0.5, {"cuda": 90.0, "cpu": 60.0}
DOCTOR_SHARE = 0.5  # of the allowance
DOCTOR_SECONDS = {"cuda": 20.0, "cpu": 15.0}  # a quick doctor; 12 s were measured on two busy CPU cores
LONGEST_PROBE = 180.0
EVALUATIONS = 6
ROUND_VOCABULARY = 64  # tensor cores like a multiple of it

Say = Callable[[str], None]
Result = dict[str, Any]


def skipped(reason: str) -> Result:
    return {"status": "skipped", "reason": reason}


def allowance(hours: float, device: str) -> float:
    """Return the seconds that doctor and probe may take together."""
    return max(SHARE * hours * 3600, min(SHORT_SHARE * hours * 3600, SHORT_SECONDS[device]))


def doctor_allowance(hours: float, machine: Machine) -> float:
    """Return the seconds for the doctor. The probe keeps enough for its first point, which the plan depends on."""
    both = allowance(hours, machine.device)
    first = calibration_points(machine.memory_bytes, machine.device)[0]
    needed = estimate_seconds(first, [], machine.device, None) + CARD_SECONDS[machine.device]
    return min(DOCTOR_SHARE * both, max(both - needed, 0.0))


def _allowed(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s of the time for doctor and probe are left"


# Doctor


def doctor(machine: Machine, seconds: float, say: Say) -> Result:
    """Run a quick doctor if it fits in `seconds`. The status is fit, unfit or skipped."""
    needed = DOCTOR_SECONDS[machine.device]
    if seconds < needed:
        return skipped(f"it takes about {needed:.0f} s, and {_allowed(seconds)}")
    try:
        found = examine(True, lambda text: say(f"doctor: {text}"), seconds)
    except TimeoutError:
        return skipped(
            f"it did not finish within {seconds:.0f} s because the machine is busy; run deskside doctor later"
        )
    works = sum(check["verdict"] == "works" for check in found["checks"])
    told = f"{works} of {len(found['checks'])} checks work"
    for fix in found["fix"][:1]:
        told += f"; fix first: {fix['problem']} ({fix['remedy']})"
    return {
        "status": "fit" if found["trains"] else "unfit",
        "reason": told if found["trains"] else found["why"],
        "fix": found["fix"],
        "seconds": found["seconds"],
    }


# Probe


@dataclass
class ProbeReporter:
    """Reports the probe's progress."""

    say: Say

    def begin(self, title: str, seconds: float) -> None:
        self.say(f"probe: {title}, about {seconds:.0f} s")

    def end(self, finding: ProbeResult) -> None:
        if finding.status == "ok" and finding.row is not None:
            self.say(f"probe: {finding.row['result']['tokens_per_second']:,.0f} tokens/s")
        else:
            self.say(f"probe: {finding.status}")

    def card(self, row: Row) -> None:
        self.say(f"probe: GPU benchmark: {row['status']}")


def probe(machine: Machine, store: Store, seconds: float, say: Say) -> Result:
    """Measure the points that calibrate the planner within `seconds`, reusing stored ones."""
    points = calibration_points(machine.memory_bytes, machine.device)
    stored = store.rows(machine)
    have_card = any(row["kind"] == "card" and row["status"] == "ok" for row in stored)
    measured = sum(row["kind"] == "point" and row["status"] == "ok" for row in stored)
    seconds = min(seconds, LONGEST_PROBE)
    needed = estimate_seconds(points[0], [], machine.device, None)
    needed += 0.0 if have_card else CARD_SECONDS[machine.device]
    if seconds < needed and measured:
        return {"status": "stored", "stored": measured, "measured": 0}
    if seconds < needed:
        return skipped(f"it needs {needed:.0f} s, and {_allowed(seconds)}")
    try:
        sweep = Sweep(store, machine, ProbeReporter(say), deadline=time.monotonic() + seconds)
        survey = sweep.measure(points)
    except Busy:
        return skipped("another probe is measuring")
    if survey.interrupted:
        raise Interrupted(survey.interrupted)
    origins = [finding.origin for finding in survey.findings if finding.status == "ok"]
    failed = [
        f"{f.point.title()}: {f.row['error']}" for f in survey.findings if f.row and f.status == "failed"
    ]
    return {
        "status": "measured" if "measured" in origins else "stored" if "stored" in origins else "nothing",
        "stored": origins.count("stored"),
        "measured": origins.count("measured"),
        "failed": failed,
    }


# Plan


@dataclass(frozen=True)
class PipelineRequest:
    """The options of `deskside go`.

    given: configuration options. memory_gib: a limit. length: of the pretraining; None fills the hours.
    """

    hours: float
    preset: str | None
    data: str | None
    given: Mapping[str, Any]
    memory_gib: float | None
    probes: str
    length: str | None = None

    @classmethod
    def of(cls, hours: float, options: Mapping[str, Any]) -> "PipelineRequest":
        """Return the request of the options in go.json, with paths from the directory where it was started."""
        preset, data, begun_in = options["preset"], options["data"], options.get("directory")
        if preset is not None and preset.endswith(".toml"):
            preset = reached(preset, begun_in)
        return cls(
            hours=hours,
            preset=preset,
            data=None if data is None else reached(data, begun_in),
            given=options["given"],
            memory_gib=options["gpu_budget"],
            probes=reached(options["probes"], begun_in),
            length=options.get("length"),
        )


def plan(request: PipelineRequest, pretrain_seconds: float) -> tuple[Result, Plan | None]:
    """Return the plan of a training run of `pretrain_seconds`, as go.json keeps it and in full.

    Raises RunError when the planner says no or a given length takes more time, UsageError without a preset if no plan
    can be made.
    """
    try:
        made = make_plan(_plan_request(request, pretrain_seconds))
    except UsageError as error:
        if request.preset is None:
            raise
        return {**skipped(str(error)), "config": preset_config(request)}, None
    best = made.best
    if made.verdict == "no" or best is None:
        raise RunError(f"the plan says no: {'; '.join(made.reasons)}")
    if request.length is not None and best.candidate.seconds[1] > pretrain_seconds:
        needed = duration(best.candidate.seconds[1])
        raise RunError(
            f"{request.length} take about {needed}, and {duration(pretrain_seconds)} of the time are left; "
            "start again with more --hours, or with a shorter length"
        )
    unigram = unigram_bpb(prepared_data(request))
    result = {
        "status": "made",
        "verdict": made.verdict,
        "reasons": list(made.reasons),
        "source": f"modelled from what was {made.request.calibration.source}: {made.request.calibration.basis}",
        "bands": [_slim(band, made, unigram) for band in made.bands] if request.preset is None else [],
        **_slim(best, made, unigram),
    }
    # A preset that needs no change is trained unchanged; the predictions are still the planner's.
    if request.preset is not None and made.verdict == "yes":
        result["config"] = preset_config(request)
    return result, made


def preset_config(request: PipelineRequest) -> dict[str, Any]:
    """Return the configuration of the preset with the given options."""
    assert request.preset is not None
    built = merge.build([*presets.for_pretraining(request.preset), given_layer(request)])
    return built.model_dump(mode="json", exclude_unset=True)


def given_layer(request: PipelineRequest) -> dict[str, Any]:
    """Return the configuration layer of the given options and of the data's vocabulary size."""
    layer: dict[str, Any] = dict(request.given)
    if request.data is not None:
        layer["data"] = {**layer.get("data", {}), "path": request.data, "sources": []}
        needed = vocabulary(request.data)
        own = 0  # of the preset
        if request.preset is not None:
            own = merge.build(presets.layers(request.preset)).model.vocab_size
        if "vocab_size" not in layer.get("model", {}) and own < needed:
            layer["model"] = {**layer.get("model", {}), "vocab_size": needed}
    return layer


def vocabulary(data: str) -> int:
    """Return the vocabulary size of the data's tokenizer, rounded up."""
    entries = _index(data).tokenizer.vocab_size
    return -(-entries // ROUND_VOCABULARY) * ROUND_VOCABULARY


def unique_tokens(data: str) -> int:
    """Return the tokens of the training split."""
    return _index(data).splits["train"].tokens


def prepared_data(request: PipelineRequest) -> str | None:
    """Return the prepared data of the run, which may be the preset's own; None if it is not prepared yet."""
    data = request.data
    if data is None and request.preset is not None:
        data = merge.build([*presets.for_pretraining(request.preset), given_layer(request)]).data.path
    return data if data is not None and (Path(data) / "index.json").is_file() else None


def unigram_bpb(data: str | None) -> float | None:
    """Return the unigram baseline of the validation text in bits per byte."""
    split = None if data is None else _index(data).splits.get("val")
    return None if split is None else split.unigram_bpb


def final_config(config: Mapping[str, Any], seconds: float, length: str | None = None) -> RunConfig:
    """Return the configuration of a run that ends after `seconds` of wall-clock time, or after a given length.

    A run too short for the usual ten minutes between evaluations is evaluated `EVALUATIONS` times, unless the
    configuration says otherwise.
    """
    schedule = {"length": f"{seconds!r}s", "clock": "wall"} if length is None else {"length": length}
    layers = [config, {"schedule": schedule}]
    if 60 <= seconds < 600 * EVALUATIONS:
        layers.insert(0, {"evaluate": {"every": f"{seconds / (EVALUATIONS + 1):.0f}s"}})
    return merge.build(layers)


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the plan in a few lines of text."""
    if result["status"] != "made":
        config = merge.build([result["config"]])
        return [
            f"plan: skipped: {result['reason']}",
            f"trains the preset without a plan: {count(num_params(config.model))} parameters, sequence "
            f"length {config.batch.sequence_length}; memory and loss are not predicted",
        ]
    told = [f"plan, {result['source']}"]
    for band in result["bands"] or [result]:
        mark = "->" if band["name"] == result["name"] else "  "
        low, expected, high = band["bpb"]
        told.append(
            f"{mark} {band['name']:<8} {band['preset']:<6} {count(band['params'])} parameters, "
            f"{count(band['tokens'][1])} tokens, {band['tokens_per_second'][1]:,.0f} tokens/s"
            + (f", {gib(band['memory_gib'][1] * 2**30)}" if "memory_gib" in band else "")
            + f", {expected:.3f} bits per byte ({low:.3f} to {high:.3f})"
        )
    return [*told, *(f"   {reason}" for reason in result["reasons"])]


def _plan_request(wanted: PipelineRequest, pretrain_seconds: float) -> PlanRequest:
    data = prepared_data(wanted)
    tokens = None
    if wanted.length is not None:
        config = final_config(preset_config(wanted), pretrain_seconds, wanted.length)
        assert config.schedule.length is not None
        value, unit = config.schedule.length.value, config.schedule.length.unit
        tokens = value * config.mean_step_tokens() if unit == "steps" else value
    question = PlanQuestion(
        here=True,
        hours=wanted.hours if tokens is None else None,
        tokens=tokens,
        preset=wanted.preset,
        probes=wanted.probes,
        unique_tokens=None if data is None else unique_tokens(data),
    )
    overrides = given_layer(wanted) if wanted.preset is not None else None
    request = ask(question, overrides, pretrain_seconds if tokens is None else None)
    if wanted.preset is None:
        request = replace(request, overrides=given_layer(wanted))
    if wanted.memory_gib is not None:
        memory_bytes = min(request.card.memory_bytes, int(wanted.memory_gib * 2**30))
        request = replace(request, card=replace(request.card, memory_bytes=memory_bytes))
    return request


def bounded_loss(loss: Sequence[float], unigram: float | None) -> list[float]:
    """Return (low, expected, high) bits per byte, bounded by the unigram baseline of the validation text.

    The scaling law is fitted to models of tens of millions of parameters. For a model of one million it may expect a
    worse loss than token frequencies alone reach. Then only its low end says something, and the geometric mean of the
    low end and the baseline is expected.
    """
    low, expected, high = (float(x) for x in loss)
    if unigram is None or high <= unigram:
        return [low, expected, high]
    low = min(low, unigram)
    return [low, expected if expected < unigram else math.sqrt(low * unigram), unigram]


def _slim(band: PlannedBand, made: Plan, unigram: float | None) -> Result:
    """Return the part of a band that is compared later: predictions with ranges, and the configuration."""
    found = band.candidate
    slim: Result = {
        "name": band.name,
        "preset": band.preset,
        "params": found.params,
        "weights": found.weights,
        "tokens": [float(x) for x in found.tokens],
        "tokens_per_second": [float(x) for x in found.estimate.tokens_per_second],
        "bpb": bounded_loss(found.loss, unigram),
        "fits": found.estimate.fits,
        "config": band.config,
    }
    if not made.request.card.is_cpu:  # CPU memory is not modelled
        peak, spread = found.estimate.memory.allocated / 2**30, made.request.calibration.memory_spread
        slim["memory_gib"] = [max(0.0, peak * (1 - spread)), peak, peak * (1 + spread)]
    return slim


def _index(data: str) -> Any:
    from deskside.data.reading.shards import read_index

    return read_index(Path(data))
