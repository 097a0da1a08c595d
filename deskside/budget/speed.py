"""Seconds of one optimizer step: the step's operators at the rates of a device.

Every operator is priced alone and the times add up, because a GPU does one after the other:

    products    FLOPs / (large matmul rate x efficiency)
    attention   FLOPs / (large matmul rate x efficiency at this head_dim)
    traffic     bytes / (bandwidth x efficiency)
    quantize    bytes / (bandwidth x efficiency of traffic)
    layers      a fixed delay for each in each pass: the tails of many small kernels

Meanwhile the host prepares what comes next (`budget/host.py`). A step of small passes ends when the host is done, not
the device; the item `host` is what the device waits for.

The large matmul rate is the one that a card sustains, measured, not the data sheet's: data-center cards hold
half to four fifths of theirs, GeForce cards all of it. The efficiencies are shares of these two rates, and
what they are worth was fitted to whole steps of this project on an H200: of compiled blocks by
`benchmarks/planner_accuracy.py fit`, of the hand-written halves by `benchmarks/planner_fit.py`. A probe of a
card corrects them there (`plan/calibrate.py`). They are not the kernels' own utilization: overlap, caches and
power limits are in them too.
"""

from dataclasses import dataclass, field, replace

from deskside.budget.format_costs import EMULATED
from deskside.budget.host import HostTimes, host_seconds, overlapped_seconds
from deskside.budget.operators import PRODUCTS, TRAFFIC, Operator, step_operators
from deskside.budget.shape import Shape
from deskside.budget.step_spec import StepSpec

ITEMS = (
    "matmul", "attention", "traffic", "quantize", "loss", "optimizer", "recompute", "communication", "offload",
    "launches", "host",
)  # fmt: skip


@dataclass(frozen=True)
class Efficiency:
    """Shares of the large matmul rate and of the data sheet's bandwidth, and the delay of a layer in seconds.

    Fitted to 32 runs of this project on an H200, torch 2.11, with compiled blocks; they predict 31 others
    with a median error of 2 %. low_precision: share of matmul and head that FP8 and NVFP4 products reach of
    their own rate; rowwise: share of that which FP8 products with a scale per row reach. windowed: share of
    the same attention's efficiency that kernels with a sliding window reach. muon_width: hidden size at which
    Newton-Schulz runs at half of optimizer_matmul.
    """

    matmul: float = 0.867
    head: float = 0.548
    attention_64: float = 0.482
    attention_128: float = 0.590
    traffic: float = 0.788
    weights: float = 0.798
    optimizer_matmul: float = 0.773
    optimizer_traffic: float = 0.619
    loss_traffic: float = 0.788
    low_precision: float = 1.0
    layer_seconds: float = 268e-6
    rowwise: float = 0.619
    windowed: float = 0.476
    muon_width: float = 0.0

    def attention(self, head_dim: int) -> float:
        """Interpolated between head_dim 64 and 128, in proportion to head_dim below 64."""
        if head_dim <= 64:
            return self.attention_64 * head_dim / 64
        share = min(1.0, (head_dim - 64) / 64)
        return self.attention_64 + share * (self.attention_128 - self.attention_64)


# Of the hand-written halves: by arithmetic from the kernels of a step of `124m` on an H200, BF16 and FP8 (docs/log.md,
# 2026-11-21), then fitted to whole steps with a pull towards that. attention_128 was not measured: its ratio to 64 is
# the compiled step's.
FUSED = Efficiency(
    matmul=0.892, head=0.881, attention_64=0.360, attention_128=0.441, traffic=0.753, weights=0.751,
    optimizer_matmul=0.894, optimizer_traffic=0.690, loss_traffic=0.574, low_precision=0.992, layer_seconds=196e-6,
    rowwise=0.637, windowed=0.471, muon_width=1457.0,
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """Rates of a device, per second.

    matmul_flops: a large product in the activations' format, sustained, FLOP/s; bandwidth: bytes/s of its memory, read
    plus written; low_precision_flops, fp4_flops: of a large FP8 and of a large NVFP4 product, None if not supported;
    single_flops: of a product in FP32, None where matmul_flops is that already; link_bandwidth: bytes/s that one GPU
    exchanges with the others while all do; host_bandwidth: to the host and back, each way with the other busy too:
    four fifths of PCIe 4 x16, modelled. compute, memory and delay multiply the times of groups of operators: this is
    where a probe's correction goes.
    """

    matmul_flops: float
    bandwidth: float
    low_precision_flops: float | None = None
    fp4_flops: float | None = None
    single_flops: float | None = None
    link_bandwidth: float = 20e9
    host_bandwidth: float = 20e9
    efficiency: Efficiency = field(default_factory=Efficiency)
    compute: float = 1.0
    memory: float = 1.0
    delay: float = 1.0
    fused: Efficiency = FUSED
    host: HostTimes = field(default_factory=HostTimes)

    def efficiency_of(self, spec: StepSpec) -> Efficiency:
        """Return the efficiencies of the execution that this step uses."""
        return self.fused if spec.fused else self.efficiency

    def corrected(self, compute: float, memory: float, delay: float) -> "Rates":
        """Return these rates with the times of products, traffic and delays multiplied."""
        return replace(
            self, compute=self.compute * compute, memory=self.memory * memory, delay=self.delay * delay
        )


def operator_seconds(operator: Operator, rates: Rates, spec: StepSpec) -> float:
    """Return seconds of one operator. Raises ValueError for a product in a format that the device lacks."""
    e, group, amount = rates.efficiency_of(spec), operator.group, operator.amount
    if group in PRODUCTS:
        peak = product_rate(operator, rates)
        # Muon iterates in bfloat16 whatever the activations are in.
        if spec.precision == "fp32" and group != "optimizer_matmul" and rates.single_flops is not None:
            peak = rates.single_flops
        share = e.attention(operator.width) if group == "attention" else float(getattr(e, group))
        if operator.runs_as in ("fp8", "nvfp4"):
            share *= e.low_precision
            if spec.precision == "fp8-rowwise" and group == "matmul":
                share *= e.rowwise
        if operator.windowed:
            share *= e.windowed
        if group == "optimizer_matmul":
            share /= 1 + e.muon_width / operator.width
        return rates.compute * amount / (peak * share)
    if group in TRAFFIC:
        share = e.traffic if group == "quantize" else float(getattr(e, group))
        return rates.memory * amount / (rates.bandwidth * share)
    if group == "layers":
        return rates.delay * amount * e.layer_seconds
    return amount / (rates.link_bandwidth if group == "communication" else rates.host_bandwidth)


def product_rate(operator: Operator, rates: Rates) -> float:
    """Return FLOP/s of a large product as this one runs. Raises ValueError for a format that the device lacks."""
    if operator.runs_as == "emulated":
        return EMULATED * rates.matmul_flops
    if operator.runs_as in ("fp8", "nvfp4"):
        rate = rates.low_precision_flops if operator.runs_as == "fp8" else rates.fp4_flops
        if rate is None:
            raise ValueError(f"this device has no {operator.runs_as.upper()} products")
        return rate
    return rates.matmul_flops


def step_seconds(shape: Shape, spec: StepSpec, rates: Rates) -> dict[str, float]:
    """Return the seconds of one optimizer step by item (`ITEMS`); the sum is the step."""
    seconds = dict.fromkeys(ITEMS, 0.0)
    for operator in step_operators(shape, spec):
        seconds[operator.item] += operator_seconds(operator, rates, spec)
    device = sum(seconds.values())
    seconds["host"] = (
        overlapped_seconds(device, host_seconds(shape, spec, rates.host), rates.host.overlap) - device
    )
    return seconds


def tokens_per_second(shape: Shape, spec: StepSpec, rates: Rates) -> float:
    """Return the tokens per second of the whole step, over all GPUs."""
    return spec.tokens / sum(step_seconds(shape, spec, rates).values())
