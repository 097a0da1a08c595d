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

import torch
from torch import Tensor, nn

from deskside.config.dimensions import NATIVE_FP4_UNIT, UNIT, uncovered_reason
from deskside.config.recipes import Recipe, recipe_named
from deskside.ops.composite import AddNormLinear, AttentionSublayer, MLPSublayer
from deskside.ops.linear import Embedding, HeadLoss, Linear
from deskside.ops.norm import RMSNorm
from deskside.precision import backends, fused_sublayers
from deskside.precision.fused_sublayers import FusedAttention, FusedMLP
from deskside.precision.hardware_caps import HardwareCaps, hardware_caps
from deskside.precision.head import QuantizedHead
from deskside.precision.lora import Adapter, adapter_of
from deskside.precision.nvfp4 import multiple
from deskside.precision.quantized_linear import QuantizedLinear, Shared
from deskside.precision.quantized_operand import PLAIN, Draws
from deskside.precision.scales import DelayedScales
from deskside.utils.errors import UsageError

Sublayer = AttentionSublayer | MLPSublayer
Plan = FusedAttention | FusedMLP


class QuantizedModel:
    """A model that was converted to a recipe. `fused`: BF16 steps use the fused sublayers too, where they are
    covered."""

    def __init__(self, model: nn.Module, recipe: Recipe, shared: Shared, fused: bool):
        self.model, self.recipe, self.shared, self.fused = model, recipe, shared, fused
        self.active = True
        self.backend: backends.PrecisionBackend | None = None  # another library that implements the recipe
        self._sublayers: list[tuple[Sublayer, Plan | None, Plan]] = []
        self._linears: list[tuple[Linear, Callable[[Tensor], Tensor]]] = []
        self._plans: list[QuantizedLinear] = []
        self._norm: AddNormLinear | None = None
        self._head: tuple[HeadLoss, QuantizedHead] | None = None
        self._dropout = any(isinstance(module, Adapter) and module.dropout for module in model.modules())

    @property
    def quantized_layers(self) -> int:
        """Number of Linear layers whose products are in fewer than 16 bits."""
        if self.backend is not None:
            return len(self._linears)
        return sum(not plan.plain for plan in self._plans)

    def begin_step(self, step: int) -> None:
        """Begin step number `step`. Its random numbers are a function of the step."""
        self.shared.draws.begin(step)
        self.shared.round += 1
        if self._dropout:
            torch.manual_seed(self.shared.draws.next())  # a function of seed and step, as all draws are

    def agree(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Share the amax of all replicas, so that they get the same scales and detect the same overflow.

        `largest`: computes the maximum over all replicas in place."""
        self.shared.scales.agree(largest)

    def trouble(self) -> Tensor:
        """Return a float32 scalar: 0, or NaN if saturation has hidden a non-finite value."""
        return self.shared.scales.trouble()

    def end_step(self) -> None:
        """The step is over, and weights have changed. A BF16 step leaves the history of delayed scales as it is. What
        dry steps saw stays in it until `reset_scales`."""
        self.shared.scales.end_step(keep=self.active)
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

    def reset_scales(self) -> None:
        """Reset the amax history of delayed scaling."""
        self.shared.scales.reset()

    def forget_weights(self) -> None:
        """Drop converted weights, because the weights changed without a new version or the memory is needed."""
        for plan in self._plans:
            plan.converted.forget()
        if self._head is not None:
            self._head[1].converted.forget()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the history of delayed scales, which a resumed run needs; empty for other recipes."""
        return self.shared.scales.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises RunError for the state of another recipe."""
        self.shared.scales.load_state_dict(state)

    def remove(self) -> None:
        """Restore the ordinary forward, in the dtype of the weights."""
        restore(self.model)

    def _set(self) -> None:
        for sublayer, plan, plain in self._sublayers:
            sublayer.forward_override = (
                plan if self.active and plan is not None else (plain if self.fused else None)
            )
            if isinstance(sublayer, AttentionSublayer):
                sublayer.accepts_no_delta = sublayer.forward_override is not None
        for linear, execution in self._linears:
            linear.forward_override = execution if self.active else None
        if self._head is not None:
            loss, plan_of_head = self._head
            loss.forward_override = plan_of_head if self.active else None
        if self._norm is not None:
            self._norm.forward_override = partial(
                fused_sublayers.add_norm, fused_sublayers.rms_norm(self._norm.norm)
            )


def convert(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    fused: bool = False,
    native: bool = True,
    cache: bool = True,
    accumulate_inside: bool = False,
    head: bool = False,
    head_native: bool | None = None,
    keep: Collection[str] = (),
    seed: int = 0,
    backend: str = "deskside",
    found: HardwareCaps | None = None,
) -> QuantizedModel:
    """Convert a model to a recipe in place. Parameters and optimizer state do not change.

    fused: use the fused sublayers in BF16 too, where they cover the architecture. native: FP8 products on tensor cores,
    else emulated with the same numbers. cache: convert weights once per optimizer step. accumulate_inside: add
    weight gradients to `grad` inside of BF16 products. head: the output head in FP8 too; head_native: its products on
    tensor cores, None: as those of the layers. keep: names of projections that stay in BF16. seed: of stochastic
    rounding and random transforms. backend: whose layers carry a quantised recipe out; another library's take none of
    fused, native, cache and accumulate_inside. found: what the card takes natively besides plain FP8; None: ask it.
    Raises UsageError for a recipe that does not exist, a layer whose size its formats cannot take, or a backend that is
    not there.
    """
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    restore(model)
    for module in model.modules():
        if isinstance(module, Embedding):
            # A frozen table is in bfloat16; float32 must not begin with that dtype.
            wide = torch.promote_types(module.weight.dtype, torch.float32)
            module.output_dtype = wide if recipe.name == "fp32" else torch.bfloat16
    shared = Shared(Draws(seed), DelayedScales(recipe.amax_history), native, cache, accumulate_inside)
    device = next(model.parameters()).device
    if native and recipe.quantized:
        shared.units = hardware_caps(device) if found is None else found
    applied = QuantizedModel(model, recipe, shared, fused)
    if backend != "deskside" and recipe.quantized:
        applied.backend = backends.load(backend, recipe, device)
    _plan(applied, keep)
    if head:
        losses = [module for module in model.modules() if isinstance(module, HeadLoss)]
        head_native = native if head_native is None else head_native
        applied._head = (losses[0], QuantizedHead(shared, head_native)) if losses else None
    shared.scales.build(device)
    applied._set()
    return applied


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
    last = sublayer.output if isinstance(sublayer, AttentionSublayer) else sublayer.output.projection
    linears = [module for module in (*sublayer.input.projections, last) if isinstance(module, Linear)]
    return uncovered_reason(
        rmsnorm_first=_simple(sublayer.input),
        num_projections=len(sublayer.input.projections),
        bias=any(linear.bias is not None for linear in linears),
        adapters=any(
            isinstance(m, Linear) and (adapter_of(m) is not None or m.weight is None)
            for m in sublayer.modules()
        ),
        head_dim=sublayer.head_dim if isinstance(sublayer, AttentionSublayer) else 1,
    )


def _plan(applied: QuantizedModel, keep: Collection[str]) -> None:
    recipe = applied.recipe
    if reason := refused(recipe, next(applied.model.parameters()).device):
        raise UsageError(f"precision {recipe.name}: {reason}")
    plain = recipe_named("fp32" if recipe.name == "fp32" else "bf16")
    modules = list(applied.model.modules())
    layers = sum(isinstance(module, AttentionSublayer) for module in modules)
    first, last = recipe.kept_blocks(layers)
    layer = -1
    covered: set[int] = set()
    for module in modules:
        if isinstance(module, AttentionSublayer):
            layer += 1
        own = applied.backend is None
        if own and isinstance(module, AttentionSublayer | MLPSublayer) and not_covered(module) is None:
            two = _linears_of(module)
            covered.update(id(linear) for linear in two)
            kept = layer < first or layer >= layers - last or not recipe.quantized
            plans = [_linear(applied, linear, plain) for linear in two]
            other = None
            if not kept:
                other = [_linear(applied, one, plain if _named(one, keep) else recipe) for one in two]
            build = FusedAttention if isinstance(module, AttentionSublayer) else FusedMLP
            applied._sublayers.append(
                (module, build(module, *other) if other else None, build(module, *plans))  # type: ignore[arg-type]
            )
        elif isinstance(module, Linear) and recipe.quantized and id(module) not in covered:
            kept = layers > 0 and (layer < first or layer >= layers - last)
            if module.role == "matrix" and not kept and not _named(module, {*keep, "router"}):
                applied._linears.append((module, _execution(applied, module)))
    finals = [m for m in modules if isinstance(m, AddNormLinear) and not len(m.projections)]
    if applied.fused and applied._sublayers and finals and _simple(finals[-1]):
        applied._norm = finals[-1]


def _named(linear: Linear, names: Collection[str]) -> bool:
    """Return whether one of the projections in this weight is among `names`."""
    return any(s.name in names for s in linear.slices)


def _simple(operator: AddNormLinear) -> bool:
    """Return whether the fused kernel supports this add and norm."""
    return isinstance(operator.norm, RMSNorm) and operator.position == "pre"


def _linears_of(sublayer: Sublayer) -> tuple[Linear, Linear]:
    first = sublayer.input.projections[0]
    last = sublayer.output if isinstance(sublayer, AttentionSublayer) else sublayer.output.projection
    assert isinstance(first, Linear)
    return first, last


def _execution(applied: QuantizedModel, linear: Linear) -> Callable[[Tensor], Tensor]:
    if applied.backend is None:
        return partial(fused_sublayers.linear, _linear(applied, linear, applied.recipe))
    _check_size(linear, applied.recipe)
    return applied.backend.execution(linear)


def _linear(applied: QuantizedModel, linear: Linear, recipe: Recipe) -> QuantizedLinear:
    _check_size(linear, recipe, applied.shared.units.fp4)
    plan = QuantizedLinear(linear, recipe, applied.shared, len(applied._plans))
    applied._plans.append(plan)
    return plan


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
        needed = max(every, *(multiple(o) for o in (product.left, product.right) if o.quantized), 1)
        if size % needed:
            raise UsageError(
                f"precision {recipe.name}: {name} has {size} {side}put features, which must be divisible by {needed}; "
                f"change the model's sizes, or use {'--precision.native never' if fp4 else 'bf16'}"
            )
