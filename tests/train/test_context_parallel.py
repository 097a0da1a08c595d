"""Rows shared by processes (`parallel.context`), over gloo: outputs, gradients, runs
and refusals, compared with one process.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from deskside.kernels.attention import (
    AttentionContext,
    Requirements,
    attention_backward,
    attention_forward,
    gathered,
    prepare,
)
from deskside.kernels.attention.chunks import PLAIN_CHUNKS
from deskside.ops.composite import attention
from deskside.train import parallel
from deskside.utils.errors import RunError, UsageError
from tests.train import tiny_run
from tests.train.test_parallel import close

T, HEADS, KV_HEADS, HEAD_DIM = 48, 4, 2, 8
# of two rows; chunk boundaries lie inside documents and between them
BOUNDARIES = [0, 5, 13, 14, 40, 48, 48 + 25, 96]
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "documents": {"cu_seqlens": BOUNDARIES},
    "window": {"window": 7},
    "documents and window": {"cu_seqlens": BOUNDARIES, "window": 7},
}


def problem(name: str) -> tuple[list[Tensor], AttentionContext]:
    """Return q, k, v and the gradient of the output of two whole rows in float64, and their context."""
    generator = torch.Generator().manual_seed(3)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    shapes = [(2, T, h, HEAD_DIM) for h in heads]
    mask = dict(MASKS[name])
    if "cu_seqlens" in mask:
        mask["cu_seqlens"] = torch.tensor([*mask["cu_seqlens"], 96, 96], dtype=torch.int32)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return tensors, AttentionContext(**mask)


def need(tokens: int, context: AttentionContext) -> Requirements:
    documents = context.cu_seqlens is not None
    cpu = torch.device("cpu")
    masks = (context.window, documents, True, context.ranks is not None)
    return Requirements(2, tokens, HEADS, KV_HEADS, HEAD_DIM, torch.float64, cpu, *masks)


def with_gradients(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, context: AttentionContext) -> list[Tensor]:
    """Return the output and the gradients of q, k and v, under autograd."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v, context)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def attend_in_parts(folder: Path, size: int) -> None:
    """Compute, on each rank, outputs and gradients of its part of every mask, under autograd and explicitly."""
    world = parallel.init_distributed("cpu", "auto", context=size)
    ranks = world.context
    assert ranks is not None and (world.readers, world.reader) == (world.size // size, world.rank // size)
    results = {}
    for name in MASKS:
        whole, context = problem(name)
        q, k, v, grad = (ranks.local(x) for x in whole)
        context = replace(context, backend="gathered", ranks=ranks)
        context = prepare(context, need(q.shape[1], context))
        by_autograd = with_gradients(q, k, v, grad, context)
        out, state = attention_forward(q, k, v, context)
        results[name] = by_autograd, [out, *attention_backward(state, grad)]
    torch.save((ranks.rank, results), folder / f"{world.rank}.pt")
    parallel.destroy_distributed(world)


@pytest.mark.parametrize(("processes", "size"), [(2, 2), (3, 3), (4, 2)])
def test_attention_equals_that_of_whole_rows(processes: int, size: int, tmp_path: Path) -> None:
    child = tiny_run.call(attend_in_parts, tmp_path, size, log=tmp_path / "log", ranks=processes)
    assert child.wait() == 0, child.text()
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(processes)]
    assert [rank for rank, _ in parts] == [n % size for n in range(processes)]
    for name in MASKS:
        (q, k, v, grad), context = problem(name)
        expected = with_gradients(q, k, v, grad, prepare(context, need(T, context)))
        for rank, results in parts:
            part = parallel.ContextRanks(None, rank, size)
            for found in results[name]:
                for one, whole in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, part.local(whole), rtol=1e-12, atol=1e-12)


def test_parts_are_balanced_and_cover_a_row() -> None:
    for size in (2, 3, 5):
        chunks = [parallel.ContextRanks(None, rank, size).chunks(20 * size) for rank in range(size)]
        assert sorted(itertools.chain(*chunks)) == [(n, n + 10) for n in range(0, 20 * size, 10)]
        work = {sum((stop**2 - start**2) // 2 for start, stop in own) for own in chunks}
        assert len(work) == 1


LENGTH = {"length": "12 steps"}
ADAMW = {"name": "adamw"}
MIXTURE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.1,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "dense": {},
    "documents": {"data": {"document_mask": True}, "multi_token": {"weights": [0.5, 0.25]}},
    "experts, documents": {"model": MIXTURE, "data": {"document_mask": True}},
    "experts, fused, recomputed, offloaded": {
        "model": MIXTURE,
        "compute": {"compile": "fused", "activation_checkpointing": "block", "activation_offloading": True},
    },
    "learned positions, passes, stages": {
        "model": {"position_embedding": "learned", "sliding_window": 8, "window_pattern": "SL"},
        "batch": {"micro_tokens": 64},
        "schedule": {
            **LENGTH,
            "stages": [{"until": 0.5, "sequence_length": 16}, {"until": 1.0, "sequence_length": 32}],
        },
    },
}


@pytest.mark.parametrize(
    ("name", "processes"),
    [
        pytest.param("dense", 2, marks=pytest.mark.full),
        pytest.param("documents", 4, marks=pytest.mark.full),
        ("experts, documents", 2),
        pytest.param("experts, fused, recomputed, offloaded", 2, marks=pytest.mark.full),
        pytest.param("learned positions, passes, stages", 2, marks=pytest.mark.full),
    ],
)
def test_a_run_is_that_of_one_process(name: str, processes: int, data: Path, tmp_path: Path) -> None:
    """In float32, only the order of sums differs: losses agree within 1e-5, as for replicas.

    Two of four processes read the same rows. The balancing loss is computed per
    pass, so experts need the same passes.
    """
    changes = {"optim": ADAMW, "schedule": LENGTH, "evaluate": {"every": "6 steps"}, **RUNS[name]}
    alone = tiny_run.train(tmp_path, tiny_run.config(data, **changes), "alone").run.path
    config = tiny_run.config(data, **changes, parallel={"context": 2})
    child = tiny_run.call(tiny_run.train, tmp_path, config, "together", log=tmp_path / "log", ranks=processes)
    assert child.wait() == 0, child.text()
    close(tmp_path / "together", alone, 1e-5)
    recorded = [tiny_run.plan(tmp_path / run)["attention"] for run in ("alone", "together")]
    assert [facts["full"].get("shared_rows") for facts in recorded] == [None, "gathered"]
    assert "attention of shared rows: gathered" in child.text()
    values = [[row.get("val_bpb") for row in tiny_run.rows(tmp_path / run)] for run in ("alone", "together")]
    assert values[0][5] is not None and values[1] == [v and pytest.approx(v, abs=1e-5) for v in values[0]]


@pytest.mark.full
def test_a_run_goes_on_without_shared_rows_and_with_them(data: Path, tmp_path: Path) -> None:
    """A checkpoint has whole weights, and the configuration sets the number of processes that share rows."""
    changes = {"optim": ADAMW, "schedule": LENGTH, "checkpoint": {"every": "4 steps"}}
    alone = tiny_run.train(tmp_path, tiny_run.config(data, **changes), "alone").run.path
    config = tiny_run.config(data, **changes, parallel={"context": 2})
    child = tiny_run.call(tiny_run.train, tmp_path, config, "run", log=tmp_path / "log", ranks=2)
    tiny_run.kill_at_step(tmp_path / "run", 6, child.kill, child.alive)
    child.wait()
    with pytest.raises(UsageError, match=r"parallel\.context: .* --gpus 2"):
        tiny_run.resume(tmp_path / "run")
    again = tiny_run.call(tiny_run.resume, tmp_path / "run", log=tmp_path / "again", ranks=4)
    assert again.wait() == 0, again.text()
    close(tmp_path / "run", alone, 1e-5)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"batch": {"sequence_length": 30, "tokens": 240}}, "rows must be a multiple of 4 tokens, not 30"),
        ({"precision": {"name": "fp8"}}, "use --precision.name bf16"),
        ({"parallel": {"mode": "shard"}}, "use --parallel.mode replicate"),
        ({"compute": {"compile": "block"}}, "use --compute.compile auto"),
        ({"model": {"attn_logit_softcapping": 50.0}}, "not supported with model.attn_logit_softcapping"),
        ({"model": {"attention_sinks": True}}, "not supported with .* model.attention_sinks"),
        ({"adapter": {"rank": 4}, "optim": ADAMW}, "not supported with adapters"),
    ],
)
def test_what_cannot_share_rows_is_refused(changes: dict[str, Any], key: str) -> None:
    changes = {**changes, "parallel": {"context": 2, **changes.get("parallel", {})}}
    with pytest.raises(ValidationError, match=f"parallel.context: .*{key}"):
        tiny_run.config("data", **changes)


def test_processes_must_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match=r"parallel\.context: .* --gpus 2"):
        parallel.init_distributed("cpu", "auto", context=2)


def test_the_backend_needs_shared_rows() -> None:
    whole = AttentionContext(backend="gathered")
    shared = AttentionContext(backend="chunked", ranks=parallel.ContextRanks(None, 0, 2))
    for context, message in ((whole, "rows that processes share"), (shared, "needs whole rows")):
        with pytest.raises(UsageError, match=message):
            prepare(context, need(T, context))


@pytest.mark.parametrize(
    "mask", [{}, {"documents": True}, {"window": 40}], ids=["causal", "documents", "window"]
)
def test_wrong_chunks_are_found(mask: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch replaces FlashAttention, which needs a GPU: correct chunks pass, and wrong ones do not."""
    problem_of_row = replace(need(T, AttentionContext()), dtype=torch.float32, **mask)

    def one_key_late(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        return PLAIN_CHUNKS.forward(q, k.roll(1, dims=1), v.roll(1, dims=1), *rest)

    def refused(*given: Any) -> Any:
        raise RuntimeError("no kernel for this device\nand more")

    monkeypatch.setitem(gathered.KERNELS, "gathered-flash", PLAIN_CHUNKS)
    gathered.check_chunks(problem_of_row, 2, "gathered-flash")
    for name, remedy in (
        ("gathered-flash", r"; leave parallel\.context out"),
        ("gathered-cudnn", r"; use --compute\.attention flash, or leave parallel\.context out"),
    ):
        monkeypatch.setitem(gathered.KERNELS, name, PLAIN_CHUNKS._replace(forward=one_key_late))
        with pytest.raises(RunError, match=f"wrongly here .*{remedy}"):
            gathered.check_chunks(problem_of_row, 2, name)
        monkeypatch.setitem(gathered.KERNELS, name, PLAIN_CHUNKS._replace(forward=refused))
        with pytest.raises(
            RunError, match=f"cannot compute chunks of a row here: no kernel for this device{remedy}"
        ):
            gathered.check_chunks(problem_of_row, 2, name)
