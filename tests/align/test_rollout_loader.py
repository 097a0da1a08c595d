"""The loader of GRPO reads the answers of a round that an earlier part of the run sampled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deskside.align.grpo_data import Question
from deskside.align.rollout_loader import RolloutLoader
from deskside.align.rollouts import Rollout, RolloutLog
from deskside.align.sampler import SampledAnswer
from deskside.config.align import GrpoConfig
from deskside.data.reading.loader import LoaderOptions

GROUP, ANSWERS = 2, 8  # per question and per step


class FakeQuestions:
    """The position of a question is its prompt."""

    group = GROUP

    def at(self, seed: int, positions: NDArray[np.int64]) -> list[Question]:
        return [Question(str(position), "", (1,)) for position in positions.tolist()]


class FakeObjective:
    """Gives each answer its position as its token, and counts the rounds of sampling."""

    def __init__(self, folder: Path, rank: int, processes: int):
        self.options = GrpoConfig(group=GROUP, steps_per_rollout=2)
        self.log = RolloutLog(folder, rank, with_tokens=True, processes=processes)
        self.rounds = 0

    def roll_out(self, questions: Sequence[Question], positions: Sequence[int], seed: int) -> list[Rollout]:
        self.rounds += 1
        rollouts = [
            Rollout(position, question, SampledAnswer((position,), (-0.5,), True), "", 0.0, 0.0)
            for position, question in zip(positions, questions, strict=True)
        ]
        self.log.add(rollouts, GROUP)
        return rollouts

    def batches(self, questions: Any, rollouts: Sequence[Rollout], micro_rows: int, device: Any) -> Any:
        return rollouts


def loaders(folder: Path, processes: int, position: int) -> list[RolloutLoader]:
    return [
        RolloutLoader(
            FakeObjective(folder, rank, processes),
            FakeQuestions(),  # type: ignore[arg-type]
            LoaderOptions(0, position, ANSWERS, 1, rank, processes),
        )
        for rank in range(processes)
    ]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (4, 2), (1, 2)])
def test_a_round_goes_on_with_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    """The run samples its second round and is resumed in the middle of the first."""
    for loader in loaders(tmp_path, before, 0):
        for _ in range(3):
            next(loader)
    resumed = loaders(tmp_path, after, ANSWERS)
    answers: list[Any] = [answer for loader in resumed for answer in next(loader)]
    assert [answer.position for answer in answers] == list(range(ANSWERS, 2 * ANSWERS))
    assert all(answer.sampled.tokens == (answer.position,) for answer in answers)
    assert all(answer.question.prompt == str(answer.position // GROUP) for answer in answers)
    assert all(loader.objective.rounds == 0 for loader in resumed)  # type: ignore[attr-defined]
    for loader in resumed:
        next(loader)
    log = RolloutLog(tmp_path, 0, with_tokens=True)
    assert sorted(row["position"] for row in log.read()) == list(range(4 * ANSWERS))
