"""Seconds of one optimizer step: the step's operators at the rates of a device.

The time of each operator is computed separately and the times are added, because a GPU runs one after the other:

    products    FLOPs / (large matmul rate x efficiency)
    attention   FLOPs / (large matmul rate x efficiency at this head_dim)
    traffic     bytes / (bandwidth x efficiency)
    quantize    bytes / (bandwidth x efficiency of traffic)
    layers      a fixed delay per layer and pass: the tails of many small kernels
    muon        a fixed delay per step with Muon, for the same reason

Meanwhile the host launches the next kernels (`budget/host.py`). With small passes, the host takes longer than the
device; the item `host` is the time that the device waits.

The large matmul rate is the sustained rate of a card, measured if possible, not its data sheet's: data-center cards
sustain half to seven eighths of the data sheet, GeForce cards about all of it. The efficiencies are shares of this rate
and of the bandwidth. They were fitted to whole steps of this project on an H200: those of compiled blocks by
`benchmarks/planner_accuracy.py fit`, those of the fused sublayers by `benchmarks/planner_fit.py`. A probe of a card
corrects them for this card (`plan/calibrate.py`). They are not the utilization of single kernels, because they include
overlap, caches and power limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deskside.budget.format_costs import EMULATED_RATE_SHARE
from deskside.budget.host import HOST_BOUND, HostTimes, host_seconds, overlapped_seconds, replays_passes
from deskside.budget.host_memory import host_gradient_bytes, offloaded_activation_bytes
from deskside.budget.operators.operator import DELAYS, PRODUCTS, TRAFFIC, Operator
from deskside.budget.operators.step import step_operators
from deskside.budget.replicas import SLOWEST_CARD, contention, exchange
from deskside.budget.shape import Shape
from deskside.budget.sizes import Sizes
from deskside.budget.states import state_bytes, trained_weights
from deskside.budget.step_spec import StepSpec

ITEMS = (
    "matmul", "attention", "traffic", "quantize", "loss", "optimizer", "recompute", "communication", "offload",
    "launches", "host",
)  # fmt: skip


# Row length of the runs that the efficiencies were fitted to. Attention over longer rows is more efficient, because the
# tiles on the diagonal, half of which are masked, and the ends of its loops weigh less. cuDNN's kernels on an H200,
# forward and backward, reach half of their rate for long rows at about 900 tokens (`benchmarks/attention.py`, rows of
# 1,024 to 32,768 tokens, head_dim 64 and 128: docs/data/2026-11-23-experts/attention.jsonl).
FITTED_LENGTH, HALF_RATE_LENGTH = 2048, 900


@dataclass(frozen=True)
class Efficiency:
    """Shares of the large matmul rate and of the data sheet's bandwidth, and the delay of a layer in seconds.

    The defaults were fitted to 32 runs of this project on an H200 with compiled blocks (torch 2.11). They predict 31
    other runs with a median error of 2 %.

    Attributes:
        low_precision: Factor on `matmul` and `head` for FP8 and NVFP4 products, relative to the rate of their format.
        rowwise: Additional factor for FP8 products with a scale per row.
        windowed: Factor on the efficiency of attention for kernels with a sliding window, at any row length.
        muon_seconds: What a Muon step takes beyond its FLOPs and bytes: its 220 kernels are short.
        flash_chunks_64, flash_chunks_128: Factors on the efficiency of attention without a window for shared rows in
            torch's FlashAttention, at these head_dims.
        cudnn_chunks: The same in cuDNN.
    """

    matmul: float = 0.911
    head: float = 0.572
    attention_64: float = 0.341
    attention_128: float = 0.409
    traffic: float = 0.895
    weights: float = 0.687
    optimizer_matmul: float = 0.722
    optimizer_traffic: float = 0.601
    loss_traffic: float = 0.895
    low_precision: float = 1.0
    layer_seconds: float = 244e-6
    rowwise: float = 0.619
    windowed: float = 0.476
    muon_seconds: float = 0.0
    flash_chunks_64: float = 1.0
    flash_chunks_128: float = 1.0
    cudnn_chunks: float = 1.0

    def attention(self, head_dim: int, length: int = FITTED_LENGTH) -> float:
        """Return the efficiency for rows of `length` tokens: the one at 2,048, times what longer rows gain.

        By `head_dim` it is interpolated from 64 to 128, proportional below, constant above.
        """
        if head_dim <= 64:
            fitted = self.attention_64 * head_dim / 64
        else:
            share = min(1.0, (head_dim - 64) / 64)
            fitted = self.attention_64 + share * (self.attention_128 - self.attention_64)
        return fitted * length_factor(length)

    def flash_chunks(self, head_dim: int) -> float:
        """Return the factor for shared rows in FlashAttention, interpolated as in `attention`."""
        if head_dim <= 64:
            return self.flash_chunks_64
        share = min(1.0, (head_dim - 64) / 64)
        return self.flash_chunks_64 + share * (self.flash_chunks_128 - self.flash_chunks_64)


# Efficiencies of the fused sublayers. Initial values were computed from the kernel times of a step of `124m` on an
# H200, in BF16 and FP8 (docs/log.md, 2026-11-21), and used as a prior when fitting to whole steps. attention_128 was
# not measured: its ratio to attention_64 is that of the compiled step.
FUSED_EFFICIENCY = Efficiency(
    matmul=0.891, head=0.923, attention_64=0.360, attention_128=0.440, traffic=0.758, weights=0.743,
    optimizer_matmul=0.801, optimizer_traffic=0.695, loss_traffic=0.610, low_precision=1.001, layer_seconds=222e-6,
    rowwise=0.620, windowed=0.475, muon_seconds=4.22e-3,
)  # fmt: skip


def length_factor(length: int) -> float:
    """Return the efficiency of attention over rows of `length` tokens, relative to rows of 2,048."""
    return (length / (length + HALF_RATE_LENGTH)) * (1 + HALF_RATE_LENGTH / FITTED_LENGTH)


@dataclass(frozen=True)
class Rates:
    """Rates of a device, per second.

    Attributes:
        matmul_flops: Sustained FLOP/s of a large matmul in BF16, or in FP32 on a CPU.
        bandwidth: Bytes/s of the GPU's memory, read plus written.
        low_precision_flops, fp4_flops: FLOP/s of a large FP8 and a large NVFP4 product; None if not supported.
        single_flops: FLOP/s of a product in FP32; None if unknown, or if `matmul_flops` is in FP32 already.
        link_bandwidth: Bytes/s that one GPU exchanges with the others while all of them communicate.
        host_bandwidth: Bytes/s to and from the host, each way while the other is busy too. The default is four fifths
            of PCIe 4 x16, modelled.
        efficiency, fused: Efficiencies of compiled blocks and of fused sublayers.
        compute, memory, delay: Factors on the times of products, memory traffic and delays; calibration sets them.
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
    fused: Efficiency = FUSED_EFFICIENCY
    host: HostTimes = field(default_factory=HostTimes)

    def efficiency_of(self, spec: StepSpec) -> Efficiency:
        """Return the efficiencies for this step: of fused sublayers or of compiled blocks."""
        return self.fused if spec.fused else self.efficiency

    def corrected(self, compute: float, memory: float, delay: float) -> "Rates":
        """Return these rates with additional factors on the times of products, memory traffic and delays."""
        return replace(
            self, compute=self.compute * compute, memory=self.memory * memory, delay=self.delay * delay
        )


def operator_seconds(operator: Operator, rates: Rates, spec: StepSpec) -> float:
    """Return the seconds of one operator. Raises ValueError for a product in a format that the device lacks."""
    efficiency, group, amount = rates.efficiency_of(spec), operator.group, operator.amount
    if group in PRODUCTS:
        peak = product_rate(operator, rates)
        # Newton-Schulz runs in bfloat16 in FP32 training too.
        if spec.precision == "fp32" and group != "optimizer_matmul" and rates.single_flops is not None:
            peak = rates.single_flops
        share = (
            efficiency.attention(operator.width, FITTED_LENGTH if operator.windowed else spec.sequence_length)
            if group == "attention"
            else operator.grouped_rate * float(getattr(efficiency, group))
        )
        if operator.runs_as in ("fp8", "nvfp4"):
            share *= efficiency.low_precision
            if operator.rowwise:
                share *= efficiency.rowwise
        if operator.windowed:
            share *= efficiency.windowed
        elif group == "attention" and spec.context > 1:
            share *= efficiency.flash_chunks(operator.width) if spec.flash_chunks else efficiency.cudnn_chunks
        return rates.compute * amount / (peak * share)
    if group in TRAFFIC:
        share = float(getattr(efficiency, "traffic" if group == "quantize" else group))
        return rates.memory * amount / (rates.bandwidth * share)
    if group in DELAYS:
        return rates.delay * amount * float(getattr(efficiency, DELAYS[group]))
    return amount / (rates.link_bandwidth if group == "communication" else rates.host_bandwidth)


def product_rate(operator: Operator, rates: Rates) -> float:
    """Return the FLOP/s of a large matmul in the operator's format. Raises ValueError if the device lacks it."""
    if operator.runs_as == "emulated":
        return EMULATED_RATE_SHARE * rates.matmul_flops
    if operator.runs_as in ("fp8", "nvfp4"):
        rate = rates.low_precision_flops if operator.runs_as == "fp8" else rates.fp4_flops
        if rate is None:
            raise ValueError(f"this device has no {operator.runs_as.upper()} products")
        return rate
    return rates.matmul_flops


def step_seconds(shape: Shape, spec: StepSpec, rates: Rates) -> dict[str, float]:
    """Return the seconds of one optimizer step by item (`ITEMS`). They add up to the whole step."""
    spec = with_graphs_decided(shape, spec, rates)
    seconds = device_item_seconds(shape, spec, rates)
    host, device = host_seconds(shape, spec, rates.host), sum(seconds.values())
    seconds["host"] = overlapped_seconds(device, host, rates.host.overlap) - device
    return seconds


def with_graphs_decided(shape: Shape, spec: StepSpec, rates: Rates) -> StepSpec:
    """Return the step with CUDA graphs on or off. "auto" becomes what a run with enough memory decides."""
    if spec.graphs != "auto":
        return spec
    return replace(spec, graphs="on" if replays_by_itself(shape, spec, rates) else "off")


def replays_by_itself(shape: Shape, spec: StepSpec, rates: Rates) -> bool:
    """Return True if a run whose `compute.cuda_graph` is auto replays its passes, provided that it has the memory."""
    launched, replayed = replace(spec, graphs="off"), replace(spec, graphs="on")
    host, overlap = host_seconds(shape, launched, rates.host), rates.host.overlap

    def host_is_limit(step: StepSpec) -> bool:
        device = sum(device_item_seconds(shape, step, rates).values())
        return host >= HOST_BOUND * overlapped_seconds(device, host, overlap)

    # The dry step that a run measures sums the gradients of replicas after its pass, as replays do.
    return replays_passes(replayed) and host_is_limit(launched) and host_is_limit(replayed)


def device_item_seconds(shape: Shape, spec: StepSpec, rates: Rates) -> dict[str, float]:
    """Return the seconds of a step by item, as if the device never waited for the host."""
    seconds = item_seconds(shape, spec, rates)
    seconds["communication"] += replica_overhead(shape, spec, rates, seconds)
    seconds["offload"] += exposed_seconds(shape, spec, rates, sum(seconds.values()))
    return seconds


def item_seconds(shape: Shape, spec: StepSpec, rates: Rates) -> dict[str, float]:
    """Return the seconds of the step's operators by item, without exposed transfers (`exposed_seconds`)."""
    seconds = dict.fromkeys(ITEMS, 0.0)
    for operator in step_operators(shape, spec):
        seconds[operator.item] += operator_seconds(operator, rates, spec)
    return seconds


def exposed_seconds(shape: Shape, spec: StepSpec, rates: Rates, device: float) -> float:
    """Return by how much the overlapped transfers are longer than the `device` seconds of a step.

    Activations travel to the host in the forward, and back in the backward. Gradients that are summed in host memory,
    and the states of weights that are updated during the backward, travel in the backward, in both directions.
    """
    s = Sizes(shape, spec)
    forward = spec.accumulation * offloaded_activation_bytes(s) if spec.activation_offloading else 0.0
    up = forward
    down: float = 0.0
    if spec.gradients == "host":
        down = spec.accumulation * host_gradient_bytes(s)
        up += down - host_gradient_bytes(s)  # the first pass adds nothing
    elif spec.gradients == "released" and spec.offload_optimizer:
        down = state_bytes(s).streamed
        up += down
    backward = max(up, down)
    if not forward + backward:
        return 0.0
    in_forward = device / forwards_per_pass(spec)
    bandwidth = rates.host_bandwidth
    return max(0.0, forward / bandwidth - in_forward) + max(0.0, backward / bandwidth - (device - in_forward))


def forwards_per_pass(spec: StepSpec) -> int:
    """Return the time of a pass, relative to its forward.

    A backward takes twice as long as a forward, or three times if it repeats the forward.
    """
    return 4 if spec.activation_checkpointing == "block" else 3


def replica_overhead(shape: Shape, spec: StepSpec, rates: Rates, seconds: Mapping[str, float]) -> float:
    """Return the seconds that replicas add to a step, without the sums that no pass can overlap.

    They are the time by which the sums of gradients outlast the last backward and the new weights outlast the forward,
    the slowdown of the last pass by the sums, and the wait for the slowest card. seconds: `item_seconds`.
    """
    if spec.gpus == 1 or spec.sharded:
        return 0.0
    sizes = Sizes(shape, spec)
    sent = exchange(sizes, trained_weights(sizes))
    outside = ("optimizer", "communication", "offload", "host")
    one_pass = sum(value for item, value in seconds.items() if item not in outside) / spec.accumulation
    forward = one_pass / forwards_per_pass(spec)
    link = rates.link_bandwidth
    beyond = max(0.0, sent.in_backward / link - (one_pass - forward))
    beyond += max(0.0, sent.in_forward / link - forward)
    computing = sum(
        value for item, value in seconds.items() if item not in ("communication", "offload", "host")
    )
    return beyond + contention(sizes, sent) * one_pass + SLOWEST_CARD * computing


def tokens_per_second(shape: Shape, spec: StepSpec, rates: Rates) -> float:
    """Return the tokens per second over all GPUs."""
    return spec.tokens / sum(step_seconds(shape, spec, rates).values())
