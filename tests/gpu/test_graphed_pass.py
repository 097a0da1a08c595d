"""Passes replayed as CUDA graphs: the same bits as without, on every attention backend, and memory that comes back."""

import gc
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.config import merge
from deskside.data.reading.loader import Batch
from deskside.optim.build import build
from deskside.precision.convert import convert
from deskside.train import training_run
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop.graph_pool import CudaGraphPool, Graph
from deskside.train.loop.graphed_pass import TargetCount
from deskside.train.loop.guard import Guard
from deskside.train.loop.step import Stepper
from deskside.train.loop.train_context import TrainContext
from deskside.train.parallel import World
from deskside.utils.errors import RunError
from tests.gpu import card
from tests.gpu.card import ALONE, DEVICE, NEEDS_CARD
from tests.optim.models import NO_SCALING
from tests.precision.small import make
from tests.train import tiny_run
from tests.train.test_graphed_runs import captures
from tests.train.tiny_run import curve, rows

pytestmark = NEEDS_CARD

# One block of keys per row: with more, the backward of FlashAttention adds up in no fixed order.
LENGTH, ROWS, VOCABULARY, STEPS = 128, 8, 64, 9
SHAPE: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": LENGTH,
}


@pytest.mark.parametrize("count", [1, 3, 7, 1000, 2047, 65535, 262139, 16777213])
def test_a_count_on_the_device_divides_as_a_number(count: int) -> None:
    total = (
        torch.rand(64, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(count)) * 1e6
    ).unbind()
    on_device = TargetCount(torch.device(DEVICE))
    on_device.set(count)
    for x in total:
        one, other = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
        expected, found = one / count, on_device.divide(other)
        expected.backward()  # type: ignore[no-untyped-call]
        found.backward()  # type: ignore[no-untyped-call]
        assert torch.equal(found, expected) and torch.equal(other.grad, one.grad)  # type: ignore[arg-type]


# Single steps


def stepper(recipe: str, attention: str, shape: dict[str, Any] | None = None, **precision: Any) -> Stepper:
    config = merge.build(
        [{"model": {"intermediate_size": 128}, "optim": {"name": "adamw"}, "precision": precision}]
    )
    model = make(**SHAPE, **(shape or {})).to(DEVICE)
    applied = convert(model, recipe, config.precision, fused=True)
    context = TrainContext(
        config=config,
        world=World(torch.device(DEVICE, torch.cuda.current_device())),
        model=model,
        attention=AttentionBackends(attention),
        precision=applied,
    )
    return Stepper(context, build(model, config.optim, NO_SCALING))


def batches(step: int, passes: int, documents: bool) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:, LENGTH - step % 5 :] = -100
    num_valid, found = int((targets != -100).sum()), []
    for x, y in zip(tokens[:, :-1].chunk(passes), targets.chunk(passes), strict=True):
        positions, boundaries = torch.arange(LENGTH).expand(len(x), LENGTH).contiguous(), None
        if documents:
            cut = int(torch.randint(1, LENGTH, (1,), generator=generator))
            positions[:, cut:] -= cut
            starts = [row * LENGTH + offset for row in range(len(x)) for offset in (0, cut)]
            # Elsewhere in memory than at the start of an allocation, as the loader's boundaries are.
            boundaries = torch.tensor([0, *starts, x.numel(), x.numel()], dtype=torch.int32).to(DEVICE)[1:]
        found.append(
            Batch(
                x.contiguous().to(DEVICE),
                y.contiguous().to(DEVICE),
                boundaries,
                positions.to(DEVICE) if documents else None,
                num_valid // passes,
                num_valid,
            )
        )
    return found


def train(run: Stepper, passes: int, documents: bool, steps: int = STEPS, begin: int = 0) -> list[Any]:
    """Return the loss and norm of every step, and then all weights, states and scales."""
    seen: list[Any] = []
    for step in range(begin, begin + steps):
        run.set_progress(1 - step / 20, step / 20, step)
        loss, norm, skipped = run.run(batches(step, passes, documents), step + 1).read()
        assert math.isfinite(loss) and norm > 0
        seen.append((loss, norm, skipped))
    tensors = run.optimizer.state_dict_flat()[0] | run.precision.scales.state_dict()
    tensors |= {name: parameter.detach() for name, parameter in run.model.named_parameters()}
    return [*seen, {name: tensor.clone() for name, tensor in tensors.items()}]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert found[:-1] == expected[:-1]
    assert found[-1].keys() == expected[-1].keys()
    for name, tensor in expected[-1].items():
        assert torch.equal(found[-1][name], tensor), name


def is_same(found: list[Any], expected: list[Any]) -> bool:
    try:
        assert_same(found, expected)
    except AssertionError:
        return False
    return True


def compare(make_stepper: Callable[[], Stepper], passes: int, documents: bool) -> None:
    """Compare a stepper with and without graphs. Skips if two without graphs differ."""
    expected = train(make_stepper(), passes, documents)
    if not is_same(train(make_stepper(), passes, documents), expected):
        pytest.skip("this backward is not reproducible without a graph either")
    run, lines = make_stepper(), list[str]()
    run.use_graphs(lines.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that on the stream of a gradient
        found = train(run, passes, documents)
    assert len(lines) == 1 and lines[0].startswith("captured a pass of"), lines
    assert_same(found, expected)
    run.release_graphs()


BF16_BACKENDS = [
    *((name, False) for name in ("reference", "sdpa", "cudnn", "flash", "unplanned", "fa4")),
    *((name, True) for name in ("reference", "chunked", "varlen", "fa4")),
]


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize(("attention", "documents"), BF16_BACKENDS)
def test_every_attention_backend(attention: str, documents: bool, passes: int) -> None:
    if attention == "fa4":
        pytest.importorskip("flash_attn.cute")
    compare(lambda: stepper("bf16", attention), passes, documents)


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        ("fp32", {}),
        ("fp8-delayed", {}),
        ("fp8-delayed", {"head": "fp8", "name": "fp8-delayed"}),
        ("fp8-tensorwise", {}),
        ("fp8-rowwise", {}),
        ("fp8-tensorwise", {"weight_cache": False}),
        ("bf16", {"accumulate": "native"}),
    ],
)
def test_every_recipe(recipe: str, precision: dict[str, Any], documents: bool, passes: int) -> None:
    attention = "reference" if recipe == "fp32" else "varlen" if documents else "flash"
    compare(lambda: stepper(recipe, attention, **precision), passes, documents)


def test_gradients_that_are_added_inside_products_differ_by_their_kernels_only() -> None:
    """The first pass adds to zeros, too, where it would have written the product. Later ones are the same."""
    plain, run = (stepper("bf16", "flash", accumulate="fused") for _ in range(2))
    run.use_graphs(print)
    expected, found = train(plain, 4, False), train(run, 4, False)
    for (loss, norm, _), (other, other_norm, _) in zip(found[:-1], expected[:-1], strict=True):
        assert loss == pytest.approx(other, rel=1e-3) and norm == pytest.approx(other_norm, rel=2e-2)


def test_a_skipped_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def skip(guard: Guard, loss: Tensor, norm: Tensor, step: int) -> Tensor:
        return torch.full((), float(step in (5, 7)), device=loss.device)

    monkeypatch.setattr(Guard, "skip", skip)
    compare(lambda: stepper("fp8-delayed", "flash"), 2, False)


def test_a_loss_that_is_not_finite_is_seen() -> None:
    run = stepper("bf16", "flash")
    run.use_graphs(print)
    train(run, 2, False, steps=5)
    weight = run.model.layers[1].mlp.output.projection.weight  # type: ignore[union-attr]
    before = weight.detach().clone()  # type: ignore[operator, union-attr]
    with torch.no_grad():
        weight[0, 0] = math.nan  # type: ignore[index, operator]
    run.set_progress(0.5, 0.5, 5)
    loss, _, skipped = run.run(batches(5, 2, False), 6).read()
    assert not math.isfinite(loss) and skipped
    with torch.no_grad():
        weight.copy_(before)  # type: ignore[operator, union-attr]
    assert not any(skipped for _, _, skipped in train(run, 2, False, steps=2, begin=6)[:-1])


# Memory


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_memory_comes_back_when_a_graph_is_dropped() -> None:
    run, lines = stepper("fp8-tensorwise", "flash"), list[str]()
    run.use_graphs(lines.append)
    train(run, 2, False, steps=2)
    before = reserved()
    train(run, 2, False, steps=3, begin=2)
    assert len(lines) == 1 and reserved() > before
    run.release_graphs()
    assert reserved() <= before + 2**22
    train(run, 2, False, steps=4, begin=5)  # and it can be captured again
    assert len(lines) == 2


class Short(CudaGraphPool):
    """A pool that finds no more memory than is in use, but for some MiB."""

    left = 0

    def __init__(self, device: torch.device):
        super().__init__(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(
            (torch.cuda.memory_reserved(device) + self.left) / total, device
        )

    def release(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        super().release()


def without_memory(left: int) -> None:
    Short.left = left
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    expected = train(stepper("bf16", "flash", wide), 2, False)
    run, lines = stepper("bf16", "flash", wide), list[str]()
    run.use_graphs(lines.append, Short)
    train(run, 2, False, steps=2)
    # The workspaces of the stream of captures belong to the process.
    CudaGraphPool(torch.device(DEVICE, torch.cuda.current_device())).release()
    before = reserved()
    found = train(run, 2, False, steps=STEPS - 2, begin=2)
    assert len(lines) == 1 and "not enough memory to capture a pass" in lines[0], lines
    assert found[:-1] == expected[2:-1]
    assert_same([found[-1]], [expected[-1]])
    del found
    assert reserved() <= before + 2**22
    again, lines = stepper("bf16", "flash", wide), list[str]()
    again.use_graphs(lines.append)
    assert_same(train(again, 2, False), expected)
    assert len(lines) == 1 and lines[0].startswith("captured"), lines


@pytest.mark.parametrize("mib", [4, 128])
def test_too_little_memory_for_a_capture(mib: int, tmp_path: Path) -> None:
    """The run says so and goes on, with the same numbers and without the memory of the failed capture.

    128 MiB hold the converted weights, 100 MiB, but not the pass.
    """
    alone(tmp_path, without_memory, mib * 2**20)


def waiting() -> None:
    class Waiting(CudaGraphPool):
        def capture(self, work: Callable[[], None]) -> Graph:
            def waits() -> None:
                work()
                torch.cuda.synchronize()

            return super().capture(waits)

    run = stepper("bf16", "flash")
    run.use_graphs(print, Waiting)
    with pytest.raises(RunError, match=r"compute\.cuda_graph: a pass of this run cannot be captured"):
        train(run, 1, False)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_pass_that_waits_for_the_device_ends_the_run(tmp_path: Path) -> None:
    alone(tmp_path, waiting)


def alone(folder: Path, function: Callable[..., None], *arguments: int) -> None:
    """Call a function in a process of its own: a failed capture can leave torch's allocator unusable."""
    child = tiny_run.call(function, *arguments, log=folder / "log")
    assert child.wait(300) == 0, child.text()


@ALONE
def test_the_host_launches_a_replay_sooner() -> None:
    seconds = {}
    for graphs in (False, True):
        run = stepper("fp8-delayed", "flash", {"num_hidden_layers": 12})
        if graphs:
            run.use_graphs(print)
        train(run, 4, False, steps=6)
        micro_batches = batches(6, 4, False)
        best = math.inf
        for _ in range(10):
            run.begin_step(7, 4)
            torch.cuda.synchronize()
            began = time.perf_counter()
            run.forward_backward(micro_batches)
            best = min(best, time.perf_counter() - began)
        seconds[graphs] = best
    print(f"host: {1e3 * seconds[False] / 4:.2f} ms per pass, {1e3 * seconds[True] / 4:.2f} ms replayed")
    assert seconds[True] < 0.5 * seconds[False]


# Complete runs


def settings(data: Path, cuda_graph: str, /, **changes: Any) -> tiny_run.RunConfig:
    parts: dict[str, Any] = {
        "model": {"head_dim": 64, "hidden_size": 128, "max_position_embeddings": 128},
        "precision": {"name": "bf16"},
        "batch": {"sequence_length": 128, "tokens": 2048, "micro_tokens": 512},
        "schedule": {"length": "16 steps"},
        "compute": {"attention": "flash", "compile": "fused", "cuda_graph": cuda_graph},
        "checkpoint": {"every": "6 steps"},
        "evaluate": {"every": "5 steps"},
    }
    for part, values in changes.items():
        parts[part] = {**parts.get(part, {}), **values}
    return card.config(data, **parts)


DOCUMENTS = {"data": {"document_mask": True}, "compute": {"attention": "varlen"}}
FP8 = {"precision": {"name": "fp8-delayed", "keep_first": 0.0, "keep_last": 0.0}}
STAGES = [{"until": 0.5, "sequence_length": 64}, {"until": 1.0, "sequence_length": 128}]


def same(run: Path, plain: Path, config: tiny_run.RunConfig | None = None) -> None:
    """Compare two runs. config: of `plain`; skips if the runs differ and `plain` cannot be repeated either."""
    assert [row["step"] for row in rows(run)] == list(range(1, 17))
    weights = [(path / "model/model.safetensors").read_bytes() for path in (run, plain)]
    if curve(run) == curve(plain) and weights[0] == weights[1]:
        return
    if config is not None and curve(tiny_run.train(plain.parent, config, "again").run.path) != curve(plain):
        pytest.skip("this run is not reproducible without graphs either")
    assert curve(run) == curve(plain)
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("changes", "captured"),
    [
        ({}, 1),
        (DOCUMENTS, 1),
        ({**FP8, **DOCUMENTS}, 1),
        ({**FP8, "batch": {"micro_tokens": 2048}, "optim": {"name": "adamw", "lr": 3e-3}}, 1),
        ({"schedule": {"stages": STAGES}}, 2),
        ({"compute": {"attention": "flash", "activation_checkpointing": "block"}}, 1),
    ],
    ids=["bf16", "documents", "fp8 documents", "fp8 adamw", "stages", "recomputed"],
)
def test_a_run_is_the_same(changes: dict[str, Any], captured: int, data: Path, tmp_path: Path) -> None:
    plain = tiny_run.train(tmp_path, settings(data, "off", **changes), "plain").run.path
    run = tiny_run.train(tmp_path, settings(data, "on", **changes), "graphs").run.path
    assert captures(run) == captured
    same(run, plain, settings(data, "off", **changes))


def test_auto_captures_passes_that_the_host_limits(data: Path, tmp_path: Path) -> None:
    """A pass of 512 tokens of this model is nothing but launches."""
    plain = tiny_run.train(tmp_path, settings(data, "off"), "plain").run.path
    run = tiny_run.train(tmp_path, settings(data, "auto"), "graphs").run.path
    assert captures(run) == 1 and tiny_run.plan(run)["cuda_graph"] == "on"
    same(run, plain, settings(data, "off"))


@pytest.mark.parametrize("stop_at", [3, 9])
@pytest.mark.parametrize("changes", [DOCUMENTS, FP8], ids=["bf16", "fp8"])
def test_a_resumed_run_is_the_same(changes: dict[str, Any], stop_at: int, data: Path, tmp_path: Path) -> None:
    plain = tiny_run.train(tmp_path, settings(data, "off", **changes), "plain").run.path
    run = tiny_run.train(
        tmp_path, settings(data, "on", **changes), "graphs", watch=tiny_run.StopAfter(stop_at)
    ).run.path
    assert not (run / "summary.json").exists()
    assert training_run.resume(run).status == "finished"
    assert captures(run) >= 1
    same(run, plain, settings(data, "off", **changes))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_two_cards(name: str, data: Path, tmp_path: Path) -> None:
    """Gradients are summed after the last replay, and NCCL's thread watches while passes are captured."""
    optim = {"name": name} | ({"lr": 3e-3} if name == "adamw" else {})
    for cuda_graph in ("off", "on"):
        config = settings(data, cuda_graph, optim=optim)
        child = tiny_run.call(
            tiny_run.train, tmp_path, config, cuda_graph, log=tmp_path / f"{cuda_graph}.log", ranks=2
        )
        assert child.wait(300) == 0, child.text()
    assert captures(tmp_path / "on") == 1
    same(tmp_path / "on", tmp_path / "off")
