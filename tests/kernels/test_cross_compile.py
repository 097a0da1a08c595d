"""Every Triton kernel builds for cards that are not here: right instructions, and within their shared memory."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton")

from deskside.kernels.compile_cases import (
    SHARED_MEMORY,
    CompileCase,
    Compiled,
    all_cases,
    compile_case,
)

CASES = all_cases()
# The consumer generations at every run, the others in the long form.
EVERY_RUN = (89, 120)
BUILDS = [
    pytest.param(
        case,
        capability,
        id=f"{case.name}-{capability}",
        marks=[] if capability in EVERY_RUN else [pytest.mark.full],
    )
    for case in CASES
    for capability in case.capabilities
]

Build = Callable[[CompileCase, int], Compiled]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    folder: Path = tmp_path_factory.mktemp("triton")
    made: dict[tuple[str, int], Compiled] = {}

    def once(case: CompileCase, capability: int) -> Compiled:
        from triton import knobs

        key = (case.name, capability)
        if key not in made:
            with knobs.cache.scope():
                knobs.cache.dir = str(folder)
                made[key] = compile_case(case, capability)
        return made[key]

    return once


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case, capability", BUILDS)
def test_builds_for(case: CompileCase, capability: int, build: Build) -> None:
    made = build(case, capability)
    assert re.search(rf"\.target sm_{capability}\w?\b", made.ptx)
    assert len(made.machine_code) > 1000
    assert made.shared <= SHARED_MEMORY[capability]
    if capability == 120:  # which has no stochastic conversion
        assert "cvt.rs" not in made.ptx


def named(name: str) -> CompileCase:
    return next(case for case in CASES if case.name == name)


def test_consumer_blackwell_multiplies_nvfp4_natively(build: Build) -> None:
    ptx = build(named("nvfp4 matmul"), 120).ptx
    assert re.search(
        r"mma\.sync\.aligned\.\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*e2m1\.e2m1\S*ue4m3", ptx
    )


def test_datacentre_blackwell_multiplies_nvfp4_natively(build: Build) -> None:
    assert re.search(r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale", build(named("nvfp4 matmul"), 100).ptx)


def test_consumer_blackwell_multiplies_fp8_at_the_scaled_rate(build: Build) -> None:
    gradients = build(named("fp8 matmul as MXFP8, E5M2 gradients, ragged"), 120).ptx
    assert re.search(r"kind::mxf8f6f4\.block_scale\S*e5m2\.e4m3\S*ue8m0", gradients)


def test_quantiser_fuses_no_rounding_away(build: Build) -> None:
    """fma would round once where the reference rounds twice; only the correction of a division has them."""
    fused = r"\bfma\.rn\.f32"
    assert not re.search(fused, build(named("nvfp4 quantise 1x16"), 89).ptx)
    assert re.search(fused, build(named("nvfp4 quantise 4/6"), 89).ptx)
    assert "div.full" not in build(named("nvfp4 quantise 4/6"), 89).ptx


@pytest.mark.full
def test_hopper_uses_its_own_instructions(build: Build) -> None:
    ptx = build(named("scaled matmul nt"), 90).ptx
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx


@pytest.mark.full
def test_nvfp4_product_does_not_build_where_there_is_no_instruction() -> None:
    """If a new Triton emulates it there, this says so. The compiler is known to give up with an error."""
    with pytest.raises(RuntimeError):
        compile_case(named("nvfp4 matmul"), 89)
