"""NVIDIA's own Python reference of NVFP4, from the plain transformer-engine package, on a CPU.

The package imports compiled parts that are missing, so the three files with the reference are loaded by path, with
empty replacements for the four modules that they import. Nothing stays in sys.modules.
"""

import importlib.util
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.precision.te_signatures import folder

PACKAGE = "transformer_engine.pytorch"
RECIPES = f"{PACKAGE}.custom_recipes"


class _Quantizer:
    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


@cache
def reference() -> Any:
    """Return the module reference_nvfp4. Skips the test if the package is not installed."""
    sources = folder() / "pytorch" / "custom_recipes"
    empty: dict[str, Any] = {
        name: ModuleType(name)
        for name in (
            "transformer_engine",
            PACKAGE,
            RECIPES,
            f"{PACKAGE}.quantized_tensor",
            f"{PACKAGE}.tensor",
            f"{PACKAGE}.tensor.utils",
        )
    }
    empty[f"{PACKAGE}.quantized_tensor"].Quantizer = _Quantizer
    empty[f"{PACKAGE}.quantized_tensor"].QuantizedTensorStorage = object
    empty[f"{PACKAGE}.tensor.utils"].is_custom = lambda x=None: True
    for module in empty.values():
        module.__path__ = []
    with patch.dict(sys.modules, empty):
        for name in ("gemm", "reference_utils", "reference_nvfp4"):
            spec = importlib.util.spec_from_file_location(f"{RECIPES}.{name}", sources / f"{name}.py")
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            setattr(sys.modules[RECIPES], name, module)
        return module


def quantizer(tile: int, hadamard: bool = False, four_over_six: bool = False) -> Any:
    """Return a quantizer with tiles of 1x16 or 16x16. The transform applies only to the columnwise copy (`data_t`)."""
    module = reference()
    return module.NVFP4QuantizerRef(
        dtype=module.reference_utils.Fp4Formats.E2M1,
        quant_tile_shape=(tile, 16),
        with_rht=hadamard,
        nvfp4_use_4over6=four_over_six,
        nvfp4_e4m3_max=256 if four_over_six else 448,
        nvfp4_4over6_err_mode="MSE",
    )


def quantized(by: Any, x_NK: Tensor) -> Any:
    """Return by.quantize(x), without oneDNN, whose bfloat16 products (the transform) flush subnormals to zero."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration")
        with torch.backends.mkldnn.flags(enabled=False):
            return by.quantize(x_NK)


def multiply(quantized_by: Any, x: Any, w: Any, weight_gradient: bool = False) -> Tensor:
    """Return x w^T of two quantized matrices in float32, or x^T w from their columnwise copies."""
    module = reference()
    kind = module.gemm.GEMMType.WGRAD if weight_gradient else module.gemm.GEMMType.FPROP
    x_data, x_scale = (x.data_t, x.scale_t) if weight_gradient else (x.data, x.scale)
    w_data, w_scale = (w.data_t, w.scale_t) if weight_gradient else (w.data, w.scale)
    result = quantized_by.qgemm(
        x_data, w_data, None, torch.float32, x_scale, w_scale, gemm_type=kind, qresult_x=x, qresult_w=w
    )
    assert isinstance(result, Tensor)
    return result
