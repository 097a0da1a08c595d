"""The NVFP4 kernels without a GPU: in Triton's interpreter, compared with the torch reference and float64."""

import pytest
import torch

from deskside.config.recipes import Operand
from deskside.utils.errors import UsageError
from tests.kernels.interpreter import interpreted
from tests.kernels.nvfp4_cases import LAYOUTS, OPERANDS, PRODUCTS, uniform

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=["some kinds", pytest.param("every kind", marks=pytest.mark.full)])
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    made: dict[str, dict[str, float]] = interpreted("nvfp4_interpreted", "main", request.param)
    return made


@pytest.mark.parametrize("along", ["columns", "rows"])
@pytest.mark.parametrize("name", OPERANDS)
def test_no_value_differs_from_the_reference(
    found: dict[str, dict[str, float]], name: str, along: str
) -> None:
    """With the same noise, also in stochastic rounding. Sums of a transform may differ in the last bit."""
    runs = {key: run for key, run in found.items() if key.startswith(f"{name}, {along}, ")}
    assert len(runs) >= 2
    transformed = OPERANDS[name].hadamard > 0
    by_expert = runs.pop(f"{name}, {along}, by expert")
    assert by_expert["values"] <= (16 if transformed else 0)  # of 131,072 values
    assert by_expert["global scale"] <= (1e-6 if transformed else 0)
    for key, run in runs.items():
        allowed = 4 if transformed else 0  # of 15,360 or 32,768 values
        assert run["values"] <= allowed, key
        assert run["codes"] <= allowed, key
        assert run["block scales"] <= allowed, key
        assert run["global scale"] <= (1e-6 if transformed else 0), key


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("descriptors", [False, True], ids=["pointers", "descriptors"])
def test_products_are_exact_to_float32(
    found: dict[str, dict[str, float]], layout: str, descriptors: bool
) -> None:
    runs = [found[f"product {layout}, {sizes}, {descriptors}"] for sizes in PRODUCTS]
    assert [run["parts"] > 1 for run in runs] == [False, False, True]
    assert max(run["error"] for run in runs) < 2e-6


def test_noise_is_uniform_and_seeds_are_unrelated() -> None:
    n = 1 << 20
    a, b, c = (uniform((1024, 1024), seed).double() for seed in (1, 2, 1 << 40))
    error = n**-0.5
    for u in (a, b, c):
        counts = torch.histc(u, 64, 0, 1)
        expected = n / 64
        # Chi-squared with 63 degrees of freedom: mean 63, standard deviation 11.2.
        assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * 11.2
        for shift in (1, 2, 16, 1024):
            assert abs(correlation(u.flatten()[shift:], u.flatten()[:-shift])) < 5 * error
    for u, v in ((a, b), (a, c), (b, c)):
        assert abs(correlation(u, v)) < 5 * error
        # Neither sequence is a rearrangement of the other by exclusive-or of the element's number.
        assert len(set(u.flatten()[:4096].tolist()) & set(v.flatten()[:4096].tolist())) < 30


def correlation(u: torch.Tensor, v: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack((u.flatten(), v.flatten())))[0, 1])


def test_sums_are_cut_only_where_the_card_would_idle() -> None:
    from deskside.kernels.nvfp4.matmul import num_parts

    assert num_parts(tiles=512 * 16, steps=12, multiprocessors=132) == 1  # 65,536 tokens, 768 -> 4096
    # 768 x 768 from 65,536 tokens: 126 of 132 multiprocessors are busy.
    assert num_parts(tiles=18, steps=1024, multiprocessors=132) == 7
    assert num_parts(tiles=1, steps=8, multiprocessors=132) == 1  # too short to split


def test_bad_input_is_refused_by_name() -> None:
    from deskside.kernels.nvfp4.matmul import scaled_matmul
    from deskside.kernels.nvfp4.native import fp8_matmul
    from deskside.kernels.nvfp4.quantize import quantize

    x, one = torch.zeros(64, 64, dtype=torch.bfloat16), torch.ones(())
    with pytest.raises(UsageError, match="need a CUDA tensor, this is on cpu"):
        quantize(x, Operand("nvfp4", "1x16"), "columns")
    with pytest.raises(UsageError, match="needs CUDA tensors, these are on cpu"):
        scaled_matmul(x, x, one, "nt")
    with pytest.raises(UsageError, match="summed dimensions are 64 and 32"):
        scaled_matmul(x, x[:, :32], one, "nt")
    with pytest.raises(UsageError, match=r"compute capability 12\.x, which cpu"):
        fp8_matmul(x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn), one)
