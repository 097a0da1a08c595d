"""Host time of an optimizer step: the time the CPU needs to launch the step's kernels.

The number of launches of a pass hardly depends on its number of tokens (about 420 for 12 layers in BF16;
docs/performance.md, "Small passes"), so with small passes the GPU waits for the host. Launch time depends on the
recipe, the number of layers and the processor. If the host needs `H` seconds and the device `D`, a step takes

    (D^p + H^p)^(1/p),   p = HostTimes.overlap

seconds. p = 1 would mean that host and device take turns, p -> infinity that they overlap perfectly: max(D, H). With a
large finite p, the step is close to the maximum when D and H differ much, and longer when they are similar,
because the device waits in some parts of a pass and the host in others. The constants were fitted by
`benchmarks/planner_fit.py` to steps on hosts with 64 virtual Xeon cores (docs/data/2026-11-22-release,
2026-11-23-card). On other processors, `deskside probe` measures the host and sets `factor`; without a probe,
`plan/estimate.py` widens the range.
"""

from dataclasses import dataclass, replace

from deskside.budget.format_costs import product_formats, quantized
from deskside.budget.shape import Shape
from deskside.budget.step_spec import StepOptions, StepSpec
from deskside.budget.terms import Term, leaf

# Passes become CUDA graphs (`compute.cuda_graph` auto) if launching takes at least this share of a step.
HOST_BOUND = 0.9
# Share of a pass's launches that activation checkpointing repeats. The forward is a third of a pass; attention and MLP
# are about half of the forward each.
REPEATED = {"none": 0.0, "attention": 1 / 6, "mlp": 1 / 6, "block": 1 / 3}


@dataclass(frozen=True)
class HostTimes:
    """Host seconds on the reference machine, and the factor of this machine.

    Attributes:
        bf16, delayed, tensorwise, rowwise: Seconds per layer and pass with fused sublayers.
        nvfp4: The same for NVFP4 that is emulated. Native NVFP4, which launches less, was not measured.
        uncached: Additional seconds per layer and pass if weights are quantized at each use.
        step: Seconds per step outside the layers.
        muon: Additional seconds per step of Muon's update.
        compiled_attention: Seconds per layer and pass of compiled blocks with activation checkpointing of attention.
            No other compiled blocks were host-bound.
        overlap: The exponent `p` above.
        factor: Host time of this machine relative to the reference.
    """

    bf16: float = 1.75e-3
    delayed: float = 2.39e-3
    tensorwise: float = 4.11e-3
    rowwise: float = 4.75e-3
    nvfp4: float = 4.36e-3
    uncached: float = 0.12e-3
    step: float = 3.3e-3
    muon: float = 5.5e-3
    compiled_attention: float = 2.3e-3
    overlap: float = 11.5
    factor: float = 1.0

    def scaled(self, factor: float) -> "HostTimes":
        """Return the times of a host that takes `factor` times as long."""
        return replace(self, factor=self.factor * factor)

    def layer_seconds(self, spec: StepSpec) -> float:
        """Return the reference seconds of one fused layer in one pass, without recomputation."""
        if not quantized(spec.precision):
            return self.bf16
        by_recipe = {
            "fp8": self.delayed,
            "fp8-delayed": self.delayed,
            "fp8-tensorwise": self.tensorwise,
            "fp8-rowwise": self.rowwise,
        }
        seconds = by_recipe.get(spec.precision, self.nvfp4)
        return seconds + (self.uncached if spec.copies == "use" else 0.0)


def host_seconds(shape: Shape, spec: StepSpec, host: HostTimes) -> float:
    """Return the host seconds of a step. 0 for compiled blocks that were never host-bound."""
    layers: float = shape.num_hidden_layers * (0 if replays_passes(spec) else spec.accumulation)
    if isinstance(host.factor, Term):  # the planner's explanation shows the product under one name
        layers = leaf("layers x passes", layers)
    if not spec.fused:
        if spec.activation_checkpointing != "attention":
            return 0.0
        return host.factor * layers * host.compiled_attention
    repeats = 1 + REPEATED[spec.activation_checkpointing]
    per_step = host.step + (host.muon if spec.optimizer == "muon" else 0.0)
    return host.factor * (layers * host.layer_seconds(spec) * repeats + per_step)


def can_replay(step: StepOptions) -> bool:
    """Return True if the options that a plan may change allow fused passes to be CUDA graphs."""
    plain = step.weights == "float32" and step.gradients == "device" and not step.activation_offloading
    return plain and not step.sharded and "nvfp4" not in product_formats(step.precision)


def replays_passes(spec: StepSpec) -> bool:
    """Return True if passes are CUDA graphs."""
    return spec.graphs == "on" and spec.fused and can_replay(spec)


def overlapped_seconds(device: float, host: float, overlap: float) -> float:
    """Return the seconds of a step from its device seconds and host seconds."""
    longer, shorter = max(device, host), min(device, host)
    if longer == 0.0:
        return 0.0
    return longer * (1.0 + (shorter / longer) ** overlap) ** (1.0 / overlap)


def device_seconds(step: float, host: float, overlap: float) -> float:
    """Return the device seconds of a measured step, the inverse of `overlapped_seconds`.

    Raises ValueError unless the host takes less time than the step.
    """
    if host >= step:
        raise ValueError(f"host time {host:g} s is not shorter than the step, {step:g} s")
    return step * (1.0 - (host / step) ** overlap) ** (1.0 / overlap)


def host_sensitivity(step: float, waited: float, overlap: float) -> float:
    """Return d log(step) / d log(host): 0 if host time does not matter, 1 if step time is proportional to it.

    waited: seconds of the step in which the device waits for the host.
    """
    return 1.0 - ((step - waited) / step) ** overlap
