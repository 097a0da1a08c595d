"""Micro-batch fitting with a fake GPU that has room for a given number of rows."""

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deskside.config.run import RunConfig
from deskside.data.reading.loader import Batch
from deskside.optim.adamw import AdamW
from deskside.optim.muon import Muon
from deskside.train import environment_record
from deskside.train.loop.gradient_buckets import GradientBuckets
from deskside.train.loop.step import Stepper
from deskside.train.next_token import NextToken
from deskside.train.objective import RowDataset
from deskside.train.parallel import World
from deskside.train.prepare.batch_size_finder import (
    BatchSizeFinder,
    MicroBatch,
    StageWork,
    candidates,
    find_micro_batch,
)
from deskside.utils.errors import RunError
from tests.train import tiny_run

CPU = torch.device("cpu")


def nothing() -> None:
    """Does nothing: the fake GPU has nothing to free after an attempt."""


class Card:
    """Runs out of memory beyond `room` rows."""

    def __init__(self, room: int):
        self.room = room
        self.tried: list[int] = []

    def dry_step(self, micro_rows: int) -> float:
        self.tried.append(micro_rows)
        if micro_rows > self.room:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {micro_rows} GiB. More text."
            )
        return 0.01 * micro_rows


@given(st.integers(1, 500), st.integers(0, 600))
def test_candidates_divide_and_halve_and_end_at_one(rows: int, largest: int) -> None:
    chosen = candidates(rows, largest)
    fitting = [n for n in range(1, rows + 1) if rows % n == 0 and n <= max(1, largest)]
    assert chosen[0] == max(fitting) and chosen[-1] == 1
    assert all(rows % n == 0 for n in chosen)
    for before, after in itertools.pairwise(chosen):
        assert after <= before / 2 or after == 1
        # No larger divisor that is at most half was skipped.
        assert after == max([n for n in fitting if 2 * n <= before] or [1])


@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 200))
def test_the_effective_batch_never_changes(rows: int, largest: int, room: int) -> None:
    card, said = Card(room), list[str]()
    fitted = find_micro_batch(card.dry_step, rows, largest, said.append, nothing)
    assert fitted.micro_rows * fitted.accumulation == rows and fitted.micro_rows <= room
    assert card.tried == [a["micro_rows"] for a in fitted.attempts]
    assert [a["fits"] for a in fitted.attempts] == [False] * (len(card.tried) - 1) + [True]
    assert fitted.attempts[-1]["seconds"] == pytest.approx(0.01 * fitted.micro_rows)
    assert len(said) == len(card.tried) - 1
    for text, tried in zip(said, card.tried, strict=False):
        assert text.startswith(f"{tried} rows do not fit (CUDA out of memory)")


def test_powers_of_two_halve() -> None:
    card = Card(5)
    fitted = find_micro_batch(card.dry_step, 32, 32, lambda text: None, nothing)
    assert card.tried == [32, 16, 8, 4] and (fitted.micro_rows, fitted.accumulation) == (4, 8)


def test_a_single_row_that_does_not_fit_says_what_to_do() -> None:
    with pytest.raises(RunError, match=r"single row.*activation_checkpointing block"):
        find_micro_batch(Card(0).dry_step, 8, 8, lambda text: None, nothing)


def test_other_errors_are_not_taken_for_memory() -> None:
    def broken(micro_rows: int) -> float:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        find_micro_batch(broken, 8, 8, lambda text: None, nothing)


def scarce(root: Path, config: RunConfig) -> None:
    """Train where the last process cannot hold the activations of 4 rows beside gradients."""
    original = Stepper.loss

    def loss(stepper: Stepper, batch: Batch) -> Any:
        second = any(p.grad is not None for p in stepper.model.parameters())
        last = stepper.world.rank == stepper.world.size - 1
        if last and len(batch.tokens_BT) >= 4 and second:
            raise torch.OutOfMemoryError("CUDA out of memory. More text.")
        return original(stepper, batch)

    Stepper.loss = loss  # type: ignore[method-assign]
    tiny_run.train(root, config)


def scarce_for_sums(root: Path, config: RunConfig) -> None:
    """Train where the last process cannot hold a copy of gradients beside the activations of 4 rows."""
    loss, buffers, rows = Stepper.loss, GradientBuckets._buffers, 0

    def noted(stepper: Stepper, batch: Batch) -> Any:
        nonlocal rows
        rows = len(batch.tokens_BT)
        return loss(stepper, batch)

    def scarce(buckets: GradientBuckets, gradients: list[torch.Tensor]) -> Any:
        if buckets.world.rank == 1 and rows >= 4:
            raise torch.OutOfMemoryError("CUDA out of memory. More text.")
        return buffers(buckets, gradients)

    Stepper.loss, GradientBuckets._buffers = noted, scarce  # type: ignore[method-assign]
    tiny_run.train(root, config)


def test_a_dry_step_needs_the_memory_of_sums_beside_the_backward(data: Path, tmp_path: Path) -> None:
    """The dry step sends no sums, because a process without memory for them would leave the others waiting."""
    batch = {"sequence_length": 32, "tokens": 2 * 8 * 32, "micro_tokens": 4 * 32}
    config = tiny_run.config(data, batch=batch, schedule={"length": "3 steps"})
    child = tiny_run.call(scarce_for_sums, tmp_path, config, ranks=2, log=tmp_path / "log")
    assert child.wait() == 0, child.text()
    fitted = tiny_run.plan(tmp_path / "run")["fit"][0]
    assert (fitted["micro_rows"], [a["fits"] for a in fitted["attempts"]]) == (2, [False, True])


def scarce_outside_passes(root: Path, config: RunConfig) -> None:
    """Train where the last process lacks memory for a batch of 8 rows, Muon with 4 rows, and AdamW with 2 rows."""
    timed_dry_step, rows = BatchSizeFinder.timed_dry_step, 0

    def noted(finder: BatchSizeFinder, micro_rows: int, *arguments: Any) -> Any:
        nonlocal rows
        rows = micro_rows if finder.world.rank == 1 else 0
        return timed_dry_step(finder, micro_rows, *arguments)

    def scarce(original: Any, failing: int) -> Any:
        def method(*arguments: Any) -> Any:
            if rows == failing:
                raise torch.OutOfMemoryError("CUDA out of memory. More text.")
            return original(*arguments)

        return method

    BatchSizeFinder.timed_dry_step = noted  # type: ignore[method-assign]
    parts: list[tuple[type, str, int]] = [
        (NextToken, "dry_batch", 8),
        (Muon, "_update_stack", 4),
        (AdamW, "step", 2),
    ]
    for owner, name, failing in parts:
        setattr(owner, name, scarce(getattr(owner, name), failing))
    tiny_run.train(root, config)


def test_all_processes_learn_that_one_lacks_memory_outside_of_its_passes(data: Path, tmp_path: Path) -> None:
    batch = {"sequence_length": 32, "tokens": 2 * 8 * 32, "micro_tokens": 8 * 32}
    config = tiny_run.config(data, batch=batch, schedule={"length": "3 steps"})
    child = tiny_run.call(scarce_outside_passes, tmp_path, config, ranks=2, log=tmp_path / "log")
    assert child.wait(60) == 0, child.text()
    fitted = tiny_run.plan(tmp_path / "run")["fit"][0]
    assert (fitted["micro_rows"], [a["fits"] for a in fitted["attempts"]]) == (1, [False, False, False, True])
    assert len(tiny_run.rows(tmp_path / "run")) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_fits_only_without_gradients_does_not_fit(data: Path, tmp_path: Path, ranks: int) -> None:
    """A second pass has gradients beside its activations. One process without enough memory decides for all."""
    batch = {"sequence_length": 32, "tokens": ranks * 8 * 32, "micro_tokens": 4 * 32}
    config = tiny_run.config(data, batch=batch, schedule={"length": "3 steps"})
    child = tiny_run.call(scarce, tmp_path, config, ranks=ranks, log=tmp_path / "log")
    assert child.wait() == 0, child.text()
    fitted = tiny_run.plan(tmp_path / "run")["fit"][0]
    assert (fitted["micro_rows"], fitted["accumulation"]) == (2, 4)
    assert [a["fits"] for a in fitted["attempts"]] == [False, True]
    assert len(tiny_run.rows(tmp_path / "run")) == 3


class Switch:
    """Replaces `QuantizedModel`: records whether the recipe is on."""

    def __init__(self) -> None:
        self.active = True

    def set_active(self, active: bool) -> None:
        self.active = active

    scales = SimpleNamespace(reset=nothing)

    @contextlib.contextmanager
    def high_precision(self) -> Iterator[None]:
        self.active = False
        try:
            yield
        finally:
            self.active = True


@pytest.mark.parametrize("precision", [{}, {"warmup_steps": 5}, {"bf16_from": 0.8}])
def test_steps_in_bf16_of_a_quantised_run_have_to_fit_too(precision: dict[str, Any]) -> None:
    config = RunConfig(precision={"name": "fp8", **precision})
    switch, tried = Switch(), list[tuple[int, bool]]()

    class OnCard(BatchSizeFinder):
        def dry_step(self, micro_rows: int, dataset: RowDataset, rows: int) -> float:
            tried.append((micro_rows, switch.active))
            if micro_rows > (8 if switch.active else 4):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return 1.0

        def first_candidate(self, stage: StageWork, rows: int) -> int:
            return 8

    stepper = SimpleNamespace(
        world=World(CPU), precision=switch, precision_config=config.precision, graphed=None
    )
    finder = OnCard(config, cast(Stepper, stepper), lambda tokens: 0.0, lambda line: None)
    found = finder.find_for_stage(cast(StageWork, SimpleNamespace(dataset=None)), 16, 16, None)
    assert found.micro_rows == (4 if precision else 8)
    assert switch.active and tried[-1] == (found.micro_rows, True)


def test_what_the_objective_will_keep_has_room_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU has 100 bytes, of which a row needs 10. Freed blocks no longer count."""
    config, card = RunConfig(batch={"sequence_length": 32, "tokens": 8 * 32}), weakref.WeakSet[Any]()

    class Block:
        pass

    def empty(size: int, **_: object) -> Block:
        if size > 100:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        block = Block()
        card.add(block)
        return block

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(environment_record, "allowed_memory_gib", lambda device: 100 / 2**30)

    class OnCard(BatchSizeFinder):
        def compile_kernels(self, micro_rows: int, dataset: RowDataset, rows: int) -> None: ...

        def dry_step(self, micro_rows: int, dataset: RowDataset, rows: int) -> float:
            assert len(card) == (1 if keeps else 0)
            if 10 * micro_rows + keeps > 100:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return 1.0

    monkeypatch.setattr("deskside.train.prepare.batch_size_finder.free_failed_attempt", lambda device: None)
    stage = SimpleNamespace(sequence_length=32, dataset=None)
    for keeps, expected in ((0, 8), (30, 4), (70, 2), (85, 1), (200, None)):
        stepper = SimpleNamespace(
            world=World(torch.device("cuda")),
            precision=Switch(),
            precision_config=config.precision,
            model=None,
            objective=SimpleNamespace(reserved_bytes=lambda config, model, keeps=keeps: keeps),
            graphed=None,
        )
        finder = OnCard(config, cast(Stepper, stepper), lambda tokens: 10 * tokens / 2**35, lambda line: None)
        if expected is None:
            with pytest.raises(RunError, match="single row"):
                finder.find_for_stage(cast(StageWork, stage), 8, 8, None)
        else:
            assert finder.find_for_stage(cast(StageWork, stage), 8, 8, None).micro_rows == expected
        assert not card


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("device", "changes", "compiled"),
    [
        ("cuda", {}, True),
        ("cpu", {}, False),
        ("cuda", {"model": EXPERTS}, False),
        ("cuda", {"optim": {"name": "adamw", "gradients": "host"}}, False),
    ],
)
def test_kernels_are_compiled_before_the_first_dry_step(
    device: str, changes: dict[str, Any], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens only if a step whose launches are skipped cannot go wrong, and its writes are discarded."""
    events: list[str] = []

    @contextlib.contextmanager
    def ahead(device: torch.device) -> Iterator[None]:
        events.append("skipping launches")
        yield
        events.append("launching")

    class OnCard(BatchSizeFinder):
        def dry_step(self, micro_rows: int, dataset: RowDataset, rows: int) -> float:
            events.append("step")
            if events == ["skipping launches", "step"]:
                raise torch.OutOfMemoryError  # the dry step will find out too
            return 1.0

    monkeypatch.setattr("deskside.train.prepare.batch_size_finder.compile_ahead", ahead)
    config = RunConfig.model_validate(changes)
    scales = SimpleNamespace(reset=lambda: events.append("scales reset"))
    precision = SimpleNamespace(scales=scales, forget_weights=lambda: events.append("weights forgotten"))
    stepper = SimpleNamespace(
        world=World(torch.device(device)), precision=precision, precision_config=config.precision, window=None
    )
    finder = OnCard(config, cast(Stepper, stepper), lambda tokens: 0.0, lambda line: None)
    finder.compile_kernels(4, cast(RowDataset, SimpleNamespace(sequence_length=32)), 8)
    assert events == (["skipping launches", "step", "scales reset", "weights forgotten"] if compiled else [])


@pytest.mark.parametrize("keeps, before", [(0, []), (5, [False])])
def test_what_steps_in_bf16_take_is_in_the_cache_when_others_look(keeps: int, before: list[bool]) -> None:
    """Fitting with an objective's reserved memory ends with an empty cache. The timed steps use only the recipe."""
    config = RunConfig(precision={"name": "fp8", "warmup_steps": 5})
    switch, ran = Switch(), list[bool]()

    class OnCard(BatchSizeFinder):
        def find_for_stage(self, stage: StageWork, rows: int, common: int, recorded: Any) -> MicroBatch:
            return MicroBatch(rows, 1, ())

        def dry_step(self, micro_rows: int, dataset: RowDataset, rows: int) -> float:
            ran.append(switch.active)
            return 1.0

        def objective_reserved_bytes(self) -> int:
            return keeps

    stepper = SimpleNamespace(
        world=World(CPU),
        precision=switch,
        precision_config=config.precision,
        optimizer=SimpleNamespace(create_state=nothing, set_progress=lambda *_: None),
        set_window=lambda window: None,
    )
    stage = SimpleNamespace(sequence_length=32, window=None, tokens_per_step=256, dataset=None)
    finder = OnCard(config, cast(Stepper, stepper), lambda tokens: 0.0, lambda line: None)
    finder.find([cast(StageWork, stage)], None)
    assert ran == [*before, True, True]


def test_kernels_are_compiled_ahead_once_for_each_shape_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled again after an attempt that ran out of memory before it had launched all of them."""
    config, ahead, dry = RunConfig(), [], []

    @contextlib.contextmanager
    def compile_ahead(device: torch.device) -> Iterator[None]:
        ahead.append(device.type)
        yield

    monkeypatch.setattr("deskside.train.prepare.batch_size_finder.compile_ahead", compile_ahead)

    class OnCard(BatchSizeFinder):
        def dry_step(self, micro_rows: int, dataset: RowDataset, rows: int) -> float:
            dry.append(micro_rows)
            if micro_rows > 8:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return 1.0

    precision = SimpleNamespace(scales=SimpleNamespace(reset=lambda: None), forget_weights=lambda: None)
    stepper = SimpleNamespace(
        world=World(torch.device("cuda")), precision=precision, precision_config=config.precision, window=None
    )
    finder = OnCard(config, cast(Stepper, stepper), lambda tokens: 0.0, lambda line: None)
    short, long = (cast(RowDataset, SimpleNamespace(sequence_length=length)) for length in (32, 64))
    for micro_rows, dataset in ((16, short), (8, short), (4, short), (4, long), (2, long)):
        finder.compile_kernels(micro_rows, dataset, 16)
    stepper.window = 8
    finder.compile_kernels(1, long, 16)
    assert dry == [16, 8, 4, 1] and ahead == ["cuda"] * 4
