"""The pilot: the first few percent of a run, which test the plan's predictions of speed, memory and loss.

The pilot is not an extra run: it consists of the first steps of the run, so it costs nothing. At its end
- the loss curve at full learning rate is extrapolated (`budget.loss.fit_curve`) and compared with the plan, as are
  speed and memory;
- if a target loss was given and is below the range of the extrapolation, the run stops early;
- if the plan chose the model, and another of its bands would reach a clearly lower loss at the measured speed, the run
  stops and the pipeline trains that band. Otherwise the run continues.
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
# Length of the pilot as a share of the run, and its maximum if there are fewer than MIN_CURVE_STEPS after that.
PILOT_SHARE, MAX_PILOT_SHARE = 0.05, 0.3
MIN_CURVE_STEPS = 2 * MIN_PILOT_STEPS  # steps at full learning rate
FULL_LR = 0.98  # share of the highest learning rate; excludes warm-up and decay
TARGET_OUT_OF_REACH, OTHER_BAND_IS_BETTER = (
    "the target is out of reach",
    "another model is better at this speed",
)
# Conditions for training another band instead:
MIN_SPEED_ERROR = 1.5  # this many times faster or slower than planned
MAX_LOSS_RATIO = 0.985  # of its expected loss to that of the current model
MIN_TIME_SHARE = 0.8  # share of its planned training that fits in the remaining time


@dataclass(frozen=True)
class Projection:
    """A band, and the bits per byte that it would reach at the measured speed."""

    band: dict[str, Any]
    bpb: float


class Pilot(Callback):
    """Training callback of `deskside go`.

    plan: The first result of `planning.plan`. target: The target loss in bits per byte, if given.
    """

    resume_command = "deskside go --resume"

    def __init__(
        self, state: PipelineState, config: RunConfig, plan: Mapping[str, Any], target: float | None
    ):
        self.state, self.config, self.plan, self.target = state, config, plan, target
        self.earlier_seconds = state.spent_before
        self.rows: list[dict[str, Any]] = []
        self.result: dict[str, Any] | None = None
        self.projection: Projection | None = None
        self._created_at = state.seconds_spent()
        self.setup_seconds = 0.0
        if (state.run.path / FILE).exists():
            self.result = state.run.read_json(FILE)

    @property
    def decision(self) -> str | None:
        """The decision at the end of the pilot, made by this or an earlier process; None before it."""
        return None if self.result is None else str(self.result["decision"])

    @property
    def chosen_band(self) -> dict[str, Any]:
        """The band to train instead, if the decision is OTHER_BAND_IS_BETTER."""
        assert self.result is not None
        name = self.result["better"]["name"]
        band = next((band for band in self.plan.get("bands", ()) if band["name"] == name), None)
        if band is None:
            raise damaged(self.state.run.path, f"results.plan.bands: {name} is missing")
        return dict(band)

    def begin(self, run: RunDirectory, stop: StopSignal, validation: RowDataset) -> None:
        assert isinstance(validation, PackedDataset)  # pretraining uses only packed data
        self.run, self.stop = run, stop
        self.setup_seconds = self.state.seconds_spent() - self._created_at
        splits = validation.index.splits
        self.bytes_per_token = splits["val"].token_text_bytes / max(1, splits["val"].tokens)
        self.unique_tokens = splits["train"].tokens
        if self.result is None:
            self.rows = list(run.read_metrics())  # the steps of an earlier process

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        if self.result is not None:
            return
        self.rows.append(dict(row))
        share = row["step"] / total_steps
        if share >= PILOT_SHARE and (len(self.full_lr_rows()) >= MIN_CURVE_STEPS or share >= MAX_PILOT_SHARE):
            self.end(total_steps)

    def full_lr_rows(self) -> list[dict[str, Any]]:
        """Return the metrics of the steps at full learning rate."""
        peak = max(row["lr"] for row in self.rows)
        return [row for row in self.rows if row["lr"] >= FULL_LR * peak and not row["skipped"]]

    def end(self, total_steps: int) -> None:
        """End the pilot: compare it with the plan, decide, and write pilot.json."""
        tokens = total_steps * self.config.mean_step_tokens()
        speeds = [row["tokens_per_second"] for row in self.rows if row["tokens_per_second"]]
        memory = [row["memory_gib"] for row in self.rows if row.get("memory_gib")]
        self.result = {
            "schema_version": 1,
            "step": self.rows[-1]["step"],
            "share": self.rows[-1]["step"] / total_steps,
            "tokens": self.rows[-1]["tokens"],
            "end_tokens": tokens,
            "seconds": self.state.seconds_spent(),
            "source": "measured: these steps; loss modelled from them",
            "tokens_per_second": statistics.median(speeds) if speeds else None,
            "memory_gib": max(memory) if memory else None,
            "bpb": self.extrapolate(tokens),
            "planned": self.planned(),
            "decision": "go on",
        }
        self.decide(tokens)
        self.run.write_json(FILE, self.result)
        for line in self.lines():
            self.run.event(line)
            Terminal.say(line)

    def extrapolate(self, tokens: float) -> dict[str, Any] | None:
        """Extrapolate the loss to `tokens`, the end of the run; None with too few steps."""
        curve = [row for row in self.full_lr_rows() if row["loss"] is not None and math.isfinite(row["loss"])]
        per_token = math.log(2) * self.bytes_per_token
        try:
            extrapolated = fit_curve(
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
            "low": extrapolated.low,
            "expected": extrapolated.expected,
            "high": extrapolated.high,
            "steps": extrapolated.used,
            "source": extrapolated.source,
        }

    def planned(self) -> dict[str, Any]:
        """Return the plan's predictions; empty without a plan."""
        names = ("tokens", "tokens_per_second", "memory_gib", "bpb")
        return {name: self.plan[name] for name in names if name in self.plan}

    def decide(self, tokens: float) -> None:
        """Stop the run if the target is out of reach or another band is better. tokens: of the whole run."""
        assert self.result is not None
        bpb = self.result["bpb"]
        if self.target is not None and bpb is not None and bpb["low"] > self.target:
            self._stop_for(TARGET_OUT_OF_REACH)
            return
        expected = None if bpb is None else bpb["expected"]
        self.projection = better_band(self.plan, tokens, expected, self.unique_tokens, self.band_share_left())
        if self.projection is not None:
            self._stop_for(OTHER_BAND_IS_BETTER)
            self.result["better"] = {"name": self.projection.band["name"], "bpb": self.projection.bpb}

    def _stop_for(self, decision: str) -> None:
        """Request a stop, unless the user already has. The decision is kept in pilot.json in any case, for --resume."""
        assert self.result is not None
        self.result["decision"] = decision
        self.stop.requested = self.stop.requested or decision

    def band_share_left(self) -> float:
        """Return the share of a band's planned training that fits in the remaining time, after its own setup."""
        planned = self.plan.get("pretrain_seconds", self.state.hours * 3600) - self.setup_seconds
        left = self.state.seconds_left() - self.state.seconds_reserved() - self.setup_seconds
        return max(0.0, left) / planned if planned > 0 else 0.0

    def lines(self) -> list[str]:
        """Return the report of the pilot, in lines of text."""
        assert self.result is not None
        result, planned = self.result, self.result["planned"]
        parts = []
        for name, form, unit in (
            ("tokens_per_second", ",.0f", "tokens/s"),
            ("memory_gib", ".1f", "GiB"),
            ("bpb", ".3f", "bits per byte at the end"),
        ):
            value = result[name]
            if value is None:
                continue
            if isinstance(value, dict):
                part = f"{value['expected']:{form}} ({value['low']:{form}} to {value['high']:{form}}) {unit}"
            else:
                part = f"{value:{form}} {unit}"
            if planned.get(name):
                low, expected, high = planned[name]
                part += f" (planned {expected:{form}}, {low:{form}} to {high:{form}})"
            parts.append(part)
        lines = [f"pilot, {result['share']:.0%} of the run: {'; '.join(parts)}"]
        if result["decision"] == TARGET_OUT_OF_REACH:
            lines.append(f"{self.target:g} bits per byte is out of reach: {self.loss_text()}")
        if self.projection is not None:
            preset = self.projection.band["preset"]
            lines.append(
                f"at this speed {preset} would reach {self.projection.bpb:.3f} bits per byte, so it is trained "
                "instead, in the remaining time"
            )
        return lines

    def loss_text(self) -> str:
        """Return the extrapolated loss as text."""
        bpb = (self.result or {}).get("bpb")
        if bpb is None:
            return "its pilot was too short to extrapolate the loss"
        return f"its pilot leads to {bpb['expected']:.3f} ({bpb['low']:.3f} to {bpb['high']:.3f})"

    def reserve(self, limit: float | None) -> float:
        return self.state.seconds_reserved()

    def summary_entries(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Return the entries of summary.json: the predictions of plan and pilot, and the measured values."""
        planned, pilot = self.planned(), self.result or {}
        # name in the plan -> (name in pilot.json, name in summary.json)
        names = {
            "tokens_per_second": ("tokens_per_second", "tokens_per_second"),
            "memory_gib": ("memory_gib", "peak_memory_gib"),
            "bpb": ("bpb", "val_bpb"),
            "tokens": ("end_tokens", "tokens"),
        }
        return {
            "predicted": {
                name: {
                    "plan": planned.get(name),
                    "pilot": pilot.get(pilot_name),
                    "measured": summary.get(summary_name),
                }
                for name, (pilot_name, summary_name) in names.items()
            },
            "plan_source": self.plan.get("source"),
            "budget_hours": self.state.hours,
        }


def better_band(
    plan: Mapping[str, Any],
    tokens: float,
    bpb: float | None,
    unique_tokens: int,
    time_share: float,
    law: LossLaw = LAW,
) -> Projection | None:
    """Return the band that would reach a clearly lower loss than the current one, or None to continue.

    The band would start from scratch, with the share `time_share` of its planned training. Its speed is assumed to
    deviate from the plan by the same factor as that of the current run. Only bands that certainly fit in memory are
    considered. The plan has no bands if the user chose the model, or if the pipeline has changed the band before.

    Args:
        plan: The result of `planning.plan`.
        tokens: Tokens that the current run will have seen at its end.
        bpb: Loss that the pilot expects at its end.
        unique_tokens: Tokens of the training data.
        time_share: Share of a band's planned training that fits in the remaining time.
        law: The scaling law.
    """
    bands: Sequence[dict[str, Any]] = plan.get("bands") or ()
    if bpb is None or len(bands) < 2 or time_share < MIN_TIME_SHARE:
        return None
    speedup = tokens / plan["tokens"][1]  # measured over planned speed
    if 1 / MIN_SPEED_ERROR < speedup < MIN_SPEED_ERROR:
        return None
    fitted_law = fit_offset(law, plan["weights"], tokens, unique_tokens, bpb)
    others = []
    for band in bands:
        if band["name"] != plan["name"] and band.get("fits") == "fits":
            band_tokens = band["tokens"][1] * speedup * time_share
            band_bpb = expected_bpb(fitted_law, band["weights"], band_tokens, unique_tokens)[1]
            others.append(Projection(band, band_bpb))
    best = min(others, key=lambda projection: projection.bpb, default=None)
    return best if best is not None and best.bpb < MAX_LOSS_RATIO * bpb else None
