"""torchao on a CPU compared with our emulated FP8 and ml_dtypes, and transformer-engine's adapter with its sources."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deskside.config.recipes import RECIPES, recipe_named
from deskside.config.sections import BACKEND_RECIPES, PrecisionConfig
from deskside.kernels.attention import AttentionContext
from deskside.ops.linear import Embedding, Linear
from deskside.precision import QuantizedModel, backends, check, convert, restore
from deskside.precision.backends import torchao, transformer_engine
from deskside.train.parallel import World
from deskside.train.prepare import setup
from deskside.utils.errors import UsageError
from tests.precision import te_signatures
from tests.precision.small import quantized_layers
from tests.train import tiny_run
from tests.train.conftest import data as data
from tests.train.conftest import one_thread as one_thread

ROWS, IN, OUT = 256, 96, 128


def small(bias: bool = False) -> nn.Sequential:
    """Return a stream of activations and a projection, as in the self-check."""
    torch.manual_seed(0)
    model = nn.Sequential(Embedding(ROWS, IN), Linear(IN, [("a", 32), ("b", OUT - 32)], bias=bias))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


def incoming(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, OUT, generator=torch.Generator().manual_seed(seed)).bfloat16()


def products(model: nn.Sequential, seed: int = 1) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of input and weight, which are added to existing ones."""
    output: Tensor = model(torch.arange(ROWS))
    output.backward(incoming(seed))
    return output.detach(), model[0].weight.grad, model[1].weight.grad


@torch.no_grad()
def off(got: Tensor, expected: Tensor) -> float:
    """Return the relative Frobenius error."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def test_the_configuration_names_what_the_adapters_have() -> None:
    assert set(BACKEND_RECIPES["torchao"]) == set(torchao.RECIPES)
    assert set(BACKEND_RECIPES["transformer-engine"]) == set(transformer_engine.RECIPES)
    assert set(torchao.RECIPES) | set(transformer_engine.RECIPES) <= set(RECIPES)


@pytest.mark.parametrize(
    ("backend", "package", "extra"),
    [
        ("torchao", "torchao.float8", "torchao"),
        ("transformer-engine", "transformer_engine.pytorch", "transformer-engine"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    backend: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{backend}.*pip install 'deskside\[{extra}\]'"):
        convert(small(), "fp8-tensorwise", PrecisionConfig(backend=backend))


# torchao

needs_torchao = pytest.mark.skipif(
    not any(p and (Path(p) / "torchao").is_dir() for p in sys.path), reason="needs torchao"
)


@needs_torchao
@pytest.mark.parametrize("recipe", torchao.RECIPES)
def test_self_check_runs_through_torchao(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(recipe, "cpu", backend="torchao")
    assert result.ok and not result.native and result.reason == ""
    # E4M3's noise is 2.6 % for each operand and 3.7 % together. E5M2's operand makes it 5.9 %.
    assert 0.03 < result.errors["output"] < 0.045
    assert 0.03 < result.errors["weight gradient"] < 0.07
    original = torchao.with_weight_of
    monkeypatch.setattr(torchao, "with_weight_of", lambda *layers: lambda x: 0.8 * original(*layers)(x))
    broken = check(recipe, "cpu", backend="torchao")
    assert not broken.ok and "output is off by" in broken.reason


@needs_torchao
def test_tensorwise_is_our_fp8_tensorwise() -> None:
    """Formats and scales are the same, so the products are the same, up to the order of float32 sums before a BF16
    rounding. torchao also rounds its weight gradient to BF16 (2^-9 = 2.0e-3 at most, 1.7e-3 on average).
    """
    ours, theirs, plain = small(), small(), small()
    convert(ours, "fp8-tensorwise", native=False)
    assert quantized_layers(convert(theirs, "fp8-tensorwise", PrecisionConfig(backend="torchao"))) == 1
    convert(plain, "bf16")
    expected, got, other = products(ours), products(theirs), products(plain)
    assert off(got[0], expected[0]) < 1e-4
    assert off(got[1], expected[1]) < 1e-4
    assert off(got[2], expected[2]) < 2**-9
    assert all(off(a, b) > 0.03 for a, b in zip(got, other, strict=True))  # not simply BF16
    assert [t.dtype for t in got] == [torch.bfloat16, torch.float32, torch.float32]


def by_rows(x: Tensor, summed: int) -> np.ndarray:
    """Return E4M3 by ml_dtypes, with a power-of-two scale for each line along the
    summed dimension, back in float64.
    """
    values = x.detach().double().numpy()
    scale = 2.0 ** np.floor(np.log2(448 / np.abs(values).max(axis=summed, keepdims=True)))
    codes = (values * scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) / scale


@needs_torchao
def test_rowwise_is_e4m3_by_rows_in_all_three_products() -> None:
    """torchao rounds scales by rows down to powers of two, which ours does not. ml_dtypes computes the same here."""
    model = small()
    convert(model, "fp8-rowwise", PrecisionConfig(backend="torchao"))
    x, weight, grad = model[0](torch.arange(ROWS)), model[1].weight, incoming()
    expected = (
        by_rows(x, 1) @ by_rows(weight, 1).T,
        by_rows(grad, 1) @ by_rows(weight, 0),
        by_rows(grad, 0).T @ by_rows(x, 0),
    )
    for got, truth in zip(products(model), expected, strict=True):
        assert off(got, torch.from_numpy(truth)) < 2**-9  # a BF16 result


@needs_torchao
def test_the_weight_is_shared_and_gathers_gradients_of_micro_batches() -> None:
    model, first, second = small(bias=True), small(bias=True), small(bias=True)
    names = list(model.state_dict())
    for each in (model, first, second):
        convert(each, "fp8-tensorwise", PrecisionConfig(backend="torchao"))
    assert list(model.state_dict()) == names and len(list(model.parameters())) == 3
    products(model, 1)
    products(model, 2)
    one, two = products(first, 1)[2], products(second, 2)[2]
    assert torch.equal(model[1].weight.grad, one + two)
    with torch.no_grad():
        model[1].weight.copy_(2 * first[1].weight)
        for each in (model, first):
            each[1].bias.zero_()
        twice = 2 * first(torch.arange(ROWS))
        assert off(model(torch.arange(ROWS)), twice) < 1e-2
        model[1].bias.add_(7)
        assert off(model(torch.arange(ROWS)) - 7, twice) < 1e-2


@needs_torchao
def test_a_weight_that_was_replaced_is_seen() -> None:
    """Sharding replaces a layer's parameter after the recipe was applied."""
    model, other = small(), small()
    convert(model, "fp8-tensorwise", PrecisionConfig(backend="torchao"))
    model[1].weight = nn.Parameter(3 * model[1].weight.detach())
    convert(other, "fp8-tensorwise", PrecisionConfig(backend="torchao"))
    got, expected = products(model), products(other)
    assert off(got[0], 3 * expected[0]) < 1e-2
    assert model[1].weight.grad is not None and off(got[2], expected[2]) < 1e-2


@needs_torchao
def test_it_goes_off_and_on_and_is_taken_off() -> None:
    model, tokens = small(), torch.arange(ROWS)
    full = model(tokens)
    applied = convert(model, "fp8-tensorwise", PrecisionConfig(backend="torchao"))
    quantised = model(tokens)
    with applied.high_precision():
        assert off(model(tokens), full) < 5e-3
    assert torch.equal(model(tokens), quantised) and off(quantised, full) > 0.03
    assert applied.scales.state_dict() == {} and not applied.scales.zero_or_nan().isnan()
    restore(model)
    assert torch.equal(model(tokens), full)


@needs_torchao
def test_a_size_that_fp8_cannot_take_is_refused() -> None:
    model = nn.Sequential(Embedding(8, 24), Linear(24, [("q_proj", 32)]))
    with pytest.raises(UsageError, match="q_proj has 24 input features, which must be divisible by 16"):
        convert(model, "fp8-tensorwise", PrecisionConfig(backend="torchao"))


def given(**changes: Any) -> Any:
    return tiny_run.config("unused", **changes)


def loss_of(model: Any) -> Tensor:
    tokens_BT = torch.randint(300, (4, 32), generator=torch.Generator().manual_seed(0))
    loss, _ = model.loss_and_router(tokens_BT, tokens_BT.roll(-1, 1), AttentionContext(backend="reference"))
    return loss / tokens_BT.numel()


@needs_torchao
def test_blocks_compile_whole_and_share_their_code() -> None:
    """There are no graph breaks, and all blocks share one piece of code, although
    each block's layers use other weights.
    """
    config = given(
        model={"num_hidden_layers": 4},
        precision={"name": "fp8-tensorwise", "backend": "torchao", "keep": ("o_proj",)},
    )
    world = World(torch.device("cpu"))
    model = setup.build_model(config, world, "fp8-tensorwise")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)  # projections begin at zero, which blocks every gradient
    execution = setup.prepare_execution(config, model, world, "fp8-tensorwise")
    assert execution.mode == "off" and quantized_layers(execution.precision) == 4 * 3
    loss_of(model).backward()
    eager = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in model.layers:
        block.compile(dynamic=False, fullgraph=True, backend="aot_eager")
    try:
        loss_of(model).backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    finally:
        torch._dynamo.reset()
    for name, parameter in model.named_parameters():
        assert off(parameter.grad, eager[name]) < 2e-2, name


@pytest.mark.full
@needs_torchao
def test_a_run_trains_as_with_our_own_layers(data: Path, tmp_path: Path) -> None:
    curves = {}
    for backend in ("deskside", "torchao"):
        config = tiny_run.config(
            data,
            schedule={"length": "12 steps"},
            precision={"name": "fp8-tensorwise", "backend": backend, "warmup_steps": 2, "keep_last": 0.4},
        )
        run = tiny_run.train(tmp_path, config, backend).run.path
        curves[backend] = [row["loss"] for row in tiny_run.rows(run)]
        assert tiny_run.plan(run)["precision"]["chosen"] == "fp8-tensorwise"
    assert len(curves["torchao"]) == 12
    assert curves["torchao"] != curves["deskside"]
    assert curves["torchao"] == pytest.approx(curves["deskside"], rel=1e-2)
    assert curves["torchao"][-1] < curves["torchao"][0] - 0.3


def test_the_way_of_executing_is_refused_by_name() -> None:
    world = World(torch.device("cpu"))
    for backend, compile in (
        ("torchao", "fused"),
        ("transformer-engine", "fused"),
        ("transformer-engine", "block"),
    ):
        config = given(compute={"compile": compile}, precision={"name": "fp8-tensorwise", "backend": backend})
        model = setup.build_model(config, world, "fp8-tensorwise")
        with pytest.raises(
            UsageError, match=f"compute.compile: precision.backend {backend} does not support {compile}"
        ):
            setup.prepare_execution(config, model, world, "fp8-tensorwise")


# transformer-engine: the library itself needs a GPU (tests/gpu/test_backends.py). Here, every call is checked against
# the signature in its sources, the recipes are real, and a plain product replaces te.Linear's.


class Stand:
    """Replaces transformer_engine.pytorch: records calls, and counts forward passes as delayed scaling does."""

    def __init__(self) -> None:
        self.depth, self.passes, self.inside_calls = 0, 0, 0
        self.recipes: list[Any] = []

    def module(self) -> ModuleType:
        stand = self
        module = ModuleType("transformer_engine.pytorch")
        init = te_signatures.signature("pytorch/module/linear.py", "Linear", "__init__")
        call = te_signatures.signature("pytorch/module/linear.py", "Linear", "forward")
        enter = te_signatures.signature("pytorch/quantization.py", "autocast", "__init__")

        class TheirLinear(nn.Module):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__()
                bound = init.bind(*args, **kwargs).arguments
                assert bound["bias"] is False and str(bound["device"]) == "meta"
                shape = (bound["out_features"], bound["in_features"])
                self.weight = nn.Parameter(torch.empty(shape, device="meta", dtype=bound["params_dtype"]))

            def forward(self, *args: Any, **kwargs: Any) -> Tensor:
                x = call.bind(*args, **kwargs).arguments["inp"]
                assert stand.depth > 0, "called outside of autocast, where it computes in BF16"
                # Like its set_activation_dtype: parameters of another dtype need torch.autocast.
                assert torch.is_autocast_enabled(x.device.type) or x.dtype == self.weight.dtype
                stand.inside_calls += 1
                return nn.functional.linear(x, self.weight)

        @contextmanager
        def autocast(*args: Any, **kwargs: Any) -> Iterator[None]:
            bound = enter.bind(*args, **kwargs).arguments
            assert bound["enabled"] is True
            stand.recipes.append(bound["recipe"])
            stand.depth += 1
            try:
                yield
            finally:
                stand.depth -= 1
                stand.passes += stand.depth == 0

        def asks(name: str) -> Callable[..., tuple[bool, str]]:
            question = te_signatures.signature("pytorch/quantization.py", name)

            def answer(*args: Any, **kwargs: Any) -> tuple[bool, str]:
                assert question.bind(*args, **kwargs).arguments == {"return_reason": True}
                return name in stand.available, "" if name in stand.available else "no such card"

            return answer

        names = ("is_fp8_available", "is_nvfp4_available")
        members = {"Linear": TheirLinear, "autocast": autocast} | {name: asks(name) for name in names}
        assert set(members) <= te_signatures.exported()
        for name, member in members.items():
            setattr(module, name, member)
        return module

    available = ("is_fp8_available", "is_nvfp4_available")


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = Stand()
    module, recipes = made.module(), te_signatures.recipes()  # while the package itself can still be found
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    monkeypatch.setitem(sys.modules, "transformer_engine.common", ModuleType("transformer_engine.common"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    original = backends.load
    monkeypatch.setattr(
        backends, "load", lambda name, recipe, device: original(name, recipe, torch.device("cuda"))
    )
    return made


def test_each_recipe_is_built_as_its_name_says(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    built = {}
    for name in transformer_engine.RECIPES:
        model = small()
        convert(model, name, PrecisionConfig(backend="transformer-engine"))
        model(torch.arange(ROWS))
        built[name] = stand.recipes[-1]
    assert built["fp8-delayed"].delayed() and built["fp8-delayed"].amax_compute_algo == "max"
    assert built["fp8-delayed"].amax_history_len == recipe_named("fp8-delayed").amax_history
    assert built["fp8-tensorwise"].float8_current_scaling()
    for name in ("fp8-delayed", "fp8-tensorwise"):
        formats = built[name].fp8_format.value
        assert (formats.max_fwd, formats.max_bwd) == (448, 57344)  # E4M3 forward, E5M2 gradients
    nvfp4 = built["nvfp4"]
    assert nvfp4.nvfp4() and nvfp4.fp4_quant_fwd_weight.fp4_2d_quantization
    assert nvfp4.fp4_quant_bwd_grad.random_hadamard_transform and nvfp4.fp4_quant_bwd_grad.stochastic_rounding


def test_their_layers_share_our_weights(stand: Stand) -> None:
    model, tokens = small(bias=True), torch.arange(ROWS)
    full, names = model(tokens), list(model.state_dict())
    applied = convert(model, "fp8-tensorwise", PrecisionConfig(backend="transformer-engine"))
    assert list(model.state_dict()) == names
    assert off(model(tokens), full) < 1e-2 and stand.inside_calls == 1
    products(model, 1)
    products(model, 2)
    gradient = (incoming(1).double() + incoming(2).double()).T @ model[0].weight.detach().double()
    assert off(model[1].weight.grad, gradient) < 1e-2 and model[1].weight.grad.dtype == torch.float32
    calls = stand.inside_calls
    with applied.high_precision():
        model(tokens)
    restore(model)
    assert torch.equal(model(tokens), full)
    assert stand.inside_calls == calls


def test_a_forward_pass_is_one_region(stand: Stand) -> None:
    """With a region for each layer, delayed scaling would advance every layer's history once per layer."""
    config = given(precision={"name": "fp8-delayed", "backend": "transformer-engine"})
    world = World(torch.device("cpu"))
    model = setup.build_model(config, world, "fp8-delayed")
    precision: QuantizedModel = setup.prepare_execution(config, model, world, "fp8-delayed").precision
    for passes in (1, 2):
        loss_of(model).backward()
        assert stand.passes == passes and stand.inside_calls == 2 * 4 * passes
    with precision.high_precision():
        loss_of(model)
    assert stand.passes == 2


def test_running_layers_twice_is_refused(stand: Stand) -> None:
    config = given(
        compute={"activation_checkpointing": "mlp"},
        precision={"name": "fp8-tensorwise", "backend": "transformer-engine"},
    )
    world = World(torch.device("cpu"))
    model = setup.build_model(config, world, "fp8-tensorwise")
    with pytest.raises(UsageError, match="activation_checkpointing: transformer-engine"):
        setup.prepare_execution(config, model, world, "fp8-tensorwise")


def test_a_card_and_a_size_that_it_cannot_take_are_named(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(Embedding(8, 48), Linear(48, [("q_proj", 64)]))
    with pytest.raises(UsageError, match="input features divisible by 32 for nvfp4, and q_proj has 48"):
        convert(model, "nvfp4", PrecisionConfig(backend="transformer-engine"))
    convert(model, "fp8-delayed", PrecisionConfig(backend="transformer-engine"))
    monkeypatch.setattr(Stand, "available", ("is_fp8_available",))
    with pytest.raises(UsageError, match=r"nvfp4.*\(no such card\)"):
        convert(small(), "nvfp4", PrecisionConfig(backend="transformer-engine"))
    monkeypatch.undo()
    if "transformer_engine.pytorch" not in sys.modules:
        with pytest.raises(UsageError, match="transformer-engine cannot be imported"):
            convert(small(), "fp8-tensorwise", PrecisionConfig(backend="transformer-engine"))


def test_the_signatures_are_those_of_the_sources() -> None:
    """The helper returns what inspect would: compared on a file of the package that can be imported."""
    theirs = inspect.signature(te_signatures.recipes().Recipe.__setattr__)
    read = te_signatures.signature("common/recipe/__init__.py", "Recipe", "__setattr__")
    assert list(read.parameters) == list(theirs.parameters)[1:]
