"""Programmatic dependent launch: a kernel starts while its predecessor still runs.

The kernels of a decoding step take a few microseconds each, and between two of them a GPU otherwise idles for about one
more. A kernel launched with `launch_pdl` starts as soon as all blocks of its predecessor have called
`gdc_launch_dependents`, which most do first, so several kernels may be waiting at a time. `gdc_wait` waits until the
predecessor has finished and its results can be read. Because each kernel waits, all earlier ones have finished too.
Before `gdc_wait`, a kernel must write nothing, and may read only what was written before the last kernel without an
early start. In a decoding step, that is the embedding, so weights, positions, page tables and the keys of earlier
tokens may be read.

It needs compute capability 9.0 (CUDA C++ programming guide, "programmatic dependent launch and synchronization"). On an
H200 it makes decoding with 124m 1 to 3 % faster (docs/performance.md). With the many blocks of a prompt, it made the
first token of 16 prompts 1 ms later: blocks that wait occupy the processors of those they wait for.
"""

from typing import Any

import torch

ENABLED = True  # False with benchmarks.decode --no-early-start, to compare
MAX_BLOCKS = 2048  # measured: a grid of 1,152 gains, one of 9,216 loses


def launch_options(device: torch.device, blocks: int) -> dict[str, Any]:
    """Return keyword arguments of a launch: the constant PDL of the kernel, and if it is True Triton's `launch_pdl`.

    blocks: of the whole grid.
    """
    from deskside.kernels.fused.triton_common import INTERPRETED

    if not ENABLED or blocks > MAX_BLOCKS or device.type != "cuda" or INTERPRETED.value:
        return {"PDL": False}
    if torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
