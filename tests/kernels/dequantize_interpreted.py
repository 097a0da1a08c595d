"""Runs the dequantiser in Triton's interpreter beside the torch reference; prints the errors as JSON."""

import json

from tests.kernels.interpreter import mend

mend()

import torch  # noqa: E402

from deskside.kernels import weights_triton  # noqa: E402
from deskside.kernels.weights import dequantize_int8  # noqa: E402
from tests.kernels.test_dequantize import SHAPES, codes_and_scales  # noqa: E402


def main() -> None:
    found = {}
    for shape in SHAPES:
        codes, scale = codes_and_scales(*shape)
        for dtype in (torch.float32, torch.bfloat16):
            expected = dequantize_int8(codes, scale, dtype)
            got = weights_triton.dequantize_int8(codes, scale, dtype)
            assert got.dtype == dtype and got.shape == expected.shape
            off = (got.double() - expected.double()).abs() / expected.double().abs().clamp(min=1e-30)
            found[f"{shape} {dtype}"] = float(off.max()) if bool(got.isfinite().all()) else None
    print(json.dumps(found))


if __name__ == "__main__":
    main()
