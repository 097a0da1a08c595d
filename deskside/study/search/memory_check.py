"""The planner's check of a trial before it starts: a trial whose memory may not suffice is never run.

Memory is modelled as for `deskside plan` (budget/memory.py), at the high end of its range and with the smallest pass
that the configuration allows, because training takes the largest pass that fits. Speed is not needed, so it also works
on a card that was never probed.
"""

from dataclasses import dataclass, replace

from deskside.budget.host_memory import HOST_SHARE
from deskside.config.run import RunConfig
from deskside.facts import gpus
from deskside.plan.calibrate import CONTEXT_BYTES, MEMORY_SPREAD
from deskside.plan.card import PlanCard
from deskside.plan.estimate import peak_memory
from deskside.plan.setting import pass_sizes
from deskside.study.forecast import LocalMachine, setting_on
from deskside.utils.format import gib
from deskside.utils.host_memory import usable_bytes
from deskside.utils.machine import this_machine


@dataclass(frozen=True)
class MemoryCheck:
    """The memory that trials may use, in bytes.

    Attributes:
        card: This machine's device.
        capacity: Of the device, for one trial.
        spread, overhead: Of the planner's range: its half-width as a share, and bytes outside of torch's allocator.
        host_bytes: Memory of the host; None if it is unknown.
    """

    card: PlanCard
    capacity: int
    spread: float
    overhead: int
    host_bytes: int | None

    def excess(self, config: RunConfig) -> tuple[float, str]:
        """Return (how much memory is lacking as a share of what there is, the reason); (0, "") if the trial fits."""
        cpu = self.card.is_cpu or config.compute.device == "cpu"
        setting = setting_on(self.card, config)
        if config.batch.micro_tokens == "auto":
            setting = replace(setting, micro_tokens=pass_sizes(setting)[-1])
        needed = peak_memory(setting).reserved * (1 + self.spread) + self.overhead
        if needed > self.capacity:
            return (
                needed / self.capacity - 1,
                f"needs up to {gib(needed)} of {gib(self.capacity)} even with {setting.micro_tokens:,} tokens per pass",
            )
        on_host = 0 if cpu else sum(setting.host_items(self.host_bytes).values())
        if self.host_bytes is not None and on_host > HOST_SHARE * self.host_bytes:
            return on_host / (HOST_SHARE * self.host_bytes) - 1, f"needs {gib(on_host)} of the host's memory"
        return 0.0, ""


def memory_check(machine: LocalMachine, memory_fraction: float, on_cpu: bool = False) -> MemoryCheck:
    """Return the check for this machine. memory_fraction: share of the device's memory that a trial may use.

    on_cpu: the trials run on the CPU, even if there is a GPU.
    """
    host = usable_bytes()
    if machine.request is not None and not on_cpu:
        card, calibration = machine.request.card, machine.request.calibration
        spread, overhead = calibration.memory_spread, calibration.overhead_bytes
    else:
        here = this_machine()
        if on_cpu and here.device != "cpu":
            here = replace(here, device="cpu", memory_bytes=host or here.memory_bytes, free_bytes=None)
        gpu = gpus.find_device(here.card, here.memory_bytes) if here.device == "cuda" else None
        card = PlanCard(here.card, here.free_bytes or here.memory_bytes, "measured", gpu, here, host)
        spread, overhead = MEMORY_SPREAD["published"], 0 if card.is_cpu else CONTEXT_BYTES
    memory = min(card.memory_bytes, host or card.memory_bytes) if card.is_cpu else card.memory_bytes
    return MemoryCheck(card, int(memory * memory_fraction), spread, overhead, host)
