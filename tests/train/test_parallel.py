"""Two processes over gloo: the same sums and losses as one process, and FSDP2 with its sharded checkpoints."""

import json
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from deskside.cli.main import main
from deskside.config.run import RunConfig
from deskside.train import parallel
from deskside.train.loop import gradient_buckets
from deskside.train.state.checkpointer import Checkpointer
from deskside.utils.errors import RunError, UsageError
from tests.train import tiny_run
from tests.train.tiny_run import curve, kill_at_step, rows

LENGTH = {"length": "30 steps"}
# Orthogonalization amplifies the last bits of small singular values, so Muon diverges sooner.
WITHIN = {"adamw": 1e-5, "muon": 1e-3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def agreements(folder: Path) -> None:
    world = parallel.init_distributed("cpu", "auto")
    result = {
        "agreed": world.broadcast([0.1 + world.rank, 2.0]),
        "smallest": world.all_reduce_min(5 - world.rank),
        "first": world.is_rank_zero,
        "summed": world.all_reduce_sum(torch.tensor([1.0 + world.rank])),
    }
    torch.save(result, folder / f"{world.rank}.pt")
    parallel.destroy_distributed(world)


def test_agreements_of_two_ranks(tmp_path: Path) -> None:
    child = tiny_run.call(agreements, tmp_path, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert one["agreed"] == two["agreed"] == [0.1, 2.0]
    assert one["smallest"] == two["smallest"] == 4
    assert (one["first"], two["first"]) == (True, False)
    assert one["summed"].item() == two["summed"].item() == 3.0


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = parallel.init_distributed("cpu", "auto")
    assert (world.size, world.is_rank_zero, world.sharded) == (1, True, False)
    assert world.broadcast([1.5]) == [1.5] and world.all_reduce_min(3) == 3
    for mode in ("shard", "replicate"):
        with pytest.raises(
            UsageError, match=rf"parallel\.mode: {mode} needs more than one process: .*--gpus"
        ):
            parallel.init_distributed("cpu", mode)
    with pytest.raises(UsageError, match=r"compute\.gpu_budget: this run has no GPU"):
        parallel.init_distributed("cpu", "auto", gpu_budget=4.0)


def close(run: Path, other: Path, within: float) -> None:
    mine, theirs = curve(run), curve(other)
    assert len(mine) == len(theirs)
    for one, two in zip(mine, theirs, strict=True):
        assert one[:3] == two[:3] and one[3] == pytest.approx(two[3], abs=within)
    assert mine[0][3] == pytest.approx(theirs[0][3], abs=1e-6)


def in_ranks(folder: Path, config: RunConfig, name: str, ranks: int = 2) -> tiny_run.Child:
    return tiny_run.call(tiny_run.train, folder, config, name, log=folder / f"{name}.log", ranks=ranks)


@pytest.mark.parametrize(
    "optim, ranks",
    [
        ({"name": "muon", "grad_clip": 0.5, "ema_nesterov": 0.6}, 2),
        pytest.param({"name": "muon"}, 3, marks=pytest.mark.full),
        pytest.param({"name": "adamw", "grad_clip": 0.5}, 2, marks=pytest.mark.full),
    ],
    ids=["muon on 2", "muon on 3", "adamw on 2"],
)
def test_processes_train_like_one(optim: dict[str, Any], ranks: int, data: Path, tmp_path: Path) -> None:
    """The global batch is the same, split among them, in one pass or in two."""
    batch = {"sequence_length": 32, "tokens": ranks * 128}
    settings = {"optim": optim, "batch": batch, "schedule": LENGTH, "dropout": 0.1}
    config = tiny_run.config(data, evaluate={"every": "10 steps"}, **settings)
    alone = tiny_run.train(tmp_path, config, "alone").run.path
    child = in_ranks(tmp_path, config, "together", ranks)
    assert child.wait() == 0, child.text()
    close(tmp_path / "together", alone, WITHIN[optim["name"]])
    for mine, theirs in zip(rows(tmp_path / "together"), rows(alone), strict=True):
        assert ("val_bpb" in mine) == ("val_bpb" in theirs) == (theirs["step"] in (10, 20))
        if "val_bpb" in theirs:
            assert mine["val_bpb"] == pytest.approx(theirs["val_bpb"], abs=WITHIN[optim["name"]])
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("alone", "together")]
    assert summaries[0]["val_bpb"] == pytest.approx(summaries[1]["val_bpb"], abs=WITHIN[optim["name"]])
    assert summaries[0]["val_bytes"] == summaries[1]["val_bytes"]


def _writes_at_once(config: RunConfig) -> RunConfig:
    """Disable background writes. On a busy machine, a kill could come before one of them is published."""
    return config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"background": False})}
    )


@pytest.mark.parametrize(
    "optim, before, after",
    [
        pytest.param("adamw", 2, 1, marks=pytest.mark.full),
        pytest.param("adamw", 1, 2, marks=pytest.mark.full),
        pytest.param("muon", 1, 3, marks=pytest.mark.full),
        *(pytest.param("muon", before, after, marks=pytest.mark.full) for before, after in ((2, 1), (3, 2))),
    ],
)
def test_a_run_goes_on_with_another_number_of_processes(
    optim: str, before: int, after: int, data: Path, tmp_path: Path
) -> None:
    """The rows and their order are the same, and only the order of sums differs. With Muon, matrices change owners."""
    batch = {"sequence_length": 32, "tokens": 384}
    config = tiny_run.config(data, optim={"name": optim}, batch=batch, schedule=LENGTH)
    alone = tiny_run.train(tmp_path, config, "alone").run.path
    run = tmp_path / "run"
    child = in_ranks(tmp_path, _writes_at_once(config), "run", before)
    kill_at_step(run, 14, child.kill, child.alive)
    child.wait()
    again = tiny_run.call(tiny_run.resume, run, log=tmp_path / "log", ranks=after)
    assert again.wait() == 0, again.text()
    assert "resumed at step 10" in tiny_run.events(run)
    close(run, alone, WITHIN[optim])


def in_small_buckets(together: bool, function: Any, *arguments: Any) -> None:
    """Call a function with buckets of 12 kB, of which a tiny model has many. together: several are sent together."""
    sent: list[Any] = []
    original = dist._coalescing_manager

    def noted(*given: Any, **options: Any) -> Any:
        sent.append(given)
        return original(*given, **options)

    gradient_buckets.BUCKET_BYTES = 4 * 3000
    dist._coalescing_manager = noted
    function(*arguments)
    assert bool(sent) == together


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"parallel": {"gradient_dtype": "bfloat16"}},
        pytest.param({"parallel": {"bucket_mib": 0.05}, "optim": {"name": "adamw"}}, marks=pytest.mark.full),
        pytest.param(
            {"optim": {"weights": "bfloat16", "offload": True}, "precision": {"name": "bf16"}},
            marks=pytest.mark.full,
        ),
        pytest.param({"model": EXPERTS, "batch": {"micro_tokens": 64}}, marks=pytest.mark.full),
    ],
    ids=[
        "float32",
        "gradients sent in bfloat16",
        "several gradients together",
        "bfloat16 weights",
        "experts",
    ],
)
def test_replicas_resume_exactly(changes: dict[str, Any], data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, **{"schedule": {"length": "16 steps"}, **changes})
    together = "bucket_mib" in changes.get("parallel", {})

    def start(name: str, *call: Any) -> tiny_run.Child:
        return tiny_run.call(in_small_buckets, together, *call, log=tmp_path / f"{name}.log", ranks=2)

    straight = start("straight", tiny_run.train, tmp_path, config, "straight")
    assert straight.wait() == 0, straight.text()
    run = tmp_path / "killed"
    child = start("killed", tiny_run.train, tmp_path, _writes_at_once(config), "killed")
    kill_at_step(run, 12, child.kill, child.alive)
    assert child.wait() == -signal.SIGKILL
    again = start("again", tiny_run.resume, run)
    assert again.wait() == 0, again.text()
    assert "resumed at step 10" in tiny_run.events(run)
    assert curve(run) == curve(tmp_path / "straight")
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (tmp_path / "straight" / weights).read_bytes()


def test_a_batch_that_two_cannot_share_is_one_line(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, batch={"tokens": 3 * 32})
    child = in_ranks(tmp_path, config, "odd")
    assert child.wait() == 1  # a function's own exit code; the command line makes it 2
    assert (
        "3 rows, which 2 processes cannot share evenly; use a multiple of 64, or another number"
        in child.text()
    )


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "muon", "ema_nesterov": 0.6},
        pytest.param({"name": "adamw", "grad_clip": 0.5}, marks=pytest.mark.full),
    ],
    ids=["muon", "adamw"],
)
def test_shards_train_like_one_process_and_resume_exactly(
    optim: dict[str, Any], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"optim": optim, "schedule": {"length": "20 steps"}}
    changes["evaluate"] = {"every": "15 steps"}
    changes["dropout"] = 0.1
    alone = tiny_run.train(tmp_path, tiny_run.config(data, **changes), "alone").run.path
    config = tiny_run.config(data, parallel={"mode": "shard"}, **changes)
    straight = in_ranks(tmp_path, config, "straight")
    assert straight.wait() == 0, straight.text()
    close(tmp_path / "straight", alone, WITHIN[optim["name"]])

    run = tmp_path / "killed"
    child = in_ranks(tmp_path, config, "killed")
    kill_at_step(run, 14, child.kill, child.alive)
    assert child.wait() == -signal.SIGKILL
    assert (run / "checkpoints" / "step-000000010" / "sharded").is_dir()
    assert main(["train", "--resume", str(run)]) == 2 and "--gpus" in capsys.readouterr().err
    again = tiny_run.call(tiny_run.resume, run, log=tmp_path / "log", ranks=2)
    assert again.wait() == 0, again.text()
    assert curve(run) == curve(tmp_path / "straight")
    weights = "model/model.safetensors"
    assert (run / weights).read_bytes() == (tmp_path / "straight" / weights).read_bytes()

    # Everything that reads a run can read this one: the export, and the sharded checkpoint itself.
    from transformers import AutoModelForCausalLM

    from deskside.weights.load import load_model

    theirs = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32)
    ours = load_model(run).model
    tokens_BT = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens_BT), theirs(tokens_BT).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_a_sharded_run_of_four_processes_resumes_on_two(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, optim={"name": "adamw"}, schedule=LENGTH, parallel={"mode": "shard"})
    straight = in_ranks(tmp_path, config, "straight", 4)
    assert straight.wait() == 0, straight.text()
    run = tmp_path / "killed"
    child = in_ranks(tmp_path, config, "killed", 4)
    kill_at_step(run, 14, child.kill, child.alive)
    assert child.wait() == -signal.SIGKILL
    again = tiny_run.call(tiny_run.resume, run, log=tmp_path / "log", ranks=2)
    assert again.wait() == 0, again.text()
    assert "resumed at step 10" in tiny_run.events(run)
    assert curve(run)[:10] == curve(tmp_path / "straight")[:10]
    close(run, tmp_path / "straight", WITHIN["adamw"])


@pytest.mark.full
def test_a_sharded_run_killed_before_its_first_step(data: Path, tmp_path: Path) -> None:
    """Its checkpoint of step 0 can be loaded, though no step has created an optimizer state yet."""
    config = tiny_run.config(
        data, parallel={"mode": "shard"}, schedule={"length": "12 steps"}, checkpoint={"every": "1000 steps"}
    )
    straight = in_ranks(tmp_path, config, "straight")
    assert straight.wait() == 0, straight.text()
    run = tmp_path / "killed"
    child = in_ranks(tmp_path, config, "killed")
    kill_at_step(run, 3, child.kill, child.alive)
    child.wait()
    again = tiny_run.call(tiny_run.resume, run, log=tmp_path / "log", ranks=2)
    assert again.wait() == 0, again.text()
    assert "resumed at step 0" in tiny_run.events(run)
    assert curve(run) == curve(tmp_path / "straight")


@pytest.mark.full
def test_a_sharded_run_says_how_it_must_be_resumed(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, parallel={"mode": "shard"}, schedule=LENGTH)
    run = tmp_path / "run"
    child = in_ranks(tmp_path, config, "run")
    kill_at_step(run, 5, child.kill, child.alive)
    child.wait()
    alone = tiny_run.command(["train", "--resume", str(run)], tmp_path / "log")
    assert alone.wait() == 2 and "--gpus" in alone.text() and alone.text().count("\n") == 1


def fail_on_the_first(root: Path, config: RunConfig) -> None:
    """Run with a disk that is full at step 10, but only for rank 0."""
    from deskside.weights import checkpoint

    original = checkpoint.save

    def save(folder: Path, step: int, *args: Any) -> Any:
        if step == 10:
            raise RunError("the disk is full")
        return original(folder, step, *args)

    checkpoint.save = save
    tiny_run.train(root, config)


def test_when_one_process_fails_the_other_ends_too(data: Path, tmp_path: Path) -> None:
    config = tiny_run.config(data, schedule=LENGTH)
    child = tiny_run.call(fail_on_the_first, tmp_path, config, log=tmp_path / "log", ranks=2)
    assert child.wait(60) != 0
    assert all(p.exitcode not in (0, None) for p in child.processes)
    assert "the disk is full" in child.text()


def write_slowly(root: Path, config: RunConfig) -> None:
    """Train where the checkpoint of step 1 is written for longer than torch's process group waits."""
    from deskside.weights import checkpoint

    write, save = checkpoint.save, Checkpointer.save

    def slow(folder: Path, step: int, *arguments: Any) -> Any:
        time.sleep(4.0 if step == 1 else 0.0)
        return write(folder, step, *arguments)

    def impatient(*arguments: Any) -> None:
        distributed_c10d._set_pg_timeout(timedelta(seconds=2))  # from now on; of torch: 30 minutes
        save(*arguments)

    checkpoint.save = slow
    Checkpointer.save = impatient  # type: ignore[method-assign]
    tiny_run.train(root, config)


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.full), True])
def test_other_processes_wait_for_a_checkpoint_however_long_it_takes(
    background: bool, data: Path, tmp_path: Path
) -> None:
    checkpoint = {"every": "1 steps", "background": background}
    config = tiny_run.config(data, schedule={"length": "3 steps"}, checkpoint=checkpoint)
    child = tiny_run.call(write_slowly, tmp_path, config, log=tmp_path / "log", ranks=2)
    assert child.wait(60) == 0, child.text()


class LateWork:
    """A broadcast that begins only when a caller waits for it."""

    def __init__(self, begin: Any):
        self.wait = begin


def train_late(root: Path, config: RunConfig, name: str, reads_weights: bool) -> None:
    """Train with new weights that arrive as late as possible, so that a reader that does not wait reads old ones."""
    from deskside.train.loop.step import Stepper
    from deskside.train.next_token import NextToken

    original, run = dist.broadcast, Stepper.run
    late: list[int] = []

    def broadcast(tensor: torch.Tensor, src: int, async_op: bool = False) -> Any:
        return LateWork(lambda: original(tensor, src=src)) if async_op else original(tensor, src=src)

    def counted(stepper: Stepper, *given: Any, **options: Any) -> Any:
        metrics = run(stepper, *given, **options)
        assert stepper.optimizer.muon is not None
        late.append(len(stepper.optimizer.muon.new_weights.pending))
        return metrics

    dist.broadcast, Stepper.run = broadcast, counted  # type: ignore[assignment, method-assign]
    NextToken.reads_weights = reads_weights
    tiny_run.train(root, config, name)
    assert any(late) == (not reads_weights)


@pytest.mark.full
@pytest.mark.parametrize("compile", ["off", "fused"])
def test_whoever_reads_new_weights_waits_for_them(compile: str, data: Path, tmp_path: Path) -> None:
    """Passes, evaluations, checkpoints and the export equal those of a run whose weights arrive at once."""
    changes: dict[str, Any] = {
        "compute": {"compile": compile},
        "schedule": {"length": "9 steps"},
        "evaluate": {"every": "2 steps"},
        "checkpoint": {"every": "3 steps"},
        "batch": {"micro_tokens": 64},
    }
    config = tiny_run.config(data, **changes)
    for name, reads_weights in (("late", False), ("at once", True)):
        child = tiny_run.call(
            train_late, tmp_path, config, name, reads_weights, log=tmp_path / f"{name}.log", ranks=2
        )
        assert child.wait() == 0, child.text()
    late, at_once = tmp_path / "late", tmp_path / "at once"
    assert curve(late) == curve(at_once)
    assert [row.get("val_bpb") for row in rows(late)] == [row.get("val_bpb") for row in rows(at_once)]
    files = [path.relative_to(late) for path in late.rglob("*.safetensors")]
    assert len(files) > 4
    for path in files:
        assert (late / path).read_bytes() == (at_once / path).read_bytes(), path
