"""The 8-bit map against bitsandbytes and brute force, the update against torch's AdamW and bitsandbytes' 8-bit AdamW,
and the interpreted Triton kernel against the reference.
"""

import pytest
import torch

from deskside.kernels import adamw_4bit
from deskside.kernels.adamw import adamw_update
from deskside.kernels.adamw_state import (
    BLOCK,
    EXP_AVG,
    EXP_AVG_MAX,
    EXP_AVG_SQ,
    EXP_AVG_SQ_MAX,
    dequantize,
    dynamic_map,
    quantize,
)
from tests.kernels.interpreter import interpreted
from tests.kernels.optimizer_cases import CAUTIOUS, FORMATS, FOUR_BITS, RULE, gradient, zeros


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_bitsandbytes(signed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(signed)
    torch.testing.assert_close(dynamic_map(signed), theirs, atol=0, rtol=2e-7)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest(signed: bool) -> None:
    """Compared with brute force in float64. Never worse than bitsandbytes, whose CPU tables are coarse near zero."""
    functional = pytest.importorskip("bitsandbytes.functional")
    x = gradient(40 * BLOCK + 77, 1, spread=6)
    x = x if signed else x.square()
    codes, largest = quantize(x, signed)
    scaled = x.double() / largest.double().repeat_interleave(BLOCK)[: x.numel()]
    values = dynamic_map(signed).double()
    error = (scaled - values[codes.int()]).abs()
    best = (scaled[:, None] - values).abs().amin(dim=1)
    moved_up = (
        (codes == 1) & (scaled < values[1] / 2) if not signed else torch.zeros_like(codes, dtype=torch.bool)
    )
    assert float((error - best)[~moved_up].max()) < 1e-7
    theirs, state = functional.quantize_blockwise(x, functional.create_dynamic_map(signed), blocksize=BLOCK)
    assert torch.equal(largest, state.absmax)
    assert bool((error <= (scaled - values[theirs.int()]).abs() + 1e-7)[~moved_up].all())
    away = (codes.int() - theirs.int()).abs()[scaled.abs() > 0.01]
    assert int(away.max()) <= 1 and float(away.float().mean()) < 0.03
    torch.testing.assert_close(
        dequantize(codes, largest, signed),
        functional.dequantize_blockwise(codes, absmax=largest, code=dynamic_map(signed), blocksize=BLOCK),
    )


def test_a_second_moment_never_becomes_zero() -> None:
    x = torch.full((BLOCK,), 1e-12)
    x[0], x[1] = 1.0, 0.0
    codes, largest = quantize(x, signed=False)
    assert codes[1] == 0 and bool((codes[2:] == 1).all())
    assert bool((dequantize(codes, largest, signed=False)[2:] > 0).all())


def test_blocks_of_zeros_and_of_denormals_stay_finite() -> None:
    for value in (0.0, 1e-40):
        codes, largest = quantize(torch.full((BLOCK,), value), signed=True)
        assert bool((dequantize(codes, largest, signed=True).abs() <= value).all())


def test_the_4_bit_map_is_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    theirs = functional.create_dynamic_map(True, total_bits=4)
    theirs = theirs[theirs.nonzero().flatten()]  # padded with zeros to 256 values
    expected = torch.cat((theirs, torch.zeros(1))).sort().values
    torch.testing.assert_close(adamw_4bit.first_map(), expected, atol=0, rtol=2e-7)


@pytest.mark.parametrize("n", [128, 129, 40 * 128 + 77])
def test_4_bit_codes_are_the_nearest(n: int) -> None:
    """Compared with brute force in float64. A second moment has sixteenths of its
    block's largest value, without zero.
    """
    x = gradient(n, 1)
    for values, packed, largest, decoded in (
        (adamw_4bit.first_map(), *adamw_4bit.quantize_first(x), adamw_4bit.dequantize_first),
        ((torch.arange(16) + 1) / 16, *adamw_4bit.quantize_second(x.square()), adamw_4bit.dequantize_second),
    ):
        of = x if decoded is adamw_4bit.dequantize_first else x.square()
        assert packed.shape == (-(-n // 2),) and largest.shape == (-(-n // 128),)
        scales = largest.double().repeat_interleave(128)[:n]
        best = (of.double()[:, None] - scales[:, None] * values.double()).abs().amin(dim=1)
        error = (of.double() - decoded(packed, largest, n).double()).abs()
        assert float(((error - best) / scales).max()) < 1e-6
        blocks = of.abs().split(128)
        assert largest.tolist() == [float(block.max()) for block in blocks]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_update_is_near_torch_adamw(dtype: torch.dtype | str) -> None:
    n = 20 * BLOCK + 5
    start = gradient(n, 0, spread=0)
    ours, oracle = start.clone(), torch.nn.Parameter(start.clone())
    adamw = torch.optim.AdamW(
        [oracle], lr=RULE.lr, betas=RULE.betas, eps=RULE.eps, weight_decay=RULE.weight_decay
    )
    state = zeros(n, dtype)
    # 4 bits cover one decade within a block of the second moment's roots.
    spread = 1.0 if dtype == FOUR_BITS else 3.0
    for step in range(1, 11):
        g = gradient(n, step, spread)
        oracle.grad = g.clone()
        adamw.step()
        adamw_update(ours, g, state, torch.tensor(float(step)), torch.tensor(0.0), RULE, fused=False)
    moved = oracle.detach() - start
    error = float((ours - oracle.detach()).norm() / moved.norm())
    # 0.2 % is bfloat16's rounding of each moment. 8 bits round values of the lower decades more coarsely.
    assert error < {torch.float32: 1e-6, torch.bfloat16: 0.01, torch.uint8: 0.15, FOUR_BITS: 0.6}[dtype]
    assert error > {torch.float32: -1, torch.bfloat16: 1e-4, torch.uint8: 1e-3, FOUR_BITS: 1e-2}[dtype]


def test_the_update_is_bitsandbytes_8_bit_adam() -> None:
    """Compared with their optimizer on the CPU, at gradients whose blocks stay in the
    upper decades, where their tables are exact.
    """
    functional = pytest.importorskip("bitsandbytes.functional")
    n = 8 * BLOCK
    ours = gradient(n, 0, spread=0)
    theirs = ours.clone()
    state = zeros(n, torch.uint8)
    other = {key: tensor.clone() for key, tensor in state.items()}
    maps = functional.create_dynamic_map(True), functional.create_dynamic_map(False)
    for step in range(1, 6):
        g = 1 + 0.5 * gradient(n, step, spread=0).clamp(-1.5, 1.5)
        adamw_update(ours, g, state, torch.tensor(float(step)), torch.tensor(0.0), RULE, fused=False)
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", g, theirs, other[EXP_AVG], other[EXP_AVG_SQ], *RULE.betas, 0.0, 0.0, RULE.eps, step, RULE.lr,
            *maps, other[EXP_AVG_MAX], other[EXP_AVG_SQ_MAX], RULE.weight_decay, 1.0, False,
        )  # fmt: skip
    assert float((ours - theirs).norm() / (theirs - gradient(n, 0, spread=0)).norm()) < 0.01
    assert float((state[EXP_AVG] == other[EXP_AVG]).float().mean()) > 0.99
    assert float((state[EXP_AVG_SQ] == other[EXP_AVG_SQ]).float().mean()) > 0.99
    torch.testing.assert_close(state[EXP_AVG_MAX], other[EXP_AVG_MAX], rtol=1e-3, atol=0)


def test_cautious_decay_is_the_rule_in_float64() -> None:
    p, state = gradient(999, 0, spread=0).double(), zeros(999, torch.float32)
    state = {key: tensor.double() for key, tensor in state.items()}
    expected, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, 4):
        g = gradient(999, step).double()
        adamw_update(p, g, state, torch.tensor(float(step)), torch.tensor(0.0), CAUTIOUS, fused=False)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g.square()
        update = m / (1 - 0.9**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
        decayed = torch.sign(update) == torch.sign(expected)
        expected = expected - 0.01 * update - 0.01 * 2.0 * expected * decayed
        assert 0.3 < float(decayed.double().mean()) < 0.7
        torch.testing.assert_close(p, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_skipped_update_changes_no_bit(dtype: torch.dtype | str) -> None:
    n = BLOCK + 9
    p, state = gradient(n, 0), zeros(n, dtype)
    adamw_update(p, gradient(n, 1), state, torch.tensor(1.0), torch.tensor(0.0), RULE, fused=False)
    before = {key: tensor.clone() for key, tensor in (state | {"p": p}).items()}
    bad = torch.full((n,), torch.nan)
    adamw_update(p, bad, state, torch.tensor(2.0), torch.tensor(1.0), RULE, fused=False)
    for key, tensor in (state | {"p": p}).items():
        assert torch.equal(tensor, before[key]), key


@pytest.fixture(scope="module")
def interpreted_kernel() -> dict[str, dict[str, float]]:
    pytest.importorskip("triton")
    found: dict[str, dict[str, float]] = interpreted("optimizers_interpreted", "adamws")
    return found


@pytest.mark.parametrize("dtype", [*FORMATS, "cautious"], ids=str)
def test_the_kernel_equals_the_reference(
    dtype: torch.dtype | str, interpreted_kernel: dict[str, dict[str, float]]
) -> None:
    """A skipped step changes no bit."""
    found = interpreted_kernel[str(dtype)]
    assert found.pop("changed by a skipped step") == 0
    # The interpreter truncates bfloat16 where hardware rounds: one bit of 8.
    half = dtype == torch.bfloat16
    assert found.pop("weights") < (1e-3 if half else 1e-6)
    assert len(found) == (6 if dtype in (torch.uint8, FOUR_BITS) else 2)
    for key, value in found.items():
        if key.endswith("codes"):  # a value on the border of two cells may be assigned to either
            assert value <= 1, key
        elif key.endswith("share"):
            assert value < 1e-3, key
        else:
            assert value < (0.01 if half else 1e-6), key
