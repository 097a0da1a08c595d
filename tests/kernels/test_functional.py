from importlib import import_module
from inspect import signature
from types import ModuleType

import pytest
import torch
from torch import Tensor

from deskside.kernels import fused, moe
from deskside.kernels.functional import gradients


def test_gradients_are_torchs_to_the_last_bit() -> None:
    """Covers several outputs, an output that others depend on, a leaf that is used twice, and different dtypes."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(5, 7, generator=generator).requires_grad_() for _ in range(2)]

    def outputs() -> list[Tensor]:
        first = (leaves[0] @ leaves[1].T).sin()
        return [first, (first * first).to(torch.bfloat16), leaves[0].exp()]

    upstream = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs()]
    expected = torch.autograd.grad(outputs(), leaves, upstream)
    made = outputs()
    with torch.no_grad():  # as within a backward pass
        found = gradients(made, leaves, upstream)
    assert len(found) == 2
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("package", "launchers"), [(fused, ("LAUNCHER",)), (moe, ("LAUNCHER", "FP8_LAUNCHER", "GROUPED"))]
)
def test_every_operator_has_a_launcher_with_the_same_parameters(
    package: ModuleType, launchers: tuple[str, ...]
) -> None:
    """The launcher is looked up by its name at the first call on a GPU, which no test on this machine reaches."""
    pytest.importorskip("triton")
    modules = [vars(import_module(getattr(package, name))) for name in launchers]
    launched = {name: value for module in modules for name, value in module.items()}
    operators = {
        name: op for name, op in vars(package).items() if hasattr(op, "__wrapped__") and name != "writes_fp8"
    }
    assert len(operators) >= 8
    for name, operator in operators.items():
        plain, launch = (signature(f).parameters for f in (operator.__wrapped__, launched[name]))
        assert list(plain) == list(launch), name
        assert [p.default for p in plain.values()] == [p.default for p in launch.values()], name
