"""The layout of interleaved weights, and the kernels of quack-kernels, which compile without a GPU."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deskside.kernels import quack_matmul
from deskside.kernels.quack_matmul import TILES, deinterleave, gated_matmul, interleave, tiles_of
from tests.kernels.quack_reference import TILE, use_reference

COMPILE = """
import sys, torch
major = int(sys.argv[1])
from torch._subclasses.fake_tensor import FakeTensorMode
from deskside.kernels import quack_matmul
torch.cuda.get_device_capability = lambda *device: (major, 0)
N, D, F = 1024, 768, 2048
def bf16(*size):
    return torch.empty(*size, device="cuda", dtype=torch.bfloat16)
def launch(run):
    try:
        run()
    except Exception as error:  # there is no driver to load the compiled kernel
        assert type(error).__name__ == "DynamicLibNotFoundError", repr(error)
with FakeTensorMode():
    for tile in quack_matmul.TILES[major]:
        launch(lambda: quack_matmul.matmul(bf16(N, D), bf16(F, D).T, tile))
        launch(lambda: quack_matmul.matmul(bf16(N, F), bf16(F, D), tile))
        launch(lambda: quack_matmul.gated_matmul(bf16(N, D), bf16(2 * F, D), tile))
        launch(lambda: quack_matmul.gated_matmul_gradient(bf16(N, D), bf16(D, F), bf16(N, 2 * F), tile))
"""


def test_interleaved_rows_of_gate_and_up_alternate() -> None:
    weight = torch.arange(12).view(6, 2)
    assert interleave(weight).tolist() == [[0, 1], [6, 7], [2, 3], [8, 9], [4, 5], [10, 11]]
    assert torch.equal(deinterleave(interleave(weight)), weight)


def test_a_gated_product(monkeypatch: pytest.MonkeyPatch) -> None:
    use_reference(monkeypatch)
    x, weight = torch.randn(5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    inner, hidden = gated_matmul(x, interleave(weight), TILE)
    gate, up = (x @ weight.T).chunk(2, dim=1)
    torch.testing.assert_close(inner, torch.stack((gate, up), 2).flatten(1))
    torch.testing.assert_close(hidden, torch.nn.functional.silu(gate) * up)


def test_there_are_no_tiles_for_a_cpu() -> None:
    assert tiles_of(torch.device("cpu")) == ()


@pytest.mark.skipif(find_spec("quack") is None or torch.cuda.is_available(), reason="needs quack, and no GPU")
@pytest.mark.parametrize("major", TILES)
def test_kernels_compile(major: int, tmp_path: Path) -> None:
    card = {"QUACK_ARCH": f"{major}0", "CUTE_DSL_ARCH": f"sm_{major}0a", "QUACK_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(major)],
        env={**os.environ, **card},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.rglob("*.o"))) == 4 * len(TILES[major])


def test_another_interface_of_the_package_is_one_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it refuses an epilogue whose library it does not recognise, or is an older version."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise TypeError("epilogue fn depends on a variable")

    for epilogue in (SimpleNamespace(), SimpleNamespace(gemm_epilogue=refuse, pack=None, unpack=None)):
        module = SimpleNamespace(DSLBaseError=ValueError, sigmoid=None, **vars(epilogue))
        monkeypatch.setattr(quack_matmul, "import_module", lambda name, module=module: module)
        quack_matmul.load.cache_clear()
        with pytest.raises(RuntimeError, match="quack-kernels cannot be used"):
            quack_matmul.load()
    quack_matmul.load.cache_clear()
