"""Passes that are replayed: stand-ins for CUDA graphs on a CPU show that steps are those without graphs, to the bit."""

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deskside.config import merge
from deskside.data.reading.loader import Batch, future_targets
from deskside.optim.build import build
from deskside.precision.convert import convert
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop import graphed_pass
from deskside.train.loop.graph_pool import Graph, PassMemory
from deskside.train.loop.guard import Guard
from deskside.train.loop.step import Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.next_token import NextToken
from deskside.train.parallel import World
from deskside.utils.errors import RunError, UsageError
from tests.examples import examples
from tests.optim.models import NO_SCALING
from tests.precision.small import make
from tests.train.loop.graph_stand_ins import Allocating, Checking, Replaying, StandInPool

CPU = torch.device("cpu")
ROWS, LENGTH, VOCABULARY, STEPS = 4, 16, 64, 7
KINDS = [Replaying, Checking]
ONE_KIND = [pytest.param(Replaying, marks=pytest.mark.full), Checking]


@pytest.fixture(autouse=True)
def no_pools() -> None:
    for kind in (*KINDS, Allocating):
        kind.made = []


def stepper(recipe: str, parts: dict[str, Any] | None = None, shape: dict[str, Any] | None = None) -> Stepper:
    given = {
        "model": {"intermediate_size": 128, **(shape or {})},
        "optim": {"name": "adamw"},
        **(parts or {}),
    }
    config = merge.build([given])
    model = make(num_hidden_layers=2, **(shape or {}))
    options = config.precision.model_copy(update={"name": recipe})
    applied = convert(model, recipe, options, fused=True, native=False)
    objective = NextToken()
    objective.multi_token = config.multi_token
    if config.multi_token.weights:
        objective.metric_names = ("loss", "future_token_loss")
    context = TrainContext(
        config=config,
        world=World(CPU),
        model=model,
        attention=AttentionBackends("reference"),
        precision=applied,
        objective=objective,
    )
    return Stepper(context, build(model, config.optim, NO_SCALING, fused=False))


def batches(
    step: int, passes: int, documents: bool = False, future: int = 0, length: int = LENGTH
) -> list[Batch]:
    """Return the micro-batches of a step. The last target of every row is not counted in odd steps."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=generator)
    targets, found = tokens[:, 1:].clone(), []
    if step % 2:
        targets[:, -1] = -100
    num_valid = int((targets != -100).sum())
    for x, y in zip(tokens[:, :-1].chunk(passes), targets.chunk(passes), strict=True):
        positions, boundaries = torch.arange(length).expand(len(x), length).contiguous(), None
        if documents:
            cut = int(torch.randint(1, length, (1,), generator=generator))
            positions[:, cut:] -= cut
            starts = [row * length + offset for row in range(len(x)) for offset in (0, cut)]
            boundaries = torch.tensor([*starts, x.numel(), x.numel()], dtype=torch.int32)
        batch = Batch(
            x.contiguous(),
            y.contiguous(),
            boundaries,
            positions if documents else None,
            num_valid // passes,
            num_valid,
        )
        if future:
            batch = replace(batch, future_targets_BTK=future_targets(batch.targets_BT, positions, future))
        found.append(batch)
    return found


def one_step(run: Stepper, step: int, passes: int, **kind: Any) -> tuple[float, float, dict[str, float]]:
    """Run a step. Return its loss, gradient norm and metric sums."""
    run.set_progress(1 - step / 20, step / STEPS, step)
    metrics = run.run(batches(step, passes, **kind), step + 1)
    loss, norm, skipped = metrics.read()
    assert not skipped and math.isfinite(loss) and norm > 0
    return loss, norm, metrics.metric_sums()


def state(run: Stepper) -> dict[str, Tensor]:
    tensors = dict(run.optimizer.state_dict_flat()[0]) | run.precision.scales.state_dict()
    return {name: t.clone() for name, t in tensors.items()} | {
        name: p.detach().clone() for name, p in run.model.named_parameters()
    }


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def graphed(pool: type[StandInPool], *arguments: Any, **more: Any) -> tuple[Stepper, list[str]]:
    lines: list[str] = []
    run = stepper(*arguments, **more)
    run.use_graphs(lines.append, pool)
    return run, lines


def compare(pool: type[StandInPool], arguments: tuple[Any, ...], passes: int, **kind: Any) -> list[str]:
    """Compare the steps of a run with those without graphs, and return the lines about captures."""
    plain, (run, lines) = stepper(*arguments), graphed(pool, *arguments)
    for step in range(STEPS):
        assert one_step(run, step, passes, **kind) == one_step(plain, step, passes, **kind), step
    assert_equal(state(run), state(plain))
    return lines


@pytest.mark.parametrize("pool", KINDS)
@pytest.mark.parametrize("passes", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    ("recipe", "documents"),
    [
        ("fp32", False),
        ("bf16", True),
        ("fp8-tensorwise", False),
        ("fp8-delayed", True),
        ("fp8-rowwise", True),
    ],
)
def test_replayed_passes_change_no_bit(
    recipe: str, documents: bool, passes: int, pool: type[StandInPool]
) -> None:
    lines = compare(pool, (recipe,), passes, documents=documents)
    assert len(lines) == 1 and "captured a pass of" in lines[0]
    # With the conversion of the weights, which FP32 does not need, a step has one replay more than passes. Two steps
    # run before the capture, and delayed scaling begins with two steps of another kind.
    replayed = STEPS - (4 if recipe == "fp8-delayed" else 2)
    assert [made.replays for made in pool.made] == [replayed * (passes + (recipe != "fp32"))]


@pytest.mark.parametrize("pool", ONE_KIND)
@pytest.mark.parametrize(
    ("recipe", "parts"),
    [
        ("bf16", {"optim": {"name": "muon"}}),
        ("bf16", {"optim": {"name": "adamw", "ema_nesterov": 0.6}}),
        ("fp8-delayed", {"precision": {"name": "fp8-delayed", "head": "fp8"}}),
        ("fp8-tensorwise", {"precision": {"name": "fp8-tensorwise", "weight_cache": False}}),
        ("bf16", {"compute": {"z_loss": 1e-4, "loss_chunk_tokens": 24}}),
    ],
    ids=["muon", "ema-nesterov", "fp8 head", "no weight cache", "chunks"],
)
def test_options(recipe: str, parts: dict[str, Any], pool: type[StandInPool]) -> None:
    assert len(compare(pool, (recipe, parts), 2)) == 1


@pytest.mark.parametrize("pool", ONE_KIND)
def test_recomputed_blocks(pool: type[StandInPool]) -> None:
    plain, (run, lines) = stepper("fp8-delayed"), graphed(pool, "fp8-delayed")
    for one in (plain, run):
        one.precision.set_checkpointing("block")
    for step in range(STEPS):
        assert one_step(run, step, 1) == one_step(plain, step, 1)
    assert_equal(state(run), state(plain))
    assert len(lines) == 1


@pytest.mark.parametrize("pool", ONE_KIND)
def test_weights_of_later_tokens_decay_within_one_graph(pool: type[StandInPool]) -> None:
    """They change in every step; only the step from which all are 0 has another kind of pass."""
    parts = {"multi_token": {"weights": [0.5, 0.25], "until": 0.8}}
    plain, (run, lines) = stepper("bf16", parts), graphed(pool, "bf16", parts)
    for step in range(STEPS):
        expected = one_step(plain, step, 2, future=2)
        assert one_step(run, step, 2, future=2) == expected
        assert (expected[2]["future_token_loss"] > 0) == (step < 6)
    assert_equal(state(run), state(plain))
    assert len(lines) == 1 and len(pool.made) == 1 and pool.made[0].released


@pytest.mark.parametrize(
    "parts", [{}, {"precision": {"name": "fp8-delayed", "head": "fp8"}}, {"optim": {"name": "muon"}}]
)
def test_only_parameters_are_converted_again(parts: dict[str, Any]) -> None:
    """The tensor of the last conversion is kept alive, and a replay reads it: a temporary one would be out of date."""
    run, _ = graphed(Replaying, "fp8-delayed", parts)
    for step in range(STEPS):
        one_step(run, step, 2)
    parameters = {id(parameter) for parameter in run.model.parameters()}
    sources = [converted._source for converted in run.precision.cached_weights()]
    assert sources and all(source is not None and id(source[0]) in parameters for source in sources)


# Another kind of pass


WINDOWED = {"window_pattern": "SL", "sliding_window": 8}


@pytest.mark.parametrize("pool", ONE_KIND)
def test_a_stage_is_captured_again(pool: type[StandInPool]) -> None:
    """Stages with another window, then with longer rows. The graph of a stage is dropped with it."""
    plain, (run, lines) = stepper("bf16", shape=WINDOWED), graphed(pool, "bf16", shape=WINDOWED)
    for step in range(12):
        for one in (plain, run):
            one.set_window(4 if step < 4 else None)
        length = 16 if step < 8 else 32
        assert one_step(run, step, 2, length=length) == one_step(plain, step, 2, length=length), step
    assert_equal(state(run), state(plain))
    assert [made.replays for made in pool.made] == [6, 6, 6] and len(lines) == 3
    assert [made.released for made in pool.made] == [True, True, False]
    run.release_graphs()
    assert pool.made[-1].released


@pytest.mark.parametrize("pool", ONE_KIND)
def test_bf16_steps_are_another_kind(pool: type[StandInPool]) -> None:
    parts = {"precision": {"name": "fp8-delayed", "warmup_steps": 4, "bf16_from": 0.8}}
    plain, (run, lines) = stepper("fp8-delayed", parts), graphed(pool, "fp8-delayed", parts)
    for one in (plain, run):
        one.precision_config = merge.build([parts]).precision
    for step in range(16):
        for one in (plain, run):
            one.set_progress(1.0, step / 16, step)
        found, expected = [one.run(batches(step, 2), step + 1).read() for one in (run, plain)]
        assert found == expected, step
    assert_equal(state(run), state(plain))
    assert len(lines) == 3  # BF16, FP8 with delayed scales, BF16


@pytest.mark.parametrize("pool", ONE_KIND)
@pytest.mark.parametrize("recipe", ["bf16", "fp8-delayed"])
def test_evaluations_between_steps(recipe: str, pool: type[StandInPool]) -> None:
    """An evaluation drops the converted weights and converts others. The graphs stay."""
    plain, (run, lines) = stepper(recipe), graphed(pool, recipe)

    def evaluate(one: Stepper) -> Tensor:
        batch = batches(100, 1)[0]
        with one.precision.high_precision():
            return one.model.token_losses(batch.tokens_BT, batch.targets_BT)

    for step in range(9):
        assert one_step(run, step, 2) == one_step(plain, step, 2), step
        if step in (1, 5, 6):
            assert torch.equal(evaluate(run), evaluate(plain))
    assert_equal(state(run), state(plain))
    assert len(lines) == 1 and not pool.made[0].released


@pytest.mark.parametrize("pool", ONE_KIND)
def test_weights_that_moved_are_captured_again(pool: type[StandInPool]) -> None:
    plain, (run, lines) = stepper("bf16"), graphed(pool, "bf16")
    for step in range(8):
        if step == 4:
            weight = run.model.layers[0].mlp.output.projection.weight  # type: ignore[union-attr]
            weight.data = weight.data.clone()  # type: ignore[operator, union-attr]
        assert one_step(run, step, 1) == one_step(plain, step, 1)
    assert_equal(state(run), state(plain))
    assert len(lines) == 2 and pool.made[0].released


@pytest.mark.parametrize("pool", ONE_KIND)
def test_released_gradients_are_allocated_again_by_a_later_step(pool: type[StandInPool]) -> None:
    """A run releases them before its final evaluation."""
    plain, (run, lines) = stepper("bf16"), graphed(pool, "bf16")
    assert run.graphed is not None
    for step in range(8):
        assert one_step(run, step, 2) == one_step(plain, step, 2), step
        if step == 3:
            gradients = [weakref.ref(gradient) for gradient in run.graphed.gradients]
            run.release_graphs()
            pool.made[0].graphs.clear()  # the stand-in keeps what it recorded
            gc.collect()
            assert gradients and not any(gradient() is not None for gradient in gradients)
            assert all(parameter.grad is None for parameter in run.model.parameters())
    assert_equal(state(run), state(plain))
    assert [made.replays for made in pool.made] == [6, 6] and len(lines) == 2


steps_of_a_run = st.lists(
    st.tuples(
        st.sampled_from([None, 4]),  # window
        st.booleans(),  # documents
        st.sampled_from([16, 32]),  # tokens of a row
        st.sampled_from([1, 2]),  # passes
        st.booleans(),  # in BF16
        st.integers(2, 5),  # steps like this
    ),
    min_size=2,
    max_size=4,
)


@given(runs=steps_of_a_run, pool=st.sampled_from(KINDS))
@settings(max_examples=examples(4, 8), deadline=None)
def test_a_changed_kind_never_replays_an_old_graph(runs: list[Any], pool: type[StandInPool]) -> None:
    recipe, shape = "fp8-tensorwise", WINDOWED
    plain, (run, _) = stepper(recipe, shape=shape), graphed(pool, recipe, shape=shape)
    step = 0
    for window, documents, length, passes, in_bf16, count in runs:
        for _ in range(count):
            numbers = []
            for one in (run, plain):
                one.set_window(window)
                one.set_progress(0.5, 0.1, step)
                one.precision.set_active(not in_bf16)
                numbers.append(one.run(batches(step, passes, documents, length=length), step + 1).read())
            assert numbers[0] == numbers[1], step
            step += 1
    assert_equal(state(run), state(plain))


# What is not captured


def test_dry_steps_are_not_captured_and_do_not_count() -> None:
    run, lines = graphed(Checking, "bf16")
    run.set_progress(0.0, 0.0, 0)
    before = state(run)
    for _ in range(4):
        run.run(batches(0, 2), 1, dry=True).read()
    assert not lines
    for name, parameter in run.model.named_parameters():
        assert torch.equal(before[name], parameter), name
    for step in range(3):
        one_step(run, step, 2)
    assert len(lines) == 1


class Memory(PassMemory):
    """Needs as many bytes for a pass as it has tokens, and has as many as `room` for what is reserved."""

    def __init__(self, run: Stepper, room: int):
        super().__init__(CPU)
        self.room, self.log = room, list[tuple[str, int]]()
        self.reserved: list[weakref.ref[Tensor]] = []
        for owner, name in ((run, "_pass"), (run.optimizer, "step"), (run.model, "token_losses")):
            self._note(owner, name)
        run.graphed._run_pass, run.graphed.memory = run._pass, self  # type: ignore[union-attr]

    def _note(self, owner: Any, name: str) -> None:
        """Log the bytes that are reserved when a method is called."""
        original = getattr(owner, name)

        def noted(*arguments: Any) -> Any:
            held = sum(block.numel() for reference in self.reserved if (block := reference()) is not None)
            self.log.append((name.strip("_"), held))
            return original(*arguments)

        setattr(owner, name, noted)

    def needed(self) -> int:
        return 100

    def reserve(self, size: int) -> object:
        if size > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. More text.")
        block = torch.empty(size, dtype=torch.uint8)
        self.reserved.append(weakref.ref(block))
        return block


@pytest.mark.parametrize("passes", [1, 2])
def test_a_dry_step_keeps_the_memory_of_a_captured_pass(passes: int) -> None:
    """Beside it are the update and an evaluation. Steps that are timed reserve nothing."""
    run, _ = graphed(Replaying, "fp8-tensorwise")
    assert run.graphed is not None
    memory = Memory(run, 105)
    run.set_progress(0.0, 0.0, 0)
    for _ in range(2):
        memory.log.clear()
        with run.graphed.reserving():
            run.run(batches(0, passes), 1, dry=True)
        assert memory.log == [*[("pass", 0)] * passes, ("token_losses", 105), ("step", 105)]
        assert not any(reference() is not None for reference in memory.reserved)
    memory.log.clear()
    run.run(batches(0, 2), 1, dry=True)
    assert memory.log == [("pass", 0), ("pass", 0), ("step", 0)]
    memory.room = 104
    with pytest.raises(torch.OutOfMemoryError), run.graphed.reserving():
        run.run(batches(0, 2), 1, dry=True)


@pytest.mark.parametrize("pool", ONE_KIND)
def test_a_skipped_step_changes_nothing(pool: type[StandInPool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "skip", lambda self, loss, norm, step: torch.tensor(float(step in (4, 6))))
    plain, (run, lines) = stepper("fp8-delayed"), graphed(pool, "fp8-delayed")
    for step in range(9):
        numbers = []
        for one in (run, plain):
            one.set_progress(1.0, step / 9, step)
            numbers.append(one.run(batches(step, 2), step + 1).read())
        assert numbers[0] == numbers[1] and numbers[0][2] == (step + 1 in (4, 6))
    assert_equal(state(run), state(plain))
    assert len(lines) == 1


def test_after_many_captures_passes_run_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_pass, "MAX_CAPTURES", 2)
    plain, (run, lines) = stepper("bf16"), graphed(Replaying, "bf16")
    for step in range(16):
        length = 16 if step // 4 % 2 == 0 else 32
        assert one_step(run, step, 1, length=length) == one_step(plain, step, 1, length=length)
    assert_equal(state(run), state(plain))
    assert len(lines) == 3 and "without a graph from now on" in lines[2]
    assert all(pool.released for pool in Replaying.made)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_without_memory_for_a_capture_passes_run_without(fails_at: int) -> None:
    class Full(Replaying):
        def __init__(self, device: torch.device):
            if fails_at == 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            super().__init__(device)

        def capture(self, work: Callable[[], None]) -> Graph:
            if len(self.graphs) + 1 == fails_at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return super().capture(work)

    plain, (run, lines) = stepper("fp8-tensorwise"), graphed(Full, "fp8-tensorwise")
    for step in range(STEPS):
        assert one_step(run, step, 2) == one_step(plain, step, 2)
    assert_equal(state(run), state(plain))
    assert len(lines) == 1 and "not enough memory" in lines[0] and "without a graph from now on" in lines[0]
    assert all(pool.released for pool in Full.made)


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def not_ended() -> Exception:
    """Return the error of a capture that ran out of memory and could then not be ended."""
    error = RuntimeError("operation failed due to a previous error during capture")
    error.__context__ = out_of_memory()
    return error


@pytest.mark.parametrize("at", ["pool", "first capture", "second capture", "first replay"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (out_of_memory, "CUDA out of memory"),
        (not_ended, "CUDA out of memory"),
        pytest.param(
            lambda: torch.AcceleratorError("CUDA error: out of memory\nmore"),
            "CUDA error: out of memory",
            marks=pytest.mark.full,
        ),
        pytest.param(
            lambda: RuntimeError("Triton Error [CUDA]: out of memory"),
            "Triton Error [CUDA]: out of memory",
            marks=pytest.mark.full,
        ),
        (
            lambda: RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            "CUBLAS_STATUS_ALLOC_FAILED",
        ),
    ],
    ids=["allocator", "not ended", "driver", "triton", "cublas"],
)
def test_every_error_for_lack_of_memory_ends_only_the_capture(
    error: Callable[[], Exception], reason: str, at: str
) -> None:
    class Full(Replaying):
        def __init__(self, device: torch.device):
            if at == "pool":
                raise error()
            super().__init__(device)

        def capture(self, work: Callable[[], None]) -> Graph:
            graph = super().capture(work)
            if at == ("first capture", "second capture", "")[len(self.graphs) - 1]:
                raise error()
            if at == "first replay":

                class Launched:
                    def replay(self) -> None:
                        raise error()

                return Launched()
            return graph

    plain, (run, lines) = stepper("fp8-tensorwise"), graphed(Full, "fp8-tensorwise")
    for step in range(4):
        assert one_step(run, step, 2) == one_step(plain, step, 2)
    assert_equal(state(run), state(plain))
    assert len(lines) == 1 and reason in lines[0] and "\n" not in lines[0]
    assert "not enough memory" in lines[0] and "without a graph from now on" in lines[0]
    assert all(pool.released for pool in Full.made)


def test_a_capture_without_memory_keeps_nothing_alive() -> None:
    """The tracebacks of the errors refer to the tensors of the pass."""
    kept: list[weakref.ref[Tensor]] = []

    class Full(Replaying):
        def capture(self, work: Callable[[], None]) -> Graph:
            activations = torch.zeros(4)
            kept.append(weakref.ref(activations))
            try:
                raise out_of_memory()
            finally:
                raise RuntimeError("operation failed due to a previous error during capture")

    run, lines = graphed(Full, "bf16")
    gc.disable()
    try:
        for step in range(3):
            one_step(run, step, 1)
        assert len(lines) == 1 and [tensor() for tensor in kept] == [None]
    finally:
        gc.enable()


def test_a_pass_that_cannot_be_captured_ends_the_run() -> None:
    class Broken(Replaying):
        def capture(self, work: Callable[[], None]) -> Graph:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    run, _ = graphed(Broken, "bf16")
    for step in range(2):
        one_step(run, step, 1)
    expected = (
        r"compute\.cuda_graph: .*\(operation not permitted when stream is capturing\); use .*cuda_graph off"
    )
    with pytest.raises(RunError, match=expected):
        one_step(run, 2, 1)


@pytest.mark.parametrize("names", [("flex", None), ("varlen", "flex")])
def test_compiled_attention_is_refused(names: tuple[str, str | None]) -> None:
    run = stepper("bf16")
    run.context.attention = AttentionBackends(*names)
    with pytest.raises(UsageError, match=r"compute\.cuda_graph: cannot contain the attention backend flex"):
        run.use_graphs(print, Replaying)


# The stand-ins find errors


def fails(run: Stepper, match: str, **kind: Any) -> None:
    with pytest.raises(AssertionError, match=match):
        for step in range(STEPS):
            one_step(run, step, 1, **kind)


def test_finds_a_weight_that_is_converted_into_new_memory() -> None:
    fails(graphed(Allocating, "bf16")[0], "of a replay differs")


def test_finds_a_number_of_the_host() -> None:
    """The number of targets differs between odd and even steps."""
    run, _ = graphed(Checking, "bf16")
    original = run._pass

    def baked(batch: Batch, sums: Tensor, count: Any) -> None:
        original(replace(batch, num_valid_step=last[-1]), sums, None)

    last: list[int] = []
    load = run.graphed._load  # type: ignore[union-attr]

    def loaded(batch: Batch) -> Batch:
        last.append(batch.num_valid_step)
        return load(batch)

    run.graphed._run_pass, run.graphed._load = baked, loaded  # type: ignore[union-attr, method-assign]
    fails(run, "of a replay differs")


def test_finds_gradients_at_another_address() -> None:
    run, _ = graphed(Checking, "bf16")
    begin = run.graphed.begin_step  # type: ignore[union-attr]

    def begin_step(dry: bool = False) -> None:
        begin(dry)
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    run.graphed.begin_step = begin_step  # type: ignore[union-attr, method-assign]
    fails(run, "of a replay differs")


def test_finds_a_decision_of_the_host() -> None:
    run, _ = graphed(Checking, "bf16")
    original = run.graphed._run_pass  # type: ignore[union-attr]

    def deciding(batch: Batch, sums: Tensor, count: Any) -> None:
        original(batch, sums, count)
        assert float(sums[0]) > 0

    run.graphed._run_pass = deciding  # type: ignore[union-attr]
    fails(run, "cannot contain _local_scalar_dense")


def test_finds_a_replay_of_stale_weights() -> None:
    """Without the conversion at the beginning of a step, the products read the weights of the capture."""
    plain, (run, _) = stepper("bf16"), graphed(Replaying, "bf16")
    run.graphed._begin_replays = lambda captured: None  # type: ignore[union-attr, method-assign]
    losses = [(one_step(run, step, 1)[0], one_step(plain, step, 1)[0]) for step in range(STEPS)]
    assert [found == expected for found, expected in losses] == [True] * 3 + [False] * (STEPS - 3)
