"""Evaluations of a run: before its first step, during it and at its end, each within its share of the time.

If the run averages its weights, their average is what is evaluated and exported. The metrics of the weights of the last
step are recorded beside it, with the suffix `_raw`.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from deskside.optim.average import WeightAverage
from deskside.run.record import LANGUAGE_METRIC
from deskside.train import parallel
from deskside.train.objective import Evaluation, Objective, Session
from deskside.train.time_budget import EVALUATE_SHARE

# Shares of the average in the final weights that `average.blend auto` tries.
BLENDS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class Evaluator:
    """Evaluates a run's model on its validation split, and knows how long this takes.

    Attributes:
        limit: The run's length in wall-clock seconds, None if it is given in another way.
        during_tokens: Maximum tokens of an evaluation during training, from `rehearse` or the plan of a resumed run.
        average: The average of the weights, if the run has one.
    """

    def __init__(
        self,
        session: Session,
        objective: Objective,
        limit: float | None,
        average: WeightAverage | None = None,
    ):
        self.session, self.objective, self.limit, self.average = session, objective, limit, average
        self.during_tokens = session.config.evaluate.tokens
        self._whole_seconds = 0.0  # of an evaluation of the whole split, predicted by the last evaluation

    def rehearse(self, tokens: int, seconds: Callable[[], float]) -> None:
        """Predict the time of an evaluation from one of `tokens` tokens, and shorten those during training if needed.

        The tokens are evaluated twice, because the first pass compiles. On a CPU, where by default nothing compiles, a
        run with a short time limit evaluates them once. seconds: the run's clock.
        """
        world, began = self.session.world, seconds()
        self.evaluate(tokens)
        taken = world.broadcast([seconds() - began])[0]
        if world.device.type != "cpu" or taken <= self.session.budget.share(EVALUATE_SHARE / 5):
            self.evaluate(tokens)
        every = self.session.config.evaluate.every
        if self.limit is not None and every is not None:
            interval = min(self.limit, every.value) if every.unit == "seconds" else self.limit
            share = EVALUATE_SHARE if self.average is None else EVALUATE_SHARE / 2  # raw and averaged weights
            self.during_tokens = min(self.during_tokens, self._tokens_in(share * interval))

    @property
    def during_seconds(self) -> float:
        """Seconds that an evaluation during training takes."""
        return self._whole_seconds * min(1.0, self.during_tokens / max(1, self.session.validation.num_tokens))

    def final(self) -> tuple[float, int | None]:
        """Return (seconds, maximum tokens) of the final evaluation; None tokens is the whole split.

        The evaluation may take `EVALUATE_SHARE` of a run whose length is in wall-clock time.
        """
        if self.limit is None or self._whole_seconds <= EVALUATE_SHARE * self.limit:
            return self._whole_seconds, None
        seconds = EVALUATE_SHARE * self.limit
        return seconds, self._tokens_in(seconds)

    def before(self, recorded: dict[str, Any]) -> dict[str, Any] | None:
        """Return the evaluation of the initial weights if the objective asks for it, or the recorded one on resume."""
        if "before" in recorded or not self.objective.evaluate_first:
            return recorded.get("before")
        evaluation = self.evaluate(self.final()[1])
        self.session.say(f"before the first step: {evaluation.message}")
        return evaluation.summary

    def during(self) -> dict[str, float]:
        """Evaluate during training. Return the metrics of the average, if it has begun, and of the raw weights."""
        raw = self.evaluate(self.during_tokens).metrics
        if self.average is None or not self.average.updates:
            return raw
        with self.averaged():
            metrics = self.evaluate(self.during_tokens).metrics
        without_languages = (name for name in raw if not name.startswith(LANGUAGE_METRIC))
        return metrics | {f"{name}_raw": raw[name] for name in without_languages}

    @contextlib.contextmanager
    def averaged(self, blend: float = 1.0) -> Iterator[None]:
        """Context manager in which the model has the averaged weights, if there are any. blend: the average's share."""
        if self.average is None or not self.average.updates:
            yield
            return
        session = self.session
        # Between steps, the GPU has room where the gradients were, unless graphs keep these allocated.
        config = session.config
        on_device = config.optim.gradients == "device" and config.compute.cuda_graph == "off"
        try:
            with self.average.applied(blend, on_device):
                session.precision.forget_weights()
                yield
        finally:
            session.precision.forget_weights()

    def blend(self) -> None:
        """Evaluate blends of the last step's weights and their average, and make the average the one to export.

        The exported blend is the best of `BLENDS`, or `average.blend` if it is a number. All are evaluated on the same
        tokens. A loss that is not finite is never the best; if none is finite, the run ends with the weights of the
        last step.
        Does nothing without an average, or if the restored checkpoint has the blend already.
        """
        average = self.average
        if average is None or average.by_blend:
            return
        if not average.updates:
            self.session.say(
                f"no weights were averaged: there was no step to average after {average.config.start:.0%} of the run"
            )
            return
        for blend in self._blends(average):
            with self.averaged(blend):
                metrics = self.evaluate(self.during_tokens).metrics
            key = "val_bpb" if "val_bpb" in metrics else "val_loss"
            average.by_blend.append(
                {"blend": blend, key: metrics[key] if math.isfinite(metrics[key]) else None}
            )
        finite = {row["blend"]: row[key] for row in average.by_blend if row[key] is not None}
        given = average.config.blend
        chosen = min(finite, key=lambda x: finite[x], default=0.0) if isinstance(given, str) else given
        if chosen not in finite:
            self.session.say(f"warning: the validation loss of the final weights is not finite ({key})")
        average.blend_in(chosen)
        self.session.say(
            f"the final weights are {chosen:.0%} average and {1 - chosen:.0%} those of the last step"
        )

    def blend_seconds(self) -> float:
        """Return the seconds that `blend` will take."""
        if self.average is None:
            return 0.0
        return len(self._blends(self.average)) * self.during_seconds

    def _blends(self, average: WeightAverage) -> tuple[float, ...]:
        blend = average.config.blend
        return BLENDS if blend == "auto" else tuple(sorted({0.0, blend, 1.0}))

    def evaluate(self, max_tokens: int | None) -> Evaluation:
        """Evaluate in high precision on the validation split, and predict the time of a whole evaluation."""
        session, began = self.session, time.perf_counter()
        with session.precision.high_precision():
            evaluation = self.objective.evaluate(session, max_tokens)
        if session.world.sharded:
            parallel.reshard(session.model)
        scale = max(1.0, session.validation.num_tokens / max(1, evaluation.tokens))
        # All ranks use rank 0's time, because it decides how many batches an evaluation has.
        self._whole_seconds = session.world.broadcast([(time.perf_counter() - began) * scale])[0]
        return evaluation

    def _tokens_in(self, seconds: float) -> int:
        """Return about how many tokens of the split can be evaluated in `seconds`."""
        return max(1, int(self.session.validation.num_tokens * seconds / max(self._whole_seconds, 1e-9)))
