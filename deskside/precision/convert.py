"""Convert a model to a precision recipe, and back.

The model computes in the dtype of its stream of activations and casts each weight where it is used. So BF16 training
with float32 master weights is one setting: the dtype that the embeddings hand out. Norms, softmax, rotary angles and
the loss compute in float32 in every recipe, by themselves.

Low-precision products are attached as `forward_override`s: to whole sublayers where the fused kernels cover them (see
fused_sublayers.py), otherwise to single Linear layers. Parameters are neither moved nor copied. `QuantizedModel`
switches the recipe off for evaluation, BF16 warm-up steps and a late change to BF16, and on again.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deskside.config.dimensions import NATIVE_FP4_UNIT, UNIT, uncovered_reason
from deskside.config.recipes import Recipe, recipe_named
from deskside.config.sections import PrecisionConfig
from deskside.kernels.nvfp4.operand import required_multiple
from deskside.ops.composite import AddNormLinear, AttentionSublayer, MLPSublayer, RMSNorm
from deskside.ops.linear import Embedding, HeadLoss, Linear
from deskside.precision import backends, fused_sublayers
from deskside.precision.fused_sublayers import FusedAttention, FusedMLP, FusedSublayer
from deskside.precision.hardware_caps import HardwareCaps, hardware_caps
from deskside.precision.head import QuantizedHead
from deskside.precision.lora import Adapter, adapter_of
from deskside.precision.quantized_linear import QuantizedLinear, Shared
from deskside.precision.quantized_operand import PLAIN, Draws
from deskside.precision.scales import DelayedScales
from deskside.utils.errors import UsageError

Sublayer = AttentionSublayer | MLPSublayer


class QuantizedModel:
    """A model that was converted to a recipe. `fused`: BF16 steps use the fused sublayers too, where they are covered.

    `scales` are those of delayed scaling, which a resumed run needs. `backend`: another library that implements the
    recipe, or None.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, shared: Shared, fused: bool):
        self.model, self.recipe, self.shared, self.fused = model, recipe, shared, fused
        self.scales = shared.scales
        self.active = True
        self.backend: backends.PrecisionBackend | None = None
        # Each with its plan in the recipe, None where it stays in BF16, and its plan in BF16.
        self._sublayers: list[tuple[Sublayer, FusedSublayer | None, FusedSublayer]] = []
        self._linears: list[tuple[Linear, Callable[[Tensor], Tensor]]] = []
        self._plans: list[QuantizedLinear] = []
        self._norm: AddNormLinear | None = None
        self._head: tuple[HeadLoss, QuantizedHead] | None = None
        self._dropout = any(isinstance(module, Adapter) and module.dropout for module in model.modules())

    def begin_step(self, step: int) -> None:
        """Begin step number `step`. Its random numbers are a function of the step."""
        self.shared.draws.begin(step)
        self.shared.round += 1
        if self._dropout:
            torch.manual_seed(self.shared.draws.next())  # a function of seed and step, as all draws are

    def end_step(self) -> None:
        """The step is over, and weights have changed. A BF16 step leaves the history of delayed scales as it is. What
        dry steps saw stays in it until `scales.reset`."""
        self.scales.end_step(keep=self.active)
        self.shared.round += 1

    def use(self, active: bool) -> None:
        """Compute in the recipe's formats, or in BF16. Drops the converted weights of the other."""
        if active != self.active:
            self.active = active
            self._set()
            self.forget_weights()

    @contextlib.contextmanager
    def high_precision(self) -> Iterator[None]:
        """Context manager that computes in BF16, for evaluation and sampling."""
        before = self.active
        self.use(False)
        try:
            yield
        finally:
            self.use(before)

    def region(self) -> contextlib.AbstractContextManager[None]:
        """Context manager around one forward pass of the model, for backends that track passes."""
        return self.backend.region() if self.backend is not None and self.active else contextlib.nullcontext()

    def recompute(self, what: str) -> None:
        """Set activation checkpointing of the fused sublayers: "none", "attention", "mlp" or "block" (both)."""
        for index, (sublayer, plan, plain) in enumerate(self._sublayers):
            kind = "attention" if isinstance(sublayer, AttentionSublayer) else "mlp"
            again = what in (kind, "block")
            changed = None if plan is None else replace(plan, recompute=again)
            self._sublayers[index] = (sublayer, changed, replace(plain, recompute=again))
        self._set()

    def covers(self, module: nn.Module) -> bool:
        """Return whether this sublayer is fused, at least in some steps."""
        return any(
            sublayer is module and (self.fused or plan is not None) for sublayer, plan, _ in self._sublayers
        )

    def forget_weights(self) -> None:
        """Drop converted weights, because the weights changed without a new version or the memory is needed."""
        for plan in self._plans:
            plan.converted.kept = None
        if self._head is not None:
            self._head[1].converted.kept = None

    def _set(self) -> None:
        for sublayer, plan, plain in self._sublayers:
            override: Any = plan if self.active and plan is not None else (plain if self.fused else None)
            sublayer.forward_override = override
            if isinstance(sublayer, AttentionSublayer):
                sublayer.accepts_no_delta = sublayer.forward_override is not None
        for linear, override in self._linears:
            linear.forward_override = override if self.active else None
        if self._head is not None:
            loss, head = self._head
            loss.forward_override = head if self.active else None
        if self._norm is not None:
            self._norm.forward_override = partial(
                fused_sublayers.add_norm, fused_sublayers.rms_norm(self._norm.norm)
            )

    # Construction

    def _attach(self, keep: Collection[str]) -> None:
        """Plan every sublayer and Linear. keep: names of projections that stay in BF16."""
        recipe = self.recipe
        plain = recipe_named("fp32" if recipe.name == "fp32" else "bf16")
        modules = list(self.model.modules())
        layers = sum(isinstance(module, AttentionSublayer) for module in modules)
        first, last = recipe.kept_blocks(layers)
        layer = -1
        fused_linears: set[int] = set()
        for module in modules:
            if isinstance(module, AttentionSublayer):
                layer += 1
            kept = layers > 0 and (layer < first or layer >= layers - last)
            if (
                self.backend is None
                and isinstance(module, AttentionSublayer | MLPSublayer)
                and not_covered(module) is None
            ):
                build = FusedAttention if isinstance(module, AttentionSublayer) else FusedMLP
                one, two = module.input.projections[0], _last_linear(module)
                assert isinstance(one, Linear)
                fused_linears.update((id(one), id(two)))
                in_bf16, low = build(module, self._linear(one, plain), self._linear(two, plain)), None
                if not kept and recipe.quantized:
                    first_plan, second_plan = (
                        self._linear(linear, plain if _named(linear, keep) else recipe)
                        for linear in (one, two)
                    )
                    low = build(module, first_plan, second_plan)
                self._sublayers.append((module, low, in_bf16))
            elif not isinstance(module, Linear) or not recipe.quantized or id(module) in fused_linears:
                continue
            elif module.role == "matrix" and not kept and not _named(module, {*keep, "router"}):
                self._linears.append((module, self._override(module)))
        finals = [m for m in modules if isinstance(m, AddNormLinear) and not len(m.projections)]
        if self.fused and self._sublayers and finals and _is_pre_rmsnorm(finals[-1]):
            self._norm = finals[-1]

    def _override(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """Return the `forward_override` of a Linear outside of the fused sublayers."""
        if self.backend is None:
            return partial(fused_sublayers.linear, self._linear(linear, self.recipe))
        _check_size(linear, self.recipe)
        return self.backend.execution(linear)

    def _linear(self, linear: Linear, recipe: Recipe) -> QuantizedLinear:
        _check_size(linear, recipe, self.shared.caps.fp4)
        self._plans.append(QuantizedLinear(linear, recipe, self.shared, len(self._plans)))
        return self._plans[-1]


def convert(
    model: nn.Module,
    recipe: Recipe | str,
    options: PrecisionConfig | None = None,
    *,
    fused: bool = False,
    native: bool = True,
    head_native: bool | None = None,
    seed: int = 0,
    caps: HardwareCaps | None = None,
) -> QuantizedModel:
    """Convert a model to a recipe in place. Parameters and optimizer state do not change.

    Raises UsageError for a recipe that does not exist, a layer whose size its formats cannot take, or a backend that is
    not there.

    Args:
        options: What else the run asks for; its `name` is not read. Another backend's layers take neither `fused` nor
            `native`, `weight_cache` and `accumulate`.
        fused: Use the fused sublayers in BF16 too, where they cover the architecture.
        native: FP8 products on tensor cores, else emulated with the same numbers.
        head_native: The same for an FP8 head; None: as the layers.
        seed: Of stochastic rounding and random transforms.
        caps: Formats that the GPU supports besides plain FP8; None: `hardware_caps` of the device.
    """
    options = options or PrecisionConfig()
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    restore(model)
    for module in model.modules():
        if isinstance(module, Embedding):
            # A frozen table is in bfloat16; float32 must not begin with that dtype.
            wide = torch.promote_types(module.weight.dtype, torch.float32)
            module.output_dtype = wide if recipe.name == "fp32" else torch.bfloat16
    shared = Shared(
        Draws(seed),
        DelayedScales(recipe.amax_history),
        native,
        options.weight_cache,
        options.accumulate == "fused",
    )
    device = next(model.parameters()).device
    if native and recipe.quantized:
        shared.caps = hardware_caps(device) if caps is None else caps
    converted = QuantizedModel(model, recipe, shared, fused)
    if options.backend != "deskside" and recipe.quantized:
        converted.backend = backends.load(options.backend, recipe, device)
    if reason := refused(recipe, device):
        raise UsageError(f"precision {recipe.name}: {reason}")
    converted._attach(options.keep)
    if options.head == "fp8":
        losses = [module for module in model.modules() if isinstance(module, HeadLoss)]
        head_native = native if head_native is None else head_native
        converted._head = (losses[0], QuantizedHead(shared, head_native)) if losses else None
    shared.scales.build(device)
    converted._set()
    return converted


def restore(model: nn.Module) -> None:
    """Undo `convert`: the model computes in the dtype of its weights, as it was built."""
    for module in model.modules():
        if isinstance(module, Embedding):
            module.output_dtype = None
        elif isinstance(module, AttentionSublayer | MLPSublayer | Linear | AddNormLinear | HeadLoss):
            module.forward_override = None
            if isinstance(module, AttentionSublayer):
                module.accepts_no_delta = False


def refused(recipe: Recipe, device: torch.device) -> str | None:
    """Return why this recipe is unsupported on this device, or None."""
    if recipe.quantized and device.type == "cuda" and torch.version.hip is not None:
        return "its kernels are written for NVIDIA's cards, and this is AMD's; use bf16"
    return None


def not_covered(sublayer: Sublayer) -> str | None:
    """Return why the fused sublayers do not cover this one, or None if they do."""
    projections = sublayer.input.projections
    linears = [module for module in (*projections, _last_linear(sublayer)) if isinstance(module, Linear)]
    return uncovered_reason(
        rmsnorm_first=_is_pre_rmsnorm(sublayer.input),
        num_projections=len(projections),
        bias=any(linear.bias is not None for linear in linears),
        adapters=any(
            isinstance(m, Linear) and (adapter_of(m) is not None or m.weight is None)
            for m in sublayer.modules()
        ),
        head_dim=sublayer.head_dim if isinstance(sublayer, AttentionSublayer) else 1,
    )


def _last_linear(sublayer: Sublayer) -> Linear:
    return sublayer.output if isinstance(sublayer, AttentionSublayer) else sublayer.output.projection


def _named(linear: Linear, names: Collection[str]) -> bool:
    """Return whether one of the projections in this weight is among `names`."""
    return any(s.name in names for s in linear.slices)


def _is_pre_rmsnorm(operator: AddNormLinear) -> bool:
    return isinstance(operator.norm, RMSNorm) and operator.position == "pre"


def _check_size(linear: Linear, recipe: Recipe, fp4: bool = False) -> None:
    """y = x W^T sums over the inputs in the output, and over the outputs in the input gradient."""
    name = " and ".join(s.name for s in linear.slices)
    sides = (
        ("in", linear.in_features, recipe.output),
        ("out", linear.out_features, recipe.input_gradient),
    )
    every = max(
        (NATIVE_FP4_UNIT if fp4 and f == "nvfp4" else UNIT for f in recipe.formats - PLAIN.keys()), default=1
    )
    for side, size, product in sides:
        needed = max(every, *(required_multiple(o) for o in (product.left, product.right) if o.quantized), 1)
        if size % needed:
            raise UsageError(
                f"precision {recipe.name}: {name} has {size} {side}put features, which must be divisible by {needed}; "
                f"change the model's sizes, or use {'--precision.native never' if fp4 else 'bf16'}"
            )
