"""Traffic of replicas: the bytes of a ring, during the passes or outside them,
and the time that the passes do not hide.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deskside.budget import replicas
from deskside.budget.host_memory import checkpoint_bytes
from deskside.budget.operators.step import step_operators
from deskside.budget.replicas import CONTENTION, SLOWEST_CARD, bucket_bytes, contention, exchange
from deskside.budget.shape import block_matrix_params, num_params
from deskside.budget.sizes import Sizes
from deskside.budget.speed import Rates, item_seconds, replica_overhead, step_seconds
from deskside.budget.states import trained_weights
from deskside.budget.step_spec import AdapterSpec, StepSpec
from deskside.config.model import ModelConfig
from deskside.optim.groups import classify_parameters
from deskside.train.loop import gradient_buckets
from deskside.train.loop.gradient_buckets import GradientBuckets
from deskside.train.parallel import World
from tests.precision.small import make

SHAPE = ModelConfig()
TABLE, MATRICES, ALL = 32768 * 768, block_matrix_params(SHAPE), num_params(SHAPE)
RATES = Rates(matmul_flops=700e12, bandwidth=4.8e12, link_bandwidth=100e9)


def spec(gpus: int = 2, **changes: Any) -> StepSpec:
    work = {"sequence_length": 2048, "tokens": 2**17 * gpus, "micro_tokens": 2**15, "copies": "step"}
    return StepSpec(**{**work, "gpus": gpus, **changes})


@pytest.mark.parametrize("gpus", [2, 8])
def test_bytes_are_those_of_rings(gpus: int) -> None:
    share = (gpus - 1) / gpus
    adamw = exchange(Sizes(SHAPE, spec(gpus, optimizer="adamw")), ALL)
    assert adamw.in_backward + adamw.exposed == pytest.approx(2 * 4 * ALL * share)
    assert adamw.exposed == pytest.approx(2 * 4 * TABLE * share) and adamw.in_forward == 0
    half = exchange(Sizes(SHAPE, spec(gpus, optimizer="adamw", gradient_dtype="bfloat16")), ALL)
    assert (half.in_backward, half.exposed) == (adamw.in_backward / 2, adamw.exposed / 2)
    muon = exchange(Sizes(SHAPE, spec(gpus)), ALL)
    assert muon.in_forward == 4 * MATRICES and muon.exposed == adamw.exposed
    assert adamw.in_backward - muon.in_backward == pytest.approx((2 * share - 1) * 4 * MATRICES)
    assert exchange(Sizes(SHAPE, spec(gpus, weights="bfloat16")), ALL).in_forward == 2 * MATRICES


def test_what_cannot_overlap_is_exposed() -> None:
    fused, compiled = (exchange(Sizes(SHAPE, spec(copies=copies)), ALL) for copies in ("step", "pass"))
    assert (compiled.in_forward, compiled.exposed) == (0, fused.exposed + fused.in_forward)
    shared = exchange(Sizes(SHAPE, spec(context=2)), ALL)
    assert (shared.in_backward, shared.exposed) == (0, fused.exposed + fused.in_backward)
    replayed = exchange(Sizes(SHAPE, spec(graphs="on")), ALL)
    assert (replayed.in_backward, replayed.in_forward) == (0, 0)
    assert replayed.exposed == fused.exposed + fused.in_backward + fused.in_forward
    for alone in (spec(1), spec(sharded=True)):
        assert vars(exchange(Sizes(SHAPE, alone), ALL)) == vars(type(fused)())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_time_is_hidden_until_it_exceeds_the_pass(optimizer: Any) -> None:
    """With a fast link, only the embedding's sum costs time, and what passes lose beside the sums and to the slowest
    card. With a slow one, each second of transfer adds a second.
    """
    step = spec(optimizer=optimizer)
    sent = exchange(Sizes(SHAPE, step), ALL)
    seconds = item_seconds(SHAPE, step, RATES)
    passes = sum(seconds[item] for item in ("matmul", "attention", "traffic", "loss", "launches"))
    lost = contention(Sizes(SHAPE, step), sent) * passes / step.accumulation + SLOWEST_CARD * (
        passes + seconds["optimizer"]
    )
    assert step_seconds(SHAPE, step, RATES)["communication"] == pytest.approx(sent.exposed / 100e9 + lost)
    slow, slower = (replace(RATES, link_bandwidth=rate) for rate in (1e8, 0.5e8))
    first, second = (step_seconds(SHAPE, step, rates)["communication"] for rates in (slow, slower))
    total = sent.in_backward + sent.exposed + sent.in_forward
    assert second - first == pytest.approx(total / 1e8)
    one_pass = total / 1e8 + lost - first  # a pass hides transfers in its forward only if weights travel too
    assert one_pass == pytest.approx(passes / step.accumulation * (1 if optimizer == "muon" else 2 / 3))
    assert replica_overhead(SHAPE, spec(1), slow, seconds) == 0


def test_a_pass_loses_time_only_for_what_travels_beside_it() -> None:
    def lost(**changes: Any) -> float:
        sizes = Sizes(SHAPE, spec(**changes))
        return contention(sizes, exchange(sizes, trained_weights(sizes)))

    assert 0.7 * CONTENTION < lost(optimizer="adamw") < CONTENTION
    assert lost(optimizer="adamw", gradient_dtype="bfloat16") == pytest.approx(lost(optimizer="adamw") / 2)
    assert lost(optimizer="adamw", context=2) == 0  # nothing is summed beside its backward
    adapter = AdapterSpec(8, ("q_proj", "v_proj"), "bfloat16")
    assert 0 < lost(optimizer="adamw", adapter=adapter) < 0.05 * CONTENTION


def test_muon_is_shared() -> None:
    def work(gpus: int, **changes: Any) -> float:
        operators = step_operators(SHAPE, spec(gpus, **changes))
        return sum(operator.amount for operator in operators if operator.group == "optimizer_matmul")

    assert work(4) == pytest.approx(work(1) / 4)
    assert work(4, sharded=True, copies="pass") == work(1)
    # The process that writes checkpoints receives everyone's momentum.
    assert checkpoint_bytes(SHAPE, spec(4)) == checkpoint_bytes(SHAPE, spec(1))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"mlp_bias": True, "gated_mlp": False, "vocab_size": 90}]
)
def test_gradients_of_captured_passes_exist_beside_their_sums(
    changes: dict[str, Any], optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of the buckets that a process really has until its update ends."""
    monkeypatch.setattr(replicas, "BUCKET_WEIGHTS", 3000)
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 4 * 3000)
    for name in ("all_reduce", "reduce"):
        monkeypatch.setattr(dist, name, lambda *arguments, **options: None)
    model = make(num_hidden_layers=4, **changes)
    infos = classify_parameters(model)
    matrices = {info.name: 0 for info in infos if info.role == "matrix"}
    owners = matrices if optimizer == "muon" else {}
    buckets = GradientBuckets(infos, World(torch.device("cpu"), 0, 2), owners, torch.float32)
    kept = [torch.ones_like(info.parameter) for info in infos]
    for info, gradient in zip(infos, kept, strict=True):
        info.parameter.grad = gradient
    buckets.finish()
    second = [
        i.parameter for i, gradient in zip(infos, kept, strict=True) if i.parameter.grad is not gradient
    ]
    sizes = Sizes(model.config, spec(graphs="on", optimizer=optimizer))
    assert bucket_bytes(sizes, sizes.parameters) == 4 * sum(parameter.numel() for parameter in second) > 0
    assert bucket_bytes(Sizes(model.config, spec(1, graphs="on")), sizes.parameters) == 0
