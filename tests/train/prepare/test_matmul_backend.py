"""compute.matmul: what is refused, what a resumed run keeps."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deskside.config import merge
from deskside.kernels.choose_matmul import MatmulChoice
from deskside.kernels.quack_matmul import MatmulTile
from deskside.precision.convert import QuantizedModel, convert
from deskside.train.parallel import World
from deskside.train.prepare import matmul_backend
from deskside.train.prepare.matmul_backend import check_matmul, choose_and_use_matmul
from deskside.utils.errors import UsageError
from deskside.utils.trials import TrialCache
from tests.precision.small import make

TILE = [128, 128, True, 2]
FACTS = {
    "plain": [
        {"kind": "output", "outputs": 256, "inputs": 128, "tile": TILE, "microseconds": {"cuBLAS": 2.0}},
        {"kind": "input_gradient", "outputs": 256, "inputs": 128, "tile": None, "microseconds": {}},
    ],
    "gated": {"tiles": [TILE, TILE], "microseconds": [{}, {}]},
}
CPU = World(torch.device("cpu"))


def config(matmul: str) -> Any:
    return merge.build([{"compute": {"matmul": matmul}}])


def precision(recipe: str = "bf16") -> QuantizedModel:
    return convert(make(), recipe, fused=True)


def on_gpu(
    monkeypatch: pytest.MonkeyPatch, facts: Any = FACTS, sharded: bool = False, others: int = 1
) -> World:
    """Return a process with a GPU, for which the trial of kernels has this result. others: can use them (1) or not."""
    monkeypatch.setattr(matmul_backend, "tiles_of", lambda device: (MatmulTile(*TILE),))
    monkeypatch.setattr(matmul_backend, "load", lambda: None)
    monkeypatch.setattr(matmul_backend, "choose_matmul", lambda *arguments: facts)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    world = SimpleNamespace(
        device=torch.device("cuda"),
        sharded=sharded,
        readers=1,
        size=1,
        broadcast_result=lambda f: f(),
        all_reduce_min=lambda own: min(own, others),
    )
    return cast(World, world)


def choose(config: Any, applied: QuantizedModel, world: World, recorded: Any = None) -> dict[str, Any]:
    return choose_and_use_matmul(config, applied, world, 1e9, TrialCache(None), recorded)


def gate_tiles(applied: QuantizedModel) -> list[Any]:
    return [plan.gate_tiles for _, _, plan in applied._sublayers if hasattr(plan, "gate_tiles")]


def test_a_choice_is_read_from_its_facts() -> None:
    choice = MatmulChoice.of(FACTS)
    assert list(choice.plain) == [("output", 256, 128)] and choice.gated is not None
    assert MatmulChoice.of({"plain": [], "gated": None}) == MatmulChoice({}, None)


def test_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = precision()
    assert choose(config("auto"), applied, on_gpu(monkeypatch)) == FACTS
    assert all(tiles is not None for tiles in gate_tiles(applied))


def test_it_is_not_used_if_another_process_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    applied = precision()
    assert choose(config("auto"), applied, on_gpu(monkeypatch, others=0)) == {}
    assert all(tiles is None for tiles in gate_tiles(applied))


def test_a_package_that_cannot_be_used_leaves_the_products_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("quack-kernels cannot be used: no epilogues")

    world = on_gpu(monkeypatch)
    monkeypatch.setattr(matmul_backend, "choose_matmul", fail)
    assert choose(config("auto"), precision(), world) == {}
    assert "no epilogues" in "".join(capsys.readouterr())
    monkeypatch.setattr(matmul_backend, "load", fail)
    with pytest.raises(UsageError, match="no epilogues"):
        check_matmul(config("quack"), precision(), world)


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, 65_536),
        ({"micro_tokens": 8192}, 8192),
        ({"tokens": 16_384}, 16_384),
        ({"tokens": 262_144}, 65_536),
    ],
)
def test_the_trial_has_the_tokens_of_a_pass(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], tokens: int
) -> None:
    world, shapes = on_gpu(monkeypatch), list[Any]()
    monkeypatch.setattr(matmul_backend, "choose_matmul", lambda shape, *others: shapes.append(shape))
    asked = merge.build([{"compute": {"matmul": "auto"}, "batch": settings}])
    choose(asked, precision(), world)
    assert [shape.tokens for shape in shapes] == [tokens]


def test_a_resumed_run_needs_the_tiles_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    world = on_gpu(monkeypatch)
    monkeypatch.setattr(matmul_backend, "tiles_of", lambda device: (MatmulTile(256, 256, False, 1),))
    with pytest.raises(UsageError, match="quack-kernels"):
        choose(config("auto"), precision(), world, {"matmul": FACTS})


@pytest.mark.parametrize("facts", [FACTS, None])
def test_a_resumed_run_keeps_its_choice(monkeypatch: pytest.MonkeyPatch, facts: Any) -> None:
    applied = precision()
    recorded = {"precision": {}} | ({} if facts is None else {"matmul": facts})
    other = None if facts is not None else FACTS  # what a new trial would find
    assert choose(config("auto"), applied, on_gpu(monkeypatch, other), recorded) == (facts or {})
    assert all((tiles is None) == (facts is None) for tiles in gate_tiles(applied))


def test_a_resumed_run_needs_the_package() -> None:
    with pytest.raises(UsageError, match="quack-kernels"):
        choose(config("auto"), precision(), CPU, {"matmul": FACTS})


@pytest.mark.parametrize(
    ("matmul", "recipe", "sharded"),
    [("torch", "bf16", False), ("auto", "fp8-delayed", False), ("auto", "bf16", True)],
)
def test_products_stay_torchs(
    monkeypatch: pytest.MonkeyPatch, matmul: str, recipe: str, sharded: bool
) -> None:
    assert choose(config(matmul), precision(recipe), on_gpu(monkeypatch, sharded=sharded)) == {}


def test_products_stay_torchs_on_a_cpu() -> None:
    assert choose(config("auto"), precision(), CPU) == {}


@pytest.mark.parametrize(("recipe", "sharded"), [("fp8-delayed", False), ("bf16", True)])
def test_quack_is_refused_without_products(
    monkeypatch: pytest.MonkeyPatch, recipe: str, sharded: bool
) -> None:
    with pytest.raises(UsageError, match=r"compute\.matmul: quack"):
        check_matmul(config("quack"), precision(recipe), on_gpu(monkeypatch, sharded=sharded))
    check_matmul(config("auto"), precision(recipe), on_gpu(monkeypatch, sharded=sharded))


def test_quack_is_refused_without_a_gpu() -> None:
    with pytest.raises(UsageError, match="compute capability"):
        check_matmul(config("quack"), precision(), CPU)
