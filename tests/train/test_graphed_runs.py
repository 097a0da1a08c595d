"""Complete runs whose passes are replayed equal runs without graphs, to the bit. A stand-in replays them on a CPU."""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from deskside.config import merge, run_checks
from deskside.config.run import RunConfig
from deskside.data.reading.loader import Batch
from deskside.model.transformer import Transformer
from deskside.optim.average import WeightAverage
from deskside.optim.build import Optimizer
from deskside.probe.point import OPTIMIZER_RUNS, StepTimer, optimizer_seconds, prepare_step, random_batches
from deskside.train import training_run
from deskside.train.environment_record import Sensors
from deskside.train.loop import graphed_pass
from deskside.train.loop.gradient_buckets import GradientBuckets
from deskside.train.loop.step import Stepper
from deskside.train.prepare import graph_choice, setup
from deskside.train.prepare.batch_size_finder import BatchSizeFinder
from deskside.utils.errors import UsageError
from tests.train import tiny_run
from tests.train.loop.graph_stand_ins import Checking, Replaying, StandInPool
from tests.train.tiny_run import curve, rows

STEPS = 16
DOCUMENTS = {"data": {"document_mask": True}}
FP8 = {"precision": {"name": "fp8-delayed", "keep_first": 0.0, "keep_last": 0.0}}
WINDOWED = {"model": {"window_pattern": "SL", "sliding_window": 16}}
STAGES = [
    {"until": 0.3, "sequence_length": 32, "window": 8},
    {"until": 0.6, "sequence_length": 32},
    {"until": 1.0, "sequence_length": 64},
]


def allow_a_cpu(patch: pytest.MonkeyPatch, pool: type[StandInPool]) -> None:
    """Let runs on a CPU use a stand-in."""
    patch.setattr(run_checks, "graph_problem", lambda config: "")
    patch.setattr(setup, "check_execution", lambda device, mode: None)
    patch.setattr(graph_choice, "can_capture", lambda *run: True)
    patch.setattr(graphed_pass, "CudaGraphPool", pool)
    pool.made = []


def settings(data: Path, cuda_graph: str, /, **changes: Any) -> RunConfig:
    parts: dict[str, Any] = {
        "precision": {"name": "bf16"},
        "batch": {"sequence_length": 32, "tokens": 256, "micro_tokens": 128},
        "schedule": {"length": f"{STEPS} steps"},
        "compute": {"compile": "fused", "cuda_graph": cuda_graph},
        "checkpoint": {"every": "6 steps"},
    }
    for part, values in changes.items():
        parts[part] = {**parts.get(part, {}), **values}
    return tiny_run.config(data, **parts)


def same(run: Path, other: Path) -> None:
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert curve(run) == curve(other)
    assert [row.get("val_bpb") for row in rows(run)] == [row.get("val_bpb") for row in rows(other)]
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (other / weights).read_bytes()


def captures(run: Path) -> int:
    return tiny_run.events(run).count("captured a pass of")


@pytest.mark.parametrize(
    ("pool", "changes", "captured"),
    [
        pytest.param(Replaying, {**DOCUMENTS, "evaluate": {"every": "5 steps"}}, 1, marks=pytest.mark.full),
        (Checking, {**FP8, **DOCUMENTS, "evaluate": {"every": "5 steps"}}, 1),
        pytest.param(Checking, {**WINDOWED, "schedule": {"stages": STAGES}}, 3, marks=pytest.mark.full),
        pytest.param(
            Replaying, {**FP8, **WINDOWED, "schedule": {"stages": STAGES}}, 3, marks=pytest.mark.full
        ),
        (
            Replaying,
            {
                "model": {"tie_word_embeddings": False},
                "schedule": {"tied_until": 0.5, "batch_growth": 2},
                "batch": {"micro_tokens": 64},
                "average": {"name": "ema"},
            },
            1,
        ),
    ],
    ids=["documents", "fp8", "stages", "fp8 stages", "tied, growing, averaged"],
)
def test_a_run_is_the_same(
    pool: type[StandInPool],
    changes: dict[str, Any],
    captured: int,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = tiny_run.train(tmp_path, settings(data, "off", **changes), "plain").run.path
    allow_a_cpu(monkeypatch, pool)
    run = tiny_run.train(tmp_path, settings(data, "on", **changes), "graphs").run.path
    same(run, plain)
    assert captures(run) == captured == len(pool.made) and captures(plain) == 0
    assert all(made.released for made in pool.made)  # before the final evaluation
    assert tiny_run.plan(run)["cuda_graph"] == "on" and "cuda_graph" not in tiny_run.plan(plain)


class Card(graphed_pass.PassMemory):
    """A GPU of 100 bytes, of which a row needs 10 in a pass, and reserved blocks their size."""

    room, rows = 100, 0
    blocks: ClassVar[weakref.WeakSet["Block"]] = weakref.WeakSet()

    def needed(self) -> int:
        return 10 * Card.rows

    def reserve(self, size: int) -> object:
        self.allocate(size)
        block = Block(size)
        self.blocks.add(block)
        return block

    @classmethod
    def allocate(cls, size: int) -> None:
        if size + sum(block.size for block in cls.blocks) > cls.room:
            raise torch.OutOfMemoryError("CUDA out of memory. More text.")


@dataclass(eq=False)
class Block:
    size: int


@pytest.mark.parametrize(
    ("cuda_graph", "room", "update", "evaluation", "rows"),
    [
        ("on", 100, 10, 10, 8),
        ("on", 80, 0, 0, 4),  # fragments: the graph needs a little more than the pass
        ("on", 100, 20, 0, 4),
        ("on", 70, 30, 0, 2),
        ("on", 100, 0, 20, 4),
        ("off", 80, 70, 70, 8),
    ],
)
def test_the_micro_batch_leaves_room_beside_what_a_captured_pass_keeps(
    cuda_graph: str,
    room: int,
    update: int,
    evaluation: int,
    rows: int,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without graphs, the activations of a pass are freed before the update and an evaluation, which need memory."""
    run_pass, step, token_losses = Stepper._pass, Optimizer.step, Transformer.token_losses

    def noted_pass(self: Stepper, batch: Batch, *arguments: Any) -> None:
        Card.rows = len(batch.tokens_BT)
        Card.allocate(10 * Card.rows)
        run_pass(self, batch, *arguments)

    def noted_step(self: Optimizer, *arguments: Any) -> None:
        Card.allocate(update)
        step(self, *arguments)

    def noted_losses(self: Transformer, *arguments: Any) -> Tensor:
        Card.allocate(evaluation)
        return token_losses(self, *arguments)

    monkeypatch.setattr(Stepper, "_pass", noted_pass)
    monkeypatch.setattr(Optimizer, "step", noted_step)
    monkeypatch.setattr(Transformer, "token_losses", noted_losses)
    monkeypatch.setattr(graphed_pass, "PassMemory", Card)
    monkeypatch.setattr(Card, "room", room)
    allow_a_cpu(monkeypatch, Replaying)
    changes = {"batch": {"micro_tokens": "auto"}, "schedule": {"length": "4 steps"}}
    run = tiny_run.train(tmp_path, settings(data, cuda_graph, **changes)).run.path
    fitted = tiny_run.plan(run)["fit"][0]
    assert (fitted["micro_rows"], fitted["accumulation"]) == (rows, 8 // rows)
    assert not Card.blocks and captures(run) == (cuda_graph == "on")


@pytest.mark.parametrize(
    ("launched", "chosen"), [pytest.param(0.05, False, marks=pytest.mark.full), (0.08, False), (0.095, True)]
)
def test_auto_captures_the_passes_of_steps_that_the_host_limits(
    launched: float, chosen: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step of 0.1 s, the host takes this many seconds. A resumed run does as the run before, whatever it finds."""
    plain = tiny_run.train(tmp_path, settings(data, "off"), "plain").run.path
    allow_a_cpu(monkeypatch, Replaying)
    timed = BatchSizeFinder.timed_dry_step

    def host_takes(seconds: float) -> None:
        def timed_dry_step(self: BatchSizeFinder, *step: Any) -> tuple[float, float]:
            timed(self, *step)
            return seconds, 0.1

        monkeypatch.setattr(BatchSizeFinder, "timed_dry_step", timed_dry_step)

    host_takes(launched)
    run = tiny_run.train(tmp_path, settings(data, "auto"), "auto").run.path
    same(run, plain)
    assert captures(run) == chosen and ("cuda_graph" in tiny_run.plan(run)) == chosen

    stopped = tiny_run.train(
        tmp_path, settings(data, "auto"), "stopped", watch=tiny_run.StopAfter(9)
    ).run.path
    host_takes(0.0 if chosen else 0.1)
    assert training_run.resume(stopped).status == "finished"
    same(stopped, plain)
    assert captures(stopped) == 2 * chosen and ("cuda_graph" in tiny_run.plan(stopped)) == chosen


def test_auto_captures_nothing_without_memory(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pass = Stepper._pass

    def noted_pass(self: Stepper, batch: Batch, *arguments: Any) -> None:
        Card.rows = len(batch.tokens_BT)
        run_pass(self, batch, *arguments)

    monkeypatch.setattr(Stepper, "_pass", noted_pass)
    monkeypatch.setattr(graphed_pass, "PassMemory", Card)
    monkeypatch.setattr(Card, "room", 39)  # a pass of four rows needs 40
    monkeypatch.setattr(graph_choice, "host_share", lambda finder, stage: 1.0)
    allow_a_cpu(monkeypatch, Replaying)
    run = tiny_run.train(tmp_path, settings(data, "auto")).run.path
    assert not captures(run) and "cuda_graph" not in tiny_run.plan(run)
    assert "passes are not captured, as there is too little memory" in tiny_run.events(run)


def test_auto_allows_what_a_graph_cannot_contain(data: Path, tmp_path: Path) -> None:
    """On a CPU too, where auto is off."""
    run = tiny_run.train(tmp_path, settings(data, "auto").model_copy(update={"dropout": 0.1})).run.path
    assert not captures(run) and "cuda_graph" not in tiny_run.plan(run)


@pytest.mark.parametrize("cuda_graph", ["off", "on"])
def test_weights_make_room_for_their_average_on_the_host(
    cuda_graph: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs, gradients and activations take the room that copies of the weights have without."""
    on_device: list[bool] = []
    original = WeightAverage.applied

    def applied(self: WeightAverage, blend: float, device: bool) -> AbstractContextManager[None]:
        on_device.append(device)
        return original(self, blend, device)

    monkeypatch.setattr(WeightAverage, "applied", applied)
    allow_a_cpu(monkeypatch, Replaying)
    changes = {"average": {"name": "ema"}, "evaluate": {"every": "8 steps"}}
    tiny_run.train(tmp_path, settings(data, cuda_graph, **changes))
    assert on_device and set(on_device) == {cuda_graph == "off"}


@pytest.mark.parametrize("asked", ["on", "auto"])
def test_a_measured_step_is_replayed(asked: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks.step` and the probe time steps this way. The lines about captures are among the notes."""
    losses = []
    monkeypatch.setattr(graph_choice, "host_share", lambda finder, stage: 1.0)
    for cuda_graph in ("off", asked):
        if cuda_graph != "off":
            allow_a_cpu(monkeypatch, Checking)
        prepared = prepare_step(settings(data, cuda_graph))
        assert prepared.config.compute.cuda_graph == ("off" if cuda_graph == "off" else "on")
        world, fit = prepared.stepper.world, prepared.fit
        batches = random_batches(prepared.rows, fit.micro_rows, prepared.rows_per_step, world)
        timer = StepTimer(prepared.stepper, batches, fit.accumulation, Sensors(world.device))
        timer.run(0.0, 5)
        optimizer_seconds(prepared.stepper, batches[0])
        losses.append(timer.losses)
    assert losses[0] == losses[1]
    assert [note.startswith("captured a pass of 128 tokens") for note in prepared.notes].count(True) == 1
    # Steps of two passes, and those of one pass in which the optimizer is timed
    assert fit.accumulation == 2 and Checking.made[0].replays == 3 * len(losses[1]) - 6 + 2 * OPTIMIZER_RUNS


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [pytest.param(DOCUMENTS, marks=pytest.mark.full), {**DOCUMENTS, **FP8}],
    ids=["bf16", "fp8"],
)
@pytest.mark.parametrize("stop_at", [pytest.param(n, marks=pytest.mark.full) for n in (1, 3)] + [9])
def test_a_resumed_run_is_the_same(
    changes: dict[str, Any], stop_at: int, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before the capture, just after it, and later. With delayed scaling, a resumed run captures earlier."""
    plain = tiny_run.train(tmp_path, settings(data, "off", **changes), "plain").run.path
    allow_a_cpu(monkeypatch, Checking)
    config = settings(data, "on", **changes)
    run = tiny_run.train(tmp_path, config, "graphs", watch=tiny_run.StopAfter(stop_at)).run.path
    assert not (run / "summary.json").exists()
    assert training_run.resume(run).status == "finished"
    same(run, plain)
    assert captures(run) >= 1


def with_graphs(root: Path, config: RunConfig, name: str) -> None:
    """Train in a process of its own, with a stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        allow_a_cpu(patch, Checking)
        tiny_run.train(root, config, name)
        passes = config.batch.tokens // (2 * 128)
        assert sum(made.replays for made in Checking.made) >= passes * (STEPS - 3)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"batch": {"tokens": 512}}, marks=pytest.mark.full),
        {"batch": {"tokens": 256}},
        pytest.param(
            {"batch": {"tokens": 512}, "optim": {"name": "adamw", "lr": 3e-3}, **FP8}, marks=pytest.mark.full
        ),
    ],
    ids=["muon", "one pass", "fp8"],
)
def test_replicas(changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    """Their gradients are summed after the last pass, so that it is a replay, too."""
    for name, cuda_graph in (("plain", "off"), ("graphs", "on")):
        config = settings(data, "off", **changes)
        compute = config.compute.model_copy(update={"cuda_graph": cuda_graph})
        config = config.model_copy(update={"compute": compute})
        function = with_graphs if cuda_graph == "on" else tiny_run.train
        child = tiny_run.call(function, tmp_path, config, name, log=tmp_path / f"{name}.log", ranks=2)
        assert child.wait() == 0, child.text()
    same(tmp_path / "graphs", tmp_path / "plain")
    assert captures(tmp_path / "graphs") == 1


def without_room_for_sums(root: Path, config: RunConfig) -> None:
    """Train. With passes of four rows, the second process has no memory for the buckets after them."""
    flat, run_pass = GradientBuckets._flat, Stepper._pass

    def noted_pass(self: Stepper, batch: Batch, *arguments: Any) -> None:
        Card.rows = len(batch.tokens_BT)
        run_pass(self, batch, *arguments)

    def scarce_flat(self: GradientBuckets, gradients: list[Tensor]) -> Any:
        if Card.rows == 4 and self.world.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. More text.")
        return flat(self, gradients)

    with pytest.MonkeyPatch.context() as patch:
        allow_a_cpu(patch, Replaying)
        patch.setattr(Stepper, "_pass", noted_pass)
        patch.setattr(GradientBuckets, "_flat", scarce_flat)
        tiny_run.train(root, config)


def test_replicas_agree_if_one_has_no_memory_for_the_sums(data: Path, tmp_path: Path) -> None:
    """A dry step fails on all of them, before one waits for buckets that another does not send."""
    config = settings(data, "off", schedule={"length": "4 steps"})
    config = config.model_copy(update={"compute": config.compute.model_copy(update={"cuda_graph": "on"})})
    child = tiny_run.call(without_room_for_sums, tmp_path, config, log=tmp_path / "log", ranks=2)
    assert child.wait(60) == 0, child.text()
    fitted = tiny_run.plan(tmp_path / "run")["fit"][0]
    assert (fitted["micro_rows"], fitted["accumulation"]) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute": {"device": "cpu"}}, "needs a GPU, and compute.device is cpu"),
        ({"compute": {"compile": "block"}}, "needs fused kernels, which compute.compile block does not use"),
        ({"align": {"name": "dpo"}, "data": {"document_mask": True}}, "is for pretraining and SFT"),
        ({"adapter": {"rank": 4}, "optim": {"name": "adamw"}}, "is not supported with adapters"),
        ({"model": {"num_experts": 16}}, "is not supported with experts"),
        ({"dropout": 0.1}, "would repeat the same dropout masks"),
        ({"precision": {"name": "nvfp4"}}, "would repeat the random numbers of nvfp4"),
        ({"precision": {"name": "fp8-tensorwise", "backend": "torchao"}}, "the layers of torchao"),
        ({"optim": {"weights": "bfloat16"}}, "would repeat the rounding of gradients of bfloat16 weights"),
        ({"optim": {"gradients": "host"}}, "use --optim.gradients device instead of host"),
        (
            {"compute": {"activation_checkpointing": "block", "activation_offloading": True}},
            "leave out compute.activation_offloading",
        ),
        ({"parallel": {"mode": "shard"}}, "is not supported with sharded weights"),
        ({"parallel": {"context": 2}}, "is not supported with shared rows"),
        ({"compute": {"attention": "flex"}}, "cannot contain flex"),
    ],
)
def test_what_a_graph_cannot_contain_is_refused(changes: dict[str, Any], message: str) -> None:
    given = {**changes, "compute": {"cuda_graph": "on", **changes.get("compute", {})}}
    with pytest.raises(UsageError) as error:
        merge.build([given])
    assert str(error.value).startswith("compute.cuda_graph: ") and message in str(error.value)
    assert "\n" not in str(error.value)
    merge.build([{"compute": {"cuda_graph": "on"}}])


def test_a_run_on_a_cpu_is_refused(data: Path, tmp_path: Path) -> None:
    """With compute.device auto, only the start of the run knows."""
    config = settings(data, "on", compute={"device": "auto"})
    if torch.cuda.is_available():
        pytest.skip("is for machines without a GPU")
    with pytest.raises(UsageError, match=r"compute\.cuda_graph: needs a GPU, and this run is on a CPU"):
        tiny_run.train(tmp_path, config)
    assert not (tmp_path / "run").exists()
