"""Loader of GRPO: optimizer steps on sampled answers, which are sampled, or read from the log, round by round."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from deskside.align.grpo_data import Question, Questions
from deskside.align.rollouts import Rollout, RolloutLog
from deskside.config.align import GrpoConfig
from deskside.data.reading.loader import Batch, LoaderOptions
from deskside.utils.errors import RunError


class RollsOut(Protocol):
    """The part of `Grpo` that the loader uses."""

    options: GrpoConfig
    log: RolloutLog

    def roll_out(
        self, questions: Sequence[Question], positions: Sequence[int], seed: int
    ) -> list[Rollout]: ...
    def batches(
        self, questions: Questions, rollouts: Sequence[Rollout], micro_rows: int, device: torch.device
    ) -> list[Batch]: ...


class RolloutLoader:
    """Iterator over optimizer steps on sampled answers. A round of sampling lasts for `steps_per_rollout` steps."""

    def __init__(self, objective: RollsOut, questions: Questions, options: LoaderOptions):
        self.objective, self.questions, self.options = objective, questions, options
        self.position = options.start_row  # of the next step's first answer
        self.answers_per_round = objective.options.steps_per_rollout * options.rows_per_step
        self.rollouts: list[Rollout] = []
        # A round that a step has used stays in the log; later ones are sampled again.
        objective.log.cut(-(-self.position // self.answers_per_round) * self.answers_per_round)

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        options, objective = self.options, self.objective
        round_start = self.position - self.position % self.answers_per_round
        if not self.rollouts or self.rollouts[0].position < round_start:
            self.rollouts = self._rollouts_at(round_start)
        step_positions = set(self._rank_positions(self.position, self.position + options.rows_per_step))
        rollouts = [r for r in self.rollouts if r.position in step_positions]
        self.position += options.rows_per_step
        return objective.batches(self.questions, rollouts, options.micro_batch_rows, options.device)

    def _rank_positions(self, first: int, last: int) -> list[int]:
        """Return the positions from `first` up to `last` that belong to this rank: one slice of each step."""
        share = self.options.rows_per_step // self.options.world_size
        steps = range(first + self.options.rank * share, last, self.options.rows_per_step)
        return [p for step in steps for p in range(step, step + share)]

    def _rollouts_at(self, start: int) -> list[Rollout]:
        """Return this rank's answers of the round that starts at a position.

        They are sampled now, or read from the log if the run was resumed in the middle of the round.
        """
        positions = self._rank_positions(start, start + self.answers_per_round)
        group = self.questions.group
        question_positions = np.array(positions[::group], np.int64) // group
        questions = [
            q for q in self.questions.at(self.options.seed, question_positions) for _ in range(group)
        ]
        if self.position == start:
            return self.objective.roll_out(questions, positions, self.options.seed)
        logged = {
            row["position"]: row for row in self.objective.log.read(start, start + self.answers_per_round)
        }
        if not logged.keys() >= set(positions):
            raise RunError(
                f"{self.objective.log.lines}: the sampled answers of the next step are missing; restore the file, or "
                "start a new run"
            )
        rollouts = []
        for position, question in zip(positions, questions, strict=True):
            rollouts.append(Rollout.from_json(logged[position], question))
        return rollouts

    def close(self) -> None:
        pass
