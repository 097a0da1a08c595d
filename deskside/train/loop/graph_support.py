"""Checks of the device, execution mode and attention backends of a run with `compute.cuda_graph`.

`config/run_checks.py` refuses what the configuration alone rules out. With `auto`, a run that cannot be captured has no
graphs instead.
"""

import torch

from deskside.config.run import RunConfig
from deskside.config.run_checks import graph_problem
from deskside.kernels.attention.context import backend_named
from deskside.train.attention_backends import AttentionBackends
from deskside.utils.errors import UsageError


def check_execution(device: torch.device, mode: str) -> None:
    """Raise UsageError unless passes on this device in this mode (see `setup.Execution`) can be captured."""
    if device.type != "cuda":
        raise UsageError(
            f"compute.cuda_graph: needs a GPU, and this run is on a {device.type.upper()}; use --compute.cuda_graph off"
        )
    if mode != "fused":
        raise UsageError(
            f"compute.cuda_graph: needs fused kernels, and this run uses compute.compile {mode}; leave it out, or use "
            "--compute.compile fused"
        )


def check_attention(attention: AttentionBackends) -> None:
    """Raise UsageError if an attention backend of the run cannot be captured."""
    if name := _uncapturable(attention):
        raise UsageError(
            f"compute.cuda_graph: cannot contain the attention backend {name}, which was chosen for this run; use "
            "another --compute.attention, or --compute.cuda_graph off"
        )


def can_capture(config: RunConfig, device: torch.device, fused: bool, attention: AttentionBackends) -> bool:
    """Return True if the passes of this run can be captured. fused: the run uses fused kernels."""
    return device.type == "cuda" and fused and not graph_problem(config) and not _uncapturable(attention)


def _uncapturable(attention: AttentionBackends) -> str:
    """Return the first attention backend that cannot be captured, or ""."""
    pairs = [(attention.full, attention.windowed), *attention.stages.values()]
    for name in (name for pair in pairs for name in pair):
        # flex calls functions that torch.compile compiles and may compile again; shared rows wait for other processes.
        if name is not None and (name == "flex" or backend_named(name).shared_rows):
            return name
    return ""
