"""The pilot: the first few percent of a run, which test the plan's predictions of speed, memory and loss.

The pilot is no extra run. It is the run's first steps at full learning rate, so it costs nothing. At its end
- the loss curve is extrapolated (`budget.loss.fit_curve`) and compared with the plan, as are speed and memory;
- if a target loss was given and is below the range of the extrapolation, the run stops early;
- if the plan chose the model, and at the measured speed another of its bands would reach a clearly lower loss, the run
  stops in favor of that band. Otherwise it continues, and re-estimates its number of steps to end on time.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deskside.budget.loss import LAW, MIN_PILOT_STEPS, LossLaw, expected_bpb, fit_curve, fit_offset
from deskside.budget.shape import matmul_params
from deskside.config.run import RunConfig
from deskside.data.reading.rows import PackedDataset
from deskside.pipeline.pipeline_state import PipelineState, damaged
from deskside.run.directory import RunDirectory
from deskside.train.loop.callbacks import Callback, Terminal
from deskside.train.objective import RowDataset
from deskside.utils.signals import StopSignal

FILE = "pilot.json"
SHARE, LONGEST = 0.05, 0.3  # of the run: the pilot's length, and its maximum while the curve is too short
AT_PEAK = 0.98  # of the highest learning rate; excludes the steps of warm-up and decay from the curve
STEPS = 2 * MIN_PILOT_STEPS
TARGET, RECENTRE = "the target is out of reach", "another model is better at this speed"
CLEARLY_OFF = 1.5  # times faster or slower than planned, before another band is considered
CLEARLY_BETTER = 0.985  # of the loss this model is expected to reach
ENOUGH_LEFT = 0.8  # of the planned training


@dataclass(frozen=True)
class Projection:
    """The loss that another band would reach at the measured speed."""

    band: dict[str, Any]
    bpb: float


class Pilot(Callback):
    """Callback of a run of `deskside go`. `plan` is the result of `phases.plan`."""

    resume_command = "deskside go --resume"

    def __init__(
        self, state: PipelineState, config: RunConfig, plan: Mapping[str, Any], target: float | None
    ):
        self.state, self.config, self.plan, self.target = state, config, plan, target
        self.earlier_seconds = state.before
        self.rows: list[dict[str, Any]] = []
        self.found: dict[str, Any] | None = None
        self.better: Projection | None = None
        self._made = state.seconds()
        self.setup_seconds = 0.0
        if (state.run.path / FILE).exists():
            self.found = state.run.read_json(FILE)

    @property
    def decision(self) -> str | None:
        """The decision at the end of the pilot, by this or an earlier process; None before it."""
        return None if self.found is None else str(self.found["decision"])

    @property
    def chosen(self) -> dict[str, Any]:
        """The band to train instead, after the decision for another one."""
        assert self.found is not None
        name = self.found["better"]["name"]
        band = next((band for band in self.plan.get("bands", ()) if band["name"] == name), None)
        if band is None:
            raise damaged(self.state.run.path, f"results.plan.bands: {name} is missing")
        return dict(band)

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        assert isinstance(validation, PackedDataset)  # pretraining has no other
        self.run, self.stop = run, stop
        self.setup_seconds = self.state.seconds() - self._made
        splits = validation.index.splits
        self.bytes_per_token = splits["val"].token_text_bytes / max(1, splits["val"].tokens)
        self.unique_tokens = splits["train"].tokens
        if self.found is None:
            self.rows = list(run.read_metrics())  # of an earlier process

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        if self.found is not None:
            return
        self.rows.append(dict(row))
        share = row["step"] / total_steps
        if share >= SHARE and (len(self.curve()) >= STEPS or share >= LONGEST):
            self.end(total_steps)

    def curve(self) -> list[dict[str, Any]]:
        """Return the rows at full learning rate."""
        peak = max(row["lr"] for row in self.rows)
        return [row for row in self.rows if row["lr"] >= AT_PEAK * peak and not row["skipped"]]

    def end(self, total_steps: int) -> None:
        """End the pilot: compare it with the plan, decide, and write pilot.json."""
        tokens = total_steps * self.config.mean_step_tokens()
        speeds = [row["tokens_per_second"] for row in self.rows if row["tokens_per_second"]]
        memory = [row["memory_gib"] for row in self.rows if row.get("memory_gib")]
        self.found = {
            "schema_version": 1,
            "step": self.rows[-1]["step"],
            "share": self.rows[-1]["step"] / total_steps,
            "tokens": self.rows[-1]["tokens"],
            "end_tokens": tokens,
            "seconds": self.state.seconds(),
            "source": "measured: these steps; loss modelled from them",
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "memory_gib": max(memory) if memory else None,
            "bpb": self.extrapolate(tokens),
            "planned": self.planned(),
            "decision": "go on",
        }
        self.decide(tokens)
        self.run.write_json(FILE, self.found)
        for line in self.lines():
            self.run.event(line)
            Terminal.say(line)

    def extrapolate(self, tokens: float) -> dict[str, Any] | None:
        """Extrapolate the loss to the end of the run; None with too few steps."""
        curve = [row for row in self.curve() if row["loss"] is not None and math.isfinite(row["loss"])]
        per_token = math.log(2) * self.bytes_per_token
        try:
            reached = fit_curve(
                [row["tokens"] for row in curve],
                [row["loss"] / per_token for row in curve],
                tokens,
                params=matmul_params(self.config.model),
                unique_tokens=self.unique_tokens,
                decays=self.config.schedule.name != "constant",
            )
        except ValueError:  # too few steps
            return None
        return {
            "low": reached.low,
            "expected": reached.expected,
            "high": reached.high,
            "steps": reached.used,
            "source": reached.source,
        }

    def planned(self) -> dict[str, Any]:
        """Return the plan's predictions; empty without a plan."""
        names = ("tokens", "tokens_per_second", "memory_gib", "bpb")
        return {name: self.plan[name] for name in names if name in self.plan}

    def decide(self, tokens: float) -> None:
        assert self.found is not None
        bpb = self.found["bpb"]
        if self.target is not None and bpb is not None and bpb["low"] > self.target:
            self._stop_for(TARGET)
            return
        self.better = better_band(self.plan, tokens, bpb and bpb["expected"], self.unique_tokens, self.left())
        if self.better is not None:
            self._stop_for(RECENTRE)
            self.found["better"] = {"name": self.better.band["name"], "bpb": self.better.bpb}

    def _stop_for(self, decision: str) -> None:
        """Request a stop. A stop by the user comes first; the decision is kept in pilot.json for --resume."""
        assert self.found is not None
        self.found["decision"] = decision
        self.stop.requested = self.stop.requested or decision

    def left(self) -> float:
        """Return the share of a band's planned training that fits in the remaining time, after another set-up."""
        planned = self.plan.get("pretrain_seconds", self.state.hours * 3600) - self.setup_seconds
        left = self.state.left() - self.state.tail() - self.setup_seconds
        return max(0.0, left) / planned if planned > 0 else 0.0

    def lines(self) -> list[str]:
        """Return the report of the pilot, in lines of text."""
        assert self.found is not None
        found, planned = self.found, self.found["planned"]
        parts = []
        for name, form, unit in (
            ("tokens_per_second", ",.0f", "tokens/s"),
            ("memory_gib", ".1f", "GiB"),
            ("bpb", ".3f", "bits per byte at the end"),
        ):
            value = found[name]
            if value is None:
                continue
            if isinstance(value, dict):
                told = f"{value['expected']:{form}} ({value['low']:{form}} to {value['high']:{form}}) {unit}"
            else:
                told = f"{value:{form}} {unit}"
            if planned.get(name):
                low, expected, high = planned[name]
                told += f" (planned {expected:{form}}, {low:{form}} to {high:{form}})"
            parts.append(told)
        lines = [f"pilot, {found['share']:.0%} of the run: {'; '.join(parts)}"]
        if found["decision"] == TARGET:
            lines.append(f"{self.target:g} bits per byte is out of reach: {self.told()}")
        if self.better is not None:
            lines.append(
                f"at this speed {self.better.band['preset']} would end at {self.better.bpb:.3f} bits per byte: it is "
                f"trained instead, in the remaining time"
            )
        return lines

    def told(self) -> str:
        """Return the extrapolated loss as text."""
        bpb = (self.found or {}).get("bpb")
        if bpb is None:
            return "its pilot was too short to extrapolate the loss"
        return f"its pilot leads to {bpb['expected']:.3f} ({bpb['low']:.3f} to {bpb['high']:.3f})"

    def reserve(self, limit: float | None) -> float:
        return self.state.tail()

    def summary_entries(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return predicted and measured values, for summary.json and the report."""
        planned, pilot = self.planned(), self.found or {}
        # name in the plan -> name in pilot.json, name in summary.json
        names = {
            "tokens_per_second": ("tokens_per_second", "tokens_per_second"),
            "memory_gib": ("memory_gib", "peak_memory_gib"),
            "bpb": ("bpb", "val_bpb"),
            "tokens": ("end_tokens", "tokens"),
        }
        return {
            "predicted": {
                name: {"plan": planned.get(name), "pilot": pilot.get(ours), "measured": summary.get(key)}
                for name, (ours, key) in names.items()
            },
            "plan_source": self.plan.get("source"),
            "budget_hours": self.state.hours,
        }


def better_band(
    plan: Mapping[str, Any],
    tokens: float,
    bpb: float | None,
    unique_tokens: int,
    left: float,
    law: LossLaw = LAW,
) -> Projection | None:
    """Return the band that would reach a clearly lower loss than the current one, or None to continue.

    The band would start anew with the share `left` of its planned training. Its speed is assumed to be as far from the
    plan as the current run's is. Only bands whose memory fits with certainty are considered. A plan without bands, such
    as one for a given model or one that has changed bands before, is kept.

    Args:
        plan: The result of `phases.plan`.
        tokens: Tokens that the current run will have seen at its end.
        bpb: Loss that the pilot expects at its end.
        unique_tokens: Tokens of the training data.
        left: Share of a band's planned training that fits in the remaining time.
        law: The scaling law.
    """
    bands: Sequence[dict[str, Any]] = plan.get("bands") or ()
    if bpb is None or len(bands) < 2 or left < ENOUGH_LEFT:
        return None
    faster = tokens / plan["tokens"][1]
    if 1 / CLEARLY_OFF < faster < CLEARLY_OFF:
        return None
    here = fit_offset(law, plan["weights"], tokens, unique_tokens, bpb)
    others = []
    for band in bands:
        if band["name"] != plan["name"] and band.get("fits") == "fits":
            reached = band["tokens"][1] * faster * left
            others.append(Projection(band, expected_bpb(here, band["weights"], reached, unique_tokens)[1]))
    best = min(others, key=lambda projection: projection.bpb, default=None)
    return best if best is not None and best.bpb < CLEARLY_BETTER * bpb else None
