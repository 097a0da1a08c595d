"""The start of a process that measures an arm of the step benchmark, as `deskside train` starts. Imports no torch."""

from typing import Any

from deskside.utils.quick_start import create_cuda_context, quick_imports


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Import torch and measure the arm; see `step_measure.measure`."""
    if spec.get("device") != "cpu":
        create_cuda_context()
    with quick_imports():
        from benchmarks import step_measure

    return step_measure.measure(spec)
