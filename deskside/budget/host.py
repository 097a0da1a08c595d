"""Host time of an optimizer step: launching its kernels, which a step of small passes waits for.

A pass launches the same kernels whatever its number of tokens: on an H200 with `124m` some 480, in BF16
(docs/performance.md, "Small passes"). The time for that depends on the recipe, on the number of layers, and
on the processor. With `H` the host's seconds and `D` the device's, a step takes

    (D^p + H^p)^(1/p),   p = OVERLAP

which is the larger of the two where they are far apart, and more than either where they are alike, because in
every pass there are parts in which the device is ahead and parts in which the host is. Constants:
`benchmarks/planner_fit.py`, from steps on hosts with 64 virtual Xeon cores (docs/data/2026-11-22-release).
Other processors differ: `deskside probe` measures the host and corrects `factor`; without that,
`plan/estimate.py` widens the range.
"""

from dataclasses import dataclass, replace

from deskside.budget.format_costs import quantized
from deskside.budget.shape import Shape
from deskside.budget.step_spec import StepSpec
from deskside.budget.terms import Term, leaf

# Share of a pass's launches that recomputation repeats: all of the forward, a third, or about half of that.
REPEATED = {"none": 0.0, "attention": 1 / 6, "mlp": 1 / 6, "block": 1 / 3}


@dataclass(frozen=True)
class HostTimes:
    """Seconds of the host on the reference machine.

    Attributes:
        bf16, delayed, rowwise: One layer in one pass. NVFP4 uses `delayed`: no measured step waited for its host.
        tensorwise: `delayed`, plus the difference measured without a card (docs/performance.md, "Small passes").
        uncached: Extra time of a layer whose weights are converted at each use.
        step, muon: The rest of a step, and Muon's update. No measured step waited for the latter.
        attention: One layer in one pass of compiled blocks with recomputed attention, the only case in which the host
            delayed compiled blocks.
        overlap: `p` above.
        factor: Time of this machine's host relative to the reference.
    """

    bf16: float = 2.05e-3
    delayed: float = 2.21e-3
    tensorwise: float = 2.7e-3
    rowwise: float = 5.08e-3
    uncached: float = 0.14e-3
    step: float = 6.8e-3
    muon: float = 8.0e-3
    attention: float = 2.3e-3
    overlap: float = 9.5
    factor: float = 1.0

    def times(self, factor: float) -> "HostTimes":
        """Return these times with every one multiplied."""
        return replace(self, factor=self.factor * factor)

    def of_layer(self, spec: StepSpec) -> float:
        """Return the seconds of one layer in one pass, recomputation left out."""
        if not quantized(spec.precision):
            return self.bf16
        by_recipe = {"fp8-tensorwise": self.tensorwise, "fp8-rowwise": self.rowwise}
        each = by_recipe.get(spec.precision, self.delayed)
        return each + (self.uncached if spec.copies == "use" else 0.0)


def host_seconds(shape: Shape, spec: StepSpec, host: HostTimes) -> float:
    """Return the host's seconds of a step, or 0 where it was never seen to delay one."""
    layers: float = shape.num_hidden_layers * spec.accumulation
    if isinstance(host.factor, Term):
        layers = leaf("layers x passes", layers)
    if not spec.fused:
        return host.factor * layers * host.attention if spec.activation_checkpointing == "attention" else 0.0
    again = 1 + REPEATED[spec.activation_checkpointing]
    rest = host.step + (host.muon if spec.optimizer == "muon" else 0.0)
    return host.factor * (layers * host.of_layer(spec) * again + rest)


def together(device: float, host: float, overlap: float) -> float:
    """Return the seconds of a step from those of the device and of the host."""
    longer, shorter = max(device, host), min(device, host)
    if longer == 0.0:
        return 0.0
    return longer * (1.0 + (shorter / longer) ** overlap) ** (1.0 / overlap)


def device_part(step: float, host: float, overlap: float) -> float:
    """Return the device's seconds of a measured step. Raises ValueError where the host alone takes as long."""
    if host >= step:
        raise ValueError(f"a step of {step:g} s cannot hold {host:g} s of the host")
    return step * (1.0 - (host / step) ** overlap) ** (1.0 / overlap)


def host_share(step: float, waited: float, overlap: float) -> float:
    """Return how much of a small change of the host's time changes a step of which the device waits `waited` seconds
    for the host: 0 not at all, 1 in proportion."""
    return 1.0 - ((step - waited) / step) ** overlap
