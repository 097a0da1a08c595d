"""The choice of compute.cuda_graph auto on several processes and where memory is short.

tests/train/test_graphed_runs.py has whole runs.
"""

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deskside.train.loop.stage_work import StageWork
from deskside.train.prepare import graph_choice
from deskside.train.prepare.batch_size_finder import BatchSizeFinder
from deskside.train.prepare.graph_choice import choose_graphs

STAGES = [SimpleNamespace(until=1.0, window=None, micro_rows=4, dataset=None)]


def choice(
    monkeypatch: pytest.MonkeyPatch,
    *,
    processes: int = 1,
    rows: int = 8,
    host: float = 1.0,
    others: int = 1,
    bf16_steps: bool = False,
    use: Any = lambda event: None,
) -> list[str]:
    """Return what was done. others: what the other processes say in each vote; use: what prepares the graphs."""
    done: list[str] = []

    def record(name: str, function: Any = lambda *arguments: None) -> Any:
        def recorded(*arguments: Any) -> Any:
            done.append(name)
            return function(*arguments)

        return recorded

    stepper: Any = SimpleNamespace(
        window=7,
        context=SimpleNamespace(attention=None),
        precision=SimpleNamespace(
            fused=True,
            scales=SimpleNamespace(reset=record("scales reset")),
            high_precision=contextlib.nullcontext,
        ),
        event=None,
        set_window=lambda window: setattr(stepper, "window", window),
        use_graphs=record("graphs", use),
        leave_graphs=record("no graphs"),
    )
    finder = SimpleNamespace(
        config=SimpleNamespace(compute=SimpleNamespace(cuda_graph="auto")),
        stepper=stepper,
        world=SimpleNamespace(
            size=processes, device=torch.device("cpu"), all_reduce_min=lambda own: min(own, others)
        ),
        log=lambda line: None,
        stage_rows=lambda stage: rows,
        stage_dry_rows=lambda stage: rows,
        uses_bf16_steps=bf16_steps,
        timed_dry_step=record("timed", lambda *step: (host, 1.0)),
        dry_step=record("dry step"),
        reserve_memory=contextlib.nullcontext,
        reserve_captured=contextlib.nullcontext,
    )
    monkeypatch.setattr(graph_choice, "can_capture", lambda *run: True)
    choose_graphs(cast(BatchSizeFinder, finder), cast("list[StageWork]", STAGES))
    assert stepper.window == 7  # evaluations before the first step use that of the last stage
    return done


@pytest.mark.parametrize("rows", [4, 8])
def test_steps_of_any_number_of_passes_and_processes_are_replayed(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for processes in (1, 2):
        assert "dry step" in choice(monkeypatch, processes=processes, rows=rows)


def test_steps_in_bf16_have_to_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(monkeypatch).count("dry step") == 1
    assert choice(monkeypatch, bf16_steps=True).count("dry step") == 2


def test_all_processes_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice(monkeypatch, host=0.89) == ["timed", "timed", "scales reset"]
    assert choice(monkeypatch, processes=2, others=0) == ["timed", "timed", "scales reset"]


def test_no_process_steps_where_another_has_no_memory_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(event: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    done = choice(monkeypatch, use=full)
    assert done == ["timed", "timed", "graphs", "no graphs", "scales reset"]
