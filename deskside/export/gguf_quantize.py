"""GGUF types of 4 to 6 bits, by llama.cpp's own quantizer through llama-cpp-python.

The gguf package, which writes the other types, reads these but does not write them. Which tensor gets how many bits
(more for the head, the values and the down projections of some layers) and how scales are searched is llama.cpp's
choice and changes with its versions; a copy would fall behind. Without an importance matrix, it weighs all columns
of a matrix by the size of their weights.
"""

import ctypes
import os
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deskside.utils.errors import RunError, UsageError

BLOCK = 256  # values of a row that share scales
QuantizedType = Literal["q4_k_m", "q5_k_m", "q6_k"]
QUANTIZED: tuple[QuantizedType, ...] = ("q4_k_m", "q5_k_m", "q6_k")
# Upper bounds of |read - written| / |written| of a tensor (Frobenius norms), by the tensor's type: about twice what
# normally distributed weights have. A larger error means that the file is damaged.
LARGEST_ERROR = {
    "F32": 0.0,
    "F16": 1e-3,
    "Q8_0": 0.015,
    "Q6_K": 0.045,
    "Q5_K": 0.08,
    "Q5_1": 0.09,
    "Q5_0": 0.1,
    "Q4_K": 0.16,
}


def check_quantizer() -> None:
    """Raise UsageError if llama-cpp-python is missing."""
    try:
        import llama_cpp  # noqa: F401
    except ModuleNotFoundError:
        raise UsageError(
            f"--dtype {', '.join(QUANTIZED)}: need llama.cpp's quantizer; install it: pip install "
            "'deskside[llama-cpp]' (builds it with cmake, some minutes)"
        ) from None


def quantize(source: Path, target: Path, dtype: QuantizedType) -> tuple[str, ...]:
    """Write the float32 file `source` in another type, and compare what is read back.

    Returns the names of the tensors whose rows are not whole blocks of `BLOCK` values, which llama.cpp stores in a type
    with smaller blocks and more bits. Raises RunError if llama.cpp cannot write the file, or it reads back differently.
    """
    import gguf
    import llama_cpp

    callback, messages = _log()
    messages.clear()
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = gguf.LlamaFileType[f"MOSTLY_{dtype.upper()}"]
    options.nthread = os.cpu_count() or 1
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options))
    if failed:
        reason = next((text for text in reversed(messages) if "fail" in text), "no reason given")
        raise RunError(f"{target.name}: llama.cpp could not write it: {reason}")
    return _compare(source, target)


@cache
def _log() -> tuple[Any, deque[str]]:
    """Return a callback that keeps llama.cpp's last messages, and these. It must live as long as llama.cpp has it."""
    import llama_cpp

    messages: deque[str] = deque(maxlen=200)

    def keep(level: int, text: bytes, user_data: Any) -> None:
        messages.append(text.decode(errors="replace").strip())

    return llama_cpp.llama_log_callback(keep), messages


def _compare(source: Path, target: Path) -> tuple[str, ...]:
    import gguf

    written, read = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors} for file in (source, target)
    )
    if written.keys() != read.keys():
        raise RunError(f"{target.name}: has not all tensors; check the disk")
    for name, tensor in read.items():
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(written[name].data.shape)
        original = written[name].data
        largest = LARGEST_ERROR[tensor.tensor_type.name] * float(np.linalg.norm(original))
        if not float(np.linalg.norm(values - original)) <= largest:  # `not`: a NaN is an error too
            raise RunError(f"{target.name}: {name} reads back differently; check the disk")
    return tuple(name for name, tensor in read.items() if len(tensor.shape) > 1 and tensor.shape[0] % BLOCK)
