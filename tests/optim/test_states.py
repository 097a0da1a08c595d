"""Small and offloaded optimizer states in the complete optimizer: bytes,
exact resume, skips, convergence, refusals.
"""

import json
from typing import Any

import pytest
import torch
from torch import nn

from deskside.budget.states import MUON_STATE_BYTES
from deskside.budget.step_spec import StateFormat
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.optim import adamw
from deskside.optim.build import Optimizer, build
from deskside.optim.offload import OffloadJob, Streamer, host_zeros, pieces
from deskside.utils.errors import RunError, UsageError
from tests.optim.models import NO_SCALING, backward, check_skipped_step, lower_limits, make, weights

Config = AdamWConfig | MuonConfig


def config(name: str, states: str, offload: bool = False, **more: Any) -> Config:
    kind = AdamWConfig if name == "adamw" else MuonConfig
    return kind.model_validate({"name": name, "states": states, "offload": offload, **more})


CONFIGS = [
    config(name, states, offload)
    for name in ("adamw", "muon")
    for states in ("float32", "bfloat16", "8bit", "4bit")
    for offload in (False, True)
    if states != "float32" or offload
]
IDS = [f"{c.name} {c.states}{' offload' if c.offload else ''}" for c in CONFIGS]


@pytest.fixture(autouse=True)
def tiny_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch)


def train(model: nn.Module, optimizer: Optimizer, steps: range, skip: bool = True) -> None:
    for step in steps:
        backward(model, step)
        optimizer.set_progress(1 - step / 20, step / 20, step)
        optimizer.clip_and_norm(0.5)
        optimizer.step(torch.tensor(0.0) if skip else None)
        optimizer.zero_grad()


def state_bytes(optimizer: Optimizer) -> int:
    return sum(t.nbytes for t in optimizer.state_dict_flat()[0].values())


@pytest.mark.parametrize("given", CONFIGS, ids=IDS)
def test_saved_and_loaded_midway_gives_the_same_bits(given: Config) -> None:
    straight = make(moe=True)
    train(straight, build(straight, given, NO_SCALING), range(8))
    first = make(moe=True)
    optimizer = build(first, given, NO_SCALING)
    train(first, optimizer, range(3), skip=False)
    tensors, data = optimizer.state_dict_flat()
    saved = {name: t.clone() for name, t in tensors.items()}, json.loads(json.dumps(data))
    resumed = make(seed=9, moe=True)
    resumed.load_state_dict(first.state_dict())
    fresh = build(resumed, given, NO_SCALING)
    fresh.load_state_dict_flat(*saved)
    train(resumed, fresh, range(3, 8))
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name


@pytest.mark.parametrize("given", CONFIGS, ids=IDS)
def test_a_skipped_step_changes_nothing(given: Config) -> None:
    model = make(moe=True)
    optimizer = build(model, given, NO_SCALING)
    train(model, optimizer, range(3))
    check_skipped_step(model, optimizer)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("states", ["bfloat16", "8bit", "4bit"])
def test_offloading_changes_no_bit(name: str, states: str) -> None:
    results = []
    for place in (False, True):
        model = make(moe=True)
        train(model, build(model, config(name, states, place), NO_SCALING), range(5))
        results.append(weights(model))
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_offloaded_float32_is_torchs_kernel(name: str) -> None:
    results = []
    for place in (False, True):
        model = make(moe=True)
        train(model, build(model, config(name, "float32", place), NO_SCALING), range(5))
        results.append(weights(model))
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit", "4bit"])
def test_bytes_of_the_state(states: str) -> None:
    model = make()
    optimizer = build(model, config("adamw", states), NO_SCALING)
    optimizer.create_state()
    per = {"float32": 8, "bfloat16": 4, "8bit": 2, "4bit": 1}[states]
    block = {"8bit": 256, "4bit": 128}
    expected = 0
    for parameter in model.parameters():
        n = parameter.numel()
        expected += 4 + (
            8 * n if n < 64 else per * n + (8 * -(-n // block[states]) if states in block else 0)
        )
    assert state_bytes(optimizer) == expected


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit", "4bit"])
def test_bytes_of_muons_momentum(states: StateFormat) -> None:
    """As the planner counts them, but for the last block of each matrix, which is not full here."""
    model = make(moe=True)
    optimizer = build(model, config("muon", states), NO_SCALING)
    optimizer.create_state()
    assert optimizer.muon is not None
    held = {key: t for key, t in optimizer.muon.state().items() if not key.startswith("row_sizes/")}
    matrices = [info.parameter.numel() for info in optimizer.muon.parameters]
    blocks = sum(-(-n // 256) for n in matrices)
    scales = 4 * (blocks - sum(matrices) / 256) if states in ("8bit", "4bit") else 0
    assert sum(t.nbytes for t in held.values()) == MUON_STATE_BYTES[states] * sum(matrices) + scales


@pytest.mark.parametrize("given", [AdamWConfig(), *CONFIGS], ids=["adamw float32", *IDS])
def test_a_small_problem_is_learned_as_well_as_with_float32(given: Config) -> None:
    """Cross-entropy on one fixed batch after 60 steps."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 11, (4, 12))

    def final(chosen: Config) -> float:
        model = make()
        optimizer = build(model, chosen.model_copy(update={"lr": 0.02}), NO_SCALING)
        for step in range(60):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.set_progress(1.0, 0.0, step)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    plain = final(given.model_copy(update={"states": "float32", "offload": False}))
    assert plain < 1.5
    assert final(given) == pytest.approx(plain, rel=0.03)


def test_state_of_another_format_is_refused() -> None:
    one = build(make(), config("adamw", "8bit"), NO_SCALING)
    one.create_state()
    other = build(make(), config("adamw", "float32"), NO_SCALING)
    with pytest.raises(RunError, match="exp_avg"):
        other.load_state_dict_flat(*one.state_dict_flat())


def test_bfloat16_refuses_a_beta_that_it_would_round_away() -> None:
    with pytest.raises(ValueError, match=r"states: bfloat16 .*0\.999"):
        config("adamw", "bfloat16", betas=(0.9, 0.999))
    assert config("adamw", "8bit", betas=(0.9, 0.999)).betas[1] == 0.999


def test_pieces_cover_everything_once() -> None:
    for n in (1, 256, 257, 1000):
        covered = [i for part in pieces(n) for i in range(n)[part]]
        assert covered == list(range(n))
        assert all(part.start % 256 == 0 for part in pieces(n))


def test_a_streamer_on_the_cpu_works_in_place() -> None:
    device = torch.device("cpu")
    held = host_zeros((5,), torch.float32, device)
    Streamer(device).run([OffloadJob([held[1:3]], lambda parts: parts[0].add_(1))])
    assert held.tolist() == [0, 1, 1, 0, 0]


def test_sharded_weights_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter is treated as a DTensor here. Real ones need processes (test_sharded.py)."""
    monkeypatch.setattr("deskside.optim.build.is_sharded", lambda tensor: isinstance(tensor, nn.Parameter))
    for given, named in (
        (config("adamw", "8bit"), "optim.states: 8bit"),
        (config("muon", "float32", True), "optim.offload"),
    ):
        with pytest.raises(UsageError, match=f"{named} needs whole weights.*replicate"):
            build(make(), given, NO_SCALING)


@pytest.mark.parametrize("given", CONFIGS, ids=IDS)
def test_clipping_within_the_update_is_clipping_before_it(given: Config) -> None:
    """Results are bitwise equal, and a step without clipping does not use the factor of the step before."""
    made = []
    for inside in (True, False):
        model = make()
        optimizer = build(model, given, NO_SCALING)
        for step, limit in ((0, 0.1), (1, 0.0), (2, 0.05)):
            backward(model, step)
            optimizer.set_progress(1.0, 0.0, step)
            norm = optimizer.clip_and_norm(limit if inside else 0.0)
            assert norm > 0.1
            if limit and not inside:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= (limit / (norm + 1e-6)).clamp(max=1.0)
            optimizer.step(torch.tensor(0.0))
            optimizer.zero_grad()
        made.append({**weights(model), **{k: t.clone() for k, t in optimizer.state_dict_flat()[0].items()}})
    for name, value in made[0].items():
        assert torch.equal(value, made[1][name]), name


def test_small_weights_with_plain_states_are_updated_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate launches are meant for large weights. Small states leave no choice."""
    monkeypatch.setattr(adamw, "SMALL", 4)
    monkeypatch.setattr(adamw, "OWN_LAUNCH", 10)
    weights = {"w4": torch.zeros(4), "w9": torch.zeros(9), "w10": torch.zeros(10)}
    both: list[tuple[Any, set[str]]] = [("float32", {"w10"}), ("bfloat16", {"w4", "w9", "w10"})]
    for states, alone in both:
        made = adamw.AdamW([], (0.9, 0.99), 1e-8, states, fused=True)
        assert {name for name, weight in weights.items() if not made._uses_torch(weight)} == alone


@pytest.mark.parametrize("states", ["float32", "8bit", "4bit"])
def test_master_weights_are_those_of_a_model_in_float32(states: str) -> None:
    """bfloat16 weights are the nearest values of the masters, which equal the weights
    of a float32 run with the same gradients.
    """
    low, high = make(dtype=torch.bfloat16), make()
    with torch.no_grad():
        for p, q in zip(high.parameters(), low.parameters(), strict=True):
            p.copy_(q)
            if q.ndim < 2:
                q.data = q.data.float()
    given = config("adamw", states, True, weights="bfloat16", master_weights=True)
    optimizer, exact = build(low, given, NO_SCALING), build(high, config("adamw", states, True), NO_SCALING)
    for step in range(6):
        for number, (p, q) in enumerate(zip(high.parameters(), low.parameters(), strict=True)):
            generator = torch.Generator().manual_seed(100 * step + number)
            q.grad = torch.randn(q.shape, generator=generator).to(q.dtype)
            p.grad = q.grad.to(p.dtype)
        for one in (optimizer, exact):
            one.set_progress(1.0, 0.0, step)
            one.step(torch.tensor(float(step == 3)))
            one.zero_grad()
    state = optimizer.state_dict_flat()[0]
    for (name, p), q in zip(high.named_parameters(), low.parameters(), strict=True):
        if q.dtype == torch.bfloat16:
            assert torch.equal(state[f"master/{name}"], p), name
        assert torch.equal(q, p.to(q.dtype)), name


def test_master_weights_without_what_they_need_are_refused() -> None:
    for options in ({"weights": "float32", "offload": True}, {"weights": "bfloat16", "offload": False}):
        with pytest.raises(ValueError, match=r"--optim.weights bfloat16 and --optim.offload true"):
            AdamWConfig.model_validate({"name": "adamw", "master_weights": True, **options})
