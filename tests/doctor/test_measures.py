"""The checks themselves on a CPU: they pass correct results with errors of the right size, and find wrong ones."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deskside.doctor import (
    check_attention,
    check_gemm,
    check_libraries,
    check_tools,
    check_training,
    machine_facts,
)
from deskside.kernels import fused, quack_matmul
from deskside.kernels.attention import BACKENDS, Requirements
from deskside.optim.build import Optimizer
from deskside.train.loop.step import Stepper
from tests.kernels import quack_reference

CPU = torch.device("cpu")


def test_compare_tells_zero_not_finite_and_off_apart() -> None:
    truth = {"a": torch.tensor([3.0, 4.0], dtype=torch.float64), "none": torch.zeros(2)}
    same = check_tools.compare({"a": torch.tensor([3.0, 4.0]), "none": torch.zeros(2)}, truth, 1e-3)
    assert (same["verdict"], same["errors"]) == ("works", {"a": 0.0, "none": 0.0})
    off = check_tools.compare({"a": torch.tensor([3.0, 4.5]), "none": torch.zeros(2)}, truth, 1e-3)
    assert off["reason"] == "a is off by 1.0e-01, allowed 1.0e-03"
    assert off["errors"]["a"] == pytest.approx(0.1)
    nan = check_tools.compare({"a": torch.tensor([float("nan"), 4.0]), "none": torch.zeros(2)}, truth, 1e-3)
    assert nan["reason"] == "a is not finite" and nan["errors"]["a"] is None
    # However wide the tolerance is, a result of zeros is wrong.
    zero = check_tools.compare({"a": torch.zeros(2), "none": torch.zeros(2)}, truth, 10.0)
    assert (zero["verdict"], zero["reason"]) == ("wrong numbers", "a is all zero")
    # A gradient where there must be none is an error too.
    extra = check_tools.compare({"a": truth["a"], "none": torch.ones(2)}, truth, 1e-3)
    assert extra["verdict"] == "wrong numbers" and "none is off" in extra["reason"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_plain_matmul(dtype: str) -> None:
    result = check_gemm.plain(dtype, "cpu")
    assert result["verdict"] == "works", result
    assert set(result["errors"]) == {"output", "input gradient", "weight gradient"}
    assert result["speed"]["value"] > 1e8 and result["speed"]["unit"] == "FLOP/s"


def test_grouped_products_of_experts() -> None:
    result = check_gemm.grouped("cpu")
    assert result["verdict"] == "works" and result["details"] == {"backend": "loop"}, result
    assert set(result["errors"]) == {"output", "input gradient", "weight gradient"}
    assert result["speed"]["value"] > 1e7 and result["speed"]["unit"] == "FLOP/s"


def test_plain_matmul_of_less_precision_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens with TF32, if a user has enabled it."""
    monkeypatch.setitem(check_gemm.PLAIN, "fp32", (torch.bfloat16, check_gemm.PLAIN["fp32"][1]))
    result = check_gemm.plain("fp32", "cpu")
    assert result["verdict"] == "wrong numbers" and "output is off by" in result["reason"]


def test_copy_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check_gemm.COPY_BYTES, "cpu", 2**22)
    monkeypatch.setattr(check_gemm, "median_seconds", lambda call, device: [call(), 0.5][1])
    result = check_gemm.copy("cpu")
    assert result["verdict"] == "works" and result["speed"]["value"] == 2 * 2**22 / 0.5


WHOLE_ROWS = [b.name for b in BACKENDS.values() if "cpu" in b.devices and not b.shared_rows]


@pytest.mark.parametrize("name", WHOLE_ROWS)
@pytest.mark.parametrize("window", [False, True])
def test_attention_backends(name: str, window: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Requirements(1, 160, 4, 2, 16, torch.float32, CPU)
    monkeypatch.setitem(check_attention.TIMED, "cpu", small)
    if window and not BACKENDS[name].window:
        with pytest.raises(Exception, match="has no sliding window"):
            check_attention.check(name, window, "cpu")
        return
    result = check_attention.check(name, window, "cpu")
    assert result["verdict"] == "works", result
    assert set(result["errors"]) == {"output", "dq", "dk", "dv"}
    assert all(0 <= error < 1e-5 for error in result["errors"].values())
    assert result["speed"]["value"] > 0 and result["details"]["rows"] == 1


@pytest.mark.parametrize("window", [None, 3, 7, 50])
def test_flops_count_the_pairs_that_see_each_other(window: int | None) -> None:
    need = Requirements(2, 7, 3, 1, 5, torch.float32, CPU, window)
    pairs = sum(1 for q in range(7) for k in range(7) if k <= q and (window is None or q - k < window))
    # rows, two products of a multiplication and an addition, heads, channels
    forward = 2 * 2 * 2 * 3 * 5 * pairs
    assert check_attention.flops(need) == 3.5 * forward


def test_choice_of_attention() -> None:
    result = check_attention.quick_choice("cpu")
    assert result["verdict"] == "works"
    assert result["details"]["chosen"] in result["details"]["milliseconds"]
    assert "cuda" in result["details"]["rejected"]["cudnn"]


def test_every_backend_is_listed() -> None:
    listed = {b["name"]: b for b in check_attention.list_backends("cuda")}
    assert set(listed) == set(BACKENDS)
    assert listed["cudnn"]["full"] is None and listed["cudnn"]["window"] == "has no sliding window"
    assert listed["efficient"]["full"] is None, "a backend without grouped heads gets a problem without them"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_step(precision: str) -> None:
    result = check_training.step(precision, "cpu")
    assert result["verdict"] == "works", result
    assert result["errors"]["gradients"] < check_training.TOLERANCE[precision] / 2
    losses = result["details"]["losses"]
    assert losses[-1] < 0.9 * losses[0]


def test_a_training_step_with_a_zero_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stepper.forward_backward

    def broken(stepper: Stepper, batches: Any) -> Tensor:
        loss = original(stepper, batches)
        dict(stepper.model.named_parameters())["embed.weight"].grad.zero_()  # type: ignore[union-attr]
        return loss

    monkeypatch.setattr(Stepper, "forward_backward", broken)
    result = check_training.step("fp32", "cpu")
    assert result["verdict"] == "wrong numbers"
    assert result["reason"] == "gradient of embed.weight is all zero"


def test_a_training_step_that_learns_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Optimizer, "step", lambda optimizer, skip=None: None)
    result = check_training.step("fp32", "cpu")
    assert result["verdict"] == "wrong numbers"
    assert result["reason"].startswith("8 steps on one batch brought its loss from 6.2")


@pytest.mark.parametrize("mode", ["fused", pytest.param("block", marks=pytest.mark.full)])
def test_other_ways_to_run_a_step_on_a_cpu(mode: check_training.ExecutionMode) -> None:
    result = check_training.compiled_step(mode, "fp32", "cpu")
    assert result["verdict"] == "works", result
    assert result["errors"]["gradients"] < 1e-4
    assert result["details"]["times_eager"] > 0 and result["speed"]["unit"] == "tokens/s"


def test_wrong_hand_written_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fused.gated_backward
    monkeypatch.setattr(fused, "gated_backward", lambda *given: right(*given) * 1.3)
    result = check_training.compiled_step("fused", "bf16", "cpu")
    assert result["verdict"] == "wrong numbers" and result["errors"]["gradients"] > 0.2, result


def test_facts_of_this_machine() -> None:
    facts = machine_facts.collect()
    assert facts["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    assert facts["torch"] == torch.__version__ and facts["memory_available_gib"] > 0
    assert bool(facts["cuda_error"]) is (facts["device"] == "cpu")
    assert {b["name"] for b in facts["attention_backends"]} == set(BACKENDS)


def test_only_compilers_that_torch_and_triton_look_for_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("cc", "clang++"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    facts = machine_facts.collect()
    assert facts["c_compiler"] is None and facts["cxx_compiler"] is None
    monkeypatch.setenv("CXX", "clang++ -v")
    assert machine_facts.collect()["cxx_compiler"] == str(tmp_path / "clang++")


# Libraries that are not installed here: stand-ins with the same interface, right and wrong ones


class _Layer(nn.Module):
    """A linear layer whose backward a test may break."""

    spoil = False

    def __init__(self, inputs: int, outputs: int, **_: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        if self.spoil:
            y.register_hook(torch.zeros_like)
        return y


@pytest.mark.parametrize("spoil", [False, True])
def test_transformer_engine_with_zero_gradients_is_found(
    spoil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = []

    class Autocast:
        def __init__(self, **settings: Any):
            self.settings = settings

        def __enter__(self) -> None:
            entered.append(self.settings)

        def __exit__(self, *_: Any) -> None: ...

    recipe: Any = ModuleType("transformer_engine.common.recipe")
    recipe.NVFP4BlockScaling = SimpleNamespace
    te: Any = ModuleType("transformer_engine.pytorch")
    te.Linear, te.autocast = type("Linear", (_Layer,), {"spoil": spoil}), Autocast
    for module in (ModuleType("transformer_engine"), ModuleType("transformer_engine.common"), recipe, te):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    result = check_libraries.transformer_engine("NVFP4BlockScaling", "cpu")
    assert entered and entered[0]["enabled"] is True
    if spoil:
        assert result["verdict"] == "wrong numbers"
        assert result["reason"] == "input gradient is all zero; weight gradient is all zero"
    else:
        assert result["verdict"] == "works" and result["errors"]["output"] < 0.01


def test_torchao_that_converts_nothing_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    float8: Any = ModuleType("torchao.float8")
    float8.Float8LinearConfig = SimpleNamespace(from_recipe_name=lambda name: name)
    float8.convert_to_float8_training = lambda model, config: model
    for module in (ModuleType("torchao"), float8):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(RuntimeError, match="left the layer as it was"):
        check_libraries.torchao("tensorwise", "cpu")


def test_8_bit_adamw_that_keeps_32_bit_states_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    bnb: Any = ModuleType("bitsandbytes")
    bnb.optim = SimpleNamespace(AdamW8bit=torch.optim.AdamW)
    monkeypatch.setitem(sys.modules, "bitsandbytes", bnb)
    with pytest.raises(RuntimeError, match="no 8-bit state"):
        check_libraries.bitsandbytes_adamw("cpu")


def test_products_of_quack_kernels_are_compared_with_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="compute capability"):
        check_libraries.quack_linear("cpu")
    launched = quack_reference.use_reference(monkeypatch)
    monkeypatch.setattr(quack_matmul, "tiles_of", lambda device: (quack_reference.TILE,))
    linear, gate = check_libraries.quack_linear("cpu"), check_libraries.quack_gate("cpu")
    assert linear["verdict"] == gate["verdict"] == "works"
    assert len(linear["errors"]) == 2 and linear["speed"]["value"] > 0
    assert len(gate["errors"]) == 3 and launched[-2:] == ["gate", "gate_gradient"]

    launch = quack_matmul._launch

    def gelu_for_silu(name: str, tile: Any, *operands: Tensor, out: dict[str, Tensor]) -> None:
        launch(name, tile, *operands, out=out)
        if name == "gate":
            out["hidden"].copy_(torch.nn.functional.gelu(out["D"][:, 0::2]) * out["D"][:, 1::2])

    monkeypatch.setattr(quack_matmul, "_launch", gelu_for_silu)
    result = check_libraries.quack_gate("cpu")
    assert result["verdict"] == "wrong numbers" and result["reason"].startswith(
        "hidden (128 x 128, ping-pong) "
    )


def test_a_tile_that_quack_kernels_does_not_support_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    quack_reference.use_reference(monkeypatch)
    launch, other = quack_matmul._launch, quack_matmul.MatmulTile(256, 128, False, 2)

    def one_tile(name: str, tile: Any, *operands: Tensor, out: dict[str, Tensor]) -> None:
        if tile == other:
            raise RuntimeError("quack-kernels: not supported")
        launch(name, tile, *operands, out=out)

    monkeypatch.setattr(quack_matmul, "_launch", one_tile)
    monkeypatch.setattr(quack_matmul, "tiles_of", lambda device: (quack_reference.TILE, other))
    assert len(check_libraries.quack_linear("cpu")["errors"]) == 2
    monkeypatch.setattr(quack_matmul, "tiles_of", lambda device: (other,))
    with pytest.raises(RuntimeError, match="not supported"):
        check_libraries.quack_gate("cpu")
