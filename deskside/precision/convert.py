"""Convert a model to a precision recipe, and back.

The model computes in the dtype of its activations and casts each weight where it is used. The activations start with
the output dtype of the embeddings, so this dtype alone selects BF16 training with float32 master weights. Norms,
softmax, rotary angles and the loss compute in float32 in every recipe, independently of this module.

Low-precision products are attached as `forward_override`s: to whole sublayers where the fused kernels support them
(fused_sublayers.py), otherwise to single Linear layers. Parameters are neither moved nor copied. `QuantizedModel` can
switch between the recipe and BF16: for evaluation, for BF16 warm-up steps, and for BF16 at the end of a run.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from deskside.config.dimensions import NATIVE_FP4_UNIT, UNIT, uncovered_reason
from deskside.config.recipes import Recipe, expert_recipe, recipe_named
from deskside.config.sections import PrecisionConfig
from deskside.kernels.choose_matmul import MatmulChoice, MatmulShape
from deskside.kernels.nvfp4.operand import required_multiple
from deskside.ops.composite import AddNormLinear, AttentionSublayer, MLPSublayer, RMSNorm, Sublayer
from deskside.ops.linear import Embedding, HeadLoss, Linear
from deskside.ops.moe import ROUTING_PROJECTIONS, Experts, MoESublayer
from deskside.precision import backends, fused_layers
from deskside.precision.expert_linear import ExpertLinear
from deskside.precision.frozen import FrozenExperts
from deskside.precision.fused_attention import FusedAttention
from deskside.precision.fused_mlp import FusedMLP
from deskside.precision.fused_moe import FusedMoE
from deskside.precision.fused_shared_expert import FusedSharedExpert
from deskside.precision.fused_sublayers import FusedSublayer, rms_norm
from deskside.precision.hardware_caps import HardwareCaps, hardware_caps
from deskside.precision.head import QuantizedHead
from deskside.precision.lora import AdaptedExperts, Adapter, adapters_of
from deskside.precision.quantized_linear import ConvertedWeight, QuantizedLinear, Quantizer, Shared
from deskside.precision.quantized_operand import UNQUANTIZED, Draws
from deskside.precision.scales import DelayedScales
from deskside.utils.errors import UsageError

Fused = FusedSublayer | FusedMoE


class QuantizedModel:
    """A model that was converted to a recipe.

    fused: unquantized steps use fused sublayers too, where the architecture allows it. scales: the state of delayed
    scaling, which checkpoints contain. backend: another library that implements the recipe, or None.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, shared: Shared, fused: bool):
        self.model, self.recipe, self.shared, self.fused = model, recipe, shared, fused
        self.scales = shared.scales
        self.active = True
        self.backend: backends.PrecisionBackend | None = None
        # (sublayer, its plan in the recipe or None if it stays in BF16, its plan in BF16)
        self._sublayers: list[tuple[Sublayer, Fused | None, Fused]] = []
        self._linears: list[tuple[Linear, Callable[[Tensor], Tensor]]] = []
        self._numbers = itertools.count()  # of layers, for their random numbers
        self._converted: list[ConvertedWeight] = []
        self._norm: AddNormLinear | None = None
        self._head: tuple[HeadLoss, QuantizedHead] | None = None
        self._dropout = any(isinstance(module, Adapter) and module.dropout for module in model.modules())

    def begin_step(self, step: int) -> None:
        """Begin step number `step`. All random numbers of the step are a function of the seed and this number."""
        self.shared.draws.begin(step)
        self.shared.round += 1
        if self._dropout:
            torch.manual_seed(self.shared.draws.next())

    def end_step(self) -> None:
        """End a step, after which weights have changed. A BF16 step leaves the history of delayed scales unchanged. Dry
        steps do add to the history; `scales.reset` clears it afterwards."""
        self.scales.end_step(keep=self.active)
        self.shared.round += 1

    def set_active(self, active: bool) -> None:
        """Compute in the recipe's formats (True) or unquantized (False). A change drops all cached weights."""
        if active != self.active:
            self.active = active
            self._set_overrides()
            self.forget_weights()

    @contextlib.contextmanager
    def high_precision(self) -> Iterator[None]:
        """Context manager that computes unquantized, for evaluation and sampling."""
        was_active = self.active
        self.set_active(False)
        try:
            yield
        finally:
            self.set_active(was_active)

    def forward_context(self) -> contextlib.AbstractContextManager[None]:
        """Context manager around one forward pass of the model, for backends that track passes."""
        if self.backend is None or not self.active:
            return contextlib.nullcontext()
        return self.backend.forward_context()

    def set_checkpointing(self, checkpointing: str) -> None:
        """Set activation checkpointing of the fused sublayers: "none", "attention", "mlp" or "block" (both)."""
        for index, (sublayer, plan, bf16_plan) in enumerate(self._sublayers):
            kind = "attention" if isinstance(sublayer, AttentionSublayer) else "mlp"
            recompute = checkpointing in (kind, "block")
            plan = None if plan is None else replace(plan, recompute=recompute)
            self._sublayers[index] = (sublayer, plan, replace(bf16_plan, recompute=recompute))
        self._set_overrides()

    def set_mlp_chunk(self, tokens: int) -> None:
        """Compute fused dense MLPs for this number of tokens at a time. They must be recomputed and not quantized."""
        for index, (sublayer, plan, bf16_plan) in enumerate(self._sublayers):
            if isinstance(bf16_plan, FusedMLP):
                assert bf16_plan.gate_tiles is None, "chunks are set before tiles"
                self._sublayers[index] = (sublayer, plan, replace(bf16_plan, chunk_tokens=tokens))
        self._set_overrides()

    def matmul_shape(self, tokens: int) -> MatmulShape | None:
        """Return the unquantized products of the fused sublayers that can have tiles; None if there are none.

        Weights must be float32: they are copied to BF16 anyway, and the copy can be interleaved at no further cost.
        """
        plans = [plan for _, _, plan in self._sublayers if self._can_have_tiles(plan)]
        weights, gated = set(), set()
        for plan in plans:
            weights |= {_shape(plan.first.linear), _shape(plan.second.linear)}
            if self._can_fuse_gate(plan):
                gated.add(_shape(plan.second.linear))
        if self.recipe.name != "bf16" or not plans or len(gated) > 1:
            return None
        return MatmulShape(tokens, tuple(sorted(weights)), gated.pop() if gated else None)

    def use_matmul(self, choice: MatmulChoice) -> None:
        """Compute the unquantized products of the fused sublayers with the tiles of a choice for `matmul_shape`."""
        for index, (sublayer, plan, bf16_plan) in enumerate(self._sublayers):
            if not self._can_have_tiles(bf16_plan):
                continue
            for linear in (bf16_plan.first, bf16_plan.second):
                shape = _shape(linear.linear)
                linear.tiles = {
                    kind: tile for (kind, *size), tile in choice.plain.items() if tuple(size) == shape
                }
            if choice.gated is not None and self._can_fuse_gate(bf16_plan):
                bf16_plan.first.converted.interleave()
                self._sublayers[index] = (sublayer, plan, replace(bf16_plan, gate_tiles=choice.gated))
        self._set_overrides()

    def _can_have_tiles(self, bf16_plan: Fused) -> TypeGuard[FusedSublayer]:
        # With a quantized recipe, only evaluations compute these products.
        if not self.fused or self.recipe.quantized or not isinstance(bf16_plan, FusedSublayer):
            return False
        # The products of a chunked MLP have another number of tokens.
        if isinstance(bf16_plan, FusedMLP) and bf16_plan.chunk_tokens is not None:
            return False
        return all(
            m.weight.dtype == torch.float32 for m in bf16_plan.sublayer.modules() if isinstance(m, Linear)
        )

    def _can_fuse_gate(self, bf16_plan: FusedSublayer) -> TypeGuard[FusedMLP]:
        """Return True if `gate_tiles` can be set. Gradients of interleaved weights are not added inside products."""
        return (
            isinstance(bf16_plan, FusedMLP) and bf16_plan.has_silu_gate and not self.shared.accumulate_inside
        )

    def is_fused(self, module: nn.Module) -> bool:
        """Return True if `module` is a sublayer that runs fused, at least in some steps."""
        return any(
            sublayer is module and (self.fused or plan is not None) for sublayer, plan, _ in self._sublayers
        )

    def cached_weights(self) -> list[ConvertedWeight]:
        """Return the weights whose converted forms are cached, without those that need no conversion."""
        return [converted for converted in self._all_converted() if converted.in_own_memory]

    def forget_weights(self) -> None:
        """Drop all cached converted weights, to free their memory or because the weights were overwritten."""
        for converted in self._all_converted():
            converted.clear()

    def _all_converted(self) -> list[ConvertedWeight]:
        return self._converted if self._head is None else [*self._converted, self._head[1].converted]

    def _set_overrides(self) -> None:
        for sublayer, plan, bf16_plan in self._sublayers:
            override: Any = bf16_plan if self.fused else None
            if self.active and plan is not None:
                override = plan
            sublayer.forward_override = override
            if isinstance(sublayer, AttentionSublayer):
                sublayer.delta_optional = sublayer.forward_override is not None
            if isinstance(norm := sublayer.output_norm, RMSNorm):
                fused = sublayer.forward_override is not None
                norm.forward_override = partial(fused_layers.output_norm, norm) if fused else None
        for linear, override in self._linears:
            linear.forward_override = override if self.active else None
        if self._head is not None:
            loss, head = self._head
            loss.forward_override = head if self.active else None
        if self._norm is not None:
            self._norm.forward_override = partial(fused_layers.add_norm, rms_norm(self._norm.norm))

    # Construction

    def _attach(self, keep: Collection[str]) -> None:
        """Make the plans of all sublayers and Linears. keep: names of projections that stay in BF16."""
        recipe = self.recipe
        unquantized = _unquantized_of(recipe)
        modules = list(self.model.modules())
        layers = sum(isinstance(module, AttentionSublayer) for module in modules)
        first, last = recipe.kept_blocks(layers)
        layer = -1
        fused_linears: set[int] = set()
        for module in modules:
            if isinstance(module, AttentionSublayer):
                layer += 1
            in_bf16_block = layers > 0 and (layer < first or layer >= layers - last)
            if self.backend is None and isinstance(module, MoESublayer) and why_not_fused(module) is None:
                fused_linears.update(id(m) for m in module.modules() if isinstance(m, Linear))
                experts = None if in_bf16_block or not recipe.quantized else expert_recipe(recipe)
                moe_plan = None if experts is None else self._moe(module, experts, keep)
                self._sublayers.append((module, moe_plan, self._moe(module, unquantized)))
            elif (
                self.backend is None
                and isinstance(module, AttentionSublayer | MLPSublayer)
                and why_not_fused(module) is None
            ):
                fused_type: type[FusedSublayer] = (
                    FusedAttention if isinstance(module, AttentionSublayer) else FusedMLP
                )
                linear1, linear2 = module.input.projections[0], _last_linear(module)
                assert isinstance(linear1, Linear)
                fused_linears.update((id(linear1), id(linear2)))
                bf16_plan = fused_type(
                    module, self._linear(linear1, unquantized), self._linear(linear2, unquantized)
                )
                plan = None
                if not in_bf16_block and recipe.quantized:
                    recipe1 = unquantized if _has_name(linear1, keep) else recipe
                    recipe2 = unquantized if _has_name(linear2, keep) else recipe
                    plan = fused_type(module, self._linear(linear1, recipe1), self._linear(linear2, recipe2))
                self._sublayers.append((module, plan, bf16_plan))
            elif not isinstance(module, Linear) or not recipe.quantized or id(module) in fused_linears:
                continue
            elif (
                module.role == "matrix"
                and not in_bf16_block
                and not _has_name(module, {*keep, *ROUTING_PROJECTIONS})
            ):
                self._linears.append((module, self._override(module)))
        final_norms = [m for m in modules if isinstance(m, AddNormLinear) and not len(m.projections)]
        if self.fused and self._sublayers and final_norms and _is_pre_rmsnorm(final_norms[-1]):
            self._norm = final_norms[-1]

    def _override(self, linear: Linear) -> Callable[[Tensor], Tensor]:
        """Return the `forward_override` of a Linear outside of the fused sublayers."""
        if self.backend is None:
            return partial(fused_layers.linear, self._linear(linear, self.recipe))
        _check_size(_names(linear), _shape(linear), self.recipe)
        return self.backend.forward_override(linear)

    def _linear(self, linear: Linear, recipe: Recipe) -> QuantizedLinear:
        _check_size(_names(linear), _shape(linear), recipe, self.shared.caps.fp4)
        plan = QuantizedLinear(linear, recipe, self.shared, next(self._numbers))
        self._converted.append(plan.converted)
        return plan

    def _moe(self, sublayer: MoESublayer, recipe: Recipe, keep: Collection[str] = ()) -> FusedMoE:
        """Return the plan of a mixture of experts in a recipe for experts. The router stays unquantized."""
        unquantized = _unquantized_of(self.recipe)
        operands = unquantized.output.right, unquantized.input_gradient.right
        router = ConvertedWeight(Quantizer(*operands, self.shared, (0, 0)), self.shared)
        self._converted.append(router)
        experts = sublayer.mixture.experts
        gate_up, down = (
            self._expert_linear(experts, name, recipe, keep) for name in ("gate_up_weight", "down_weight")
        )
        return FusedMoE(sublayer, router, gate_up, down, self._shared_expert(sublayer))

    def _shared_expert(self, sublayer: MoESublayer) -> FusedSharedExpert | None:
        """Return the plan of the shared expert, which stays unquantized; None if there is none."""
        expert = sublayer.mixture.shared_expert
        if expert is None:
            return None
        unquantized = _unquantized_of(self.recipe)
        operands = unquantized.output.right, unquantized.input_gradient.right
        projections = 2 if expert.token_gate is None else 3
        caches = [
            ConvertedWeight(Quantizer(*operands, self.shared, (0, 0)), self.shared)
            for _ in range(projections)
        ]
        self._converted += caches
        return FusedSharedExpert(expert, tuple(caches))

    def _expert_linear(
        self, experts: Experts, name: str, recipe: Recipe, keep: Collection[str]
    ) -> ExpertLinear:
        if any(s.name in keep for s in experts.slices[name]):
            recipe = _unquantized_of(self.recipe)
        _, rows, columns = getattr(experts, name).shape
        _check_size(" and ".join(s.name for s in experts.slices[name]), (rows, columns), recipe)
        plan = ExpertLinear(experts, name, recipe, self.shared, next(self._numbers))
        self._converted.append(plan.converted)
        return plan


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

    Raises UsageError if the recipe does not exist or is unsupported on the device, if a layer's size does not suit its
    formats, or if the backend is missing or cannot run it.

    Args:
        options: Further precision options; `options.name` is ignored. With a backend other than "deskside", `fused`,
            `native`, `options.weight_cache` and `options.accumulate` have no effect on the layers.
        fused: Use the fused sublayers in BF16 too, where they support the architecture.
        native: Compute FP8 products, and NVFP4 ones if `caps` include it, on tensor cores; otherwise emulate them.
        head_native: `native` for an FP8 head. If None, the value of `native`.
        seed: Seed of stochastic rounding and random transforms.
        caps: Formats that the GPU supports besides plain FP8. If None, `hardware_caps` of the device.
    """
    options = options or PrecisionConfig()
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe
    restore(model)
    for module in model.modules():
        if isinstance(module, Embedding):
            # A frozen table is stored in bfloat16, so "fp32" cannot just take the dtype of the weight.
            float32_or_wider = torch.promote_types(module.weight.dtype, torch.float32)
            module.output_dtype = float32_or_wider if recipe.name == "fp32" else torch.bfloat16
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
    if reason := unsupported_reason(recipe, device):
        raise UsageError(f"precision {recipe.name}: {reason}")
    converted._attach(options.keep)
    if options.head == "fp8":
        losses = [module for module in model.modules() if isinstance(module, HeadLoss)]
        head_native = native if head_native is None else head_native
        converted._head = (losses[0], QuantizedHead(shared, head_native)) if losses else None
    shared.scales.allocate(device)
    converted._set_overrides()
    return converted


def restore(model: nn.Module) -> None:
    """Undo `convert`. The model computes in the dtype of its weights again."""
    for module in model.modules():
        if isinstance(module, Embedding):
            module.output_dtype = None
        elif isinstance(module, Sublayer | Linear | RMSNorm | AddNormLinear | HeadLoss):
            module.forward_override = None
            if isinstance(module, AttentionSublayer):
                module.delta_optional = False


def unsupported_reason(recipe: Recipe, device: torch.device) -> str | None:
    """Return why this recipe is unsupported on this device, or None if it is supported."""
    if recipe.quantized and device.type == "cuda" and torch.version.hip is not None:
        return "its kernels are written for NVIDIA GPUs, and this is an AMD GPU; use bf16"
    return None


def why_not_fused(sublayer: AttentionSublayer | MLPSublayer | MoESublayer) -> str | None:
    """Return why this sublayer cannot run fused, or None if it can."""
    projections = sublayer.input.projections
    if isinstance(sublayer, MoESublayer):
        return uncovered_reason(
            rmsnorm_first=_is_pre_rmsnorm(sublayer.input),
            num_projections=1,
            bias=sublayer.mixture.router.bias is not None,
            clamped_swiglu=sublayer.mixture.experts.activation == "clamped_swiglu",
            adapters=isinstance(sublayer.mixture.experts, AdaptedExperts | FrozenExperts),
        )
    linears = [module for module in (*projections, _last_linear(sublayer)) if isinstance(module, Linear)]
    head_dim = 1
    if isinstance(sublayer, AttentionSublayer):
        head_dim = sublayer.head_dim
        features = {
            "qk_norm_over_projection": sublayer.qk_norm_over == "projection",
            "partial_rotary": sublayer.partial_rotary,
            "sinks": sublayer.sinks is not None,
        }
    else:
        clamped = sublayer.output.activation == "clamped_swiglu"
        features = {"parallel": sublayer.parallel, "clamped_swiglu": clamped}
    return uncovered_reason(
        rmsnorm_first=_is_pre_rmsnorm(sublayer.input),
        num_projections=len(projections),
        bias=any(linear.bias is not None for linear in linears),
        adapters=any(
            isinstance(m, Linear) and (bool(adapters_of(m)) or m.weight is None) for m in sublayer.modules()
        ),
        head_dim=head_dim,
        **features,
    )


def _unquantized_of(recipe: Recipe) -> Recipe:
    """Return the recipe of what `recipe` leaves unquantized."""
    return recipe_named("fp32" if recipe.name == "fp32" else "bf16")


def _last_linear(sublayer: AttentionSublayer | MLPSublayer) -> Linear:
    return sublayer.output if isinstance(sublayer, AttentionSublayer) else sublayer.output.projection


def _has_name(linear: Linear, names: Collection[str]) -> bool:
    """Return True if `names` contains one of the projections that are stacked in this weight."""
    return any(s.name in names for s in linear.slices)


def _names(linear: Linear) -> str:
    """Return the names of the projections that are stacked in this weight, as text."""
    return " and ".join(s.name for s in linear.slices)


def _shape(linear: Linear) -> tuple[int, int]:
    """Return (output features, input features)."""
    return linear.out_features, linear.in_features


def _is_pre_rmsnorm(operator: AddNormLinear) -> bool:
    return isinstance(operator.norm, RMSNorm) and operator.position == "pre"


def _check_size(name: str, shape: tuple[int, int], recipe: Recipe, fp4: bool = False) -> None:
    """Raise UsageError if a weight's sizes do not suit the formats of the recipe.

    name: of the projections in the weight. shape: (output features, input features). fp4: NVFP4 products are native.
    """
    # The output y = x W^T sums over the input features, and the input gradient over the output features.
    sides = (
        ("input", shape[1], recipe.output),
        ("output", shape[0], recipe.input_gradient),
    )
    multiple = 1
    for number_format in recipe.formats - UNQUANTIZED.keys():
        multiple = max(multiple, NATIVE_FP4_UNIT if fp4 and number_format == "nvfp4" else UNIT)
    for side, size, product in sides:
        operands = (product.left, product.right)
        needed = max(multiple, *(required_multiple(o) for o in operands if o.quantized), 1)
        if size % needed:
            raise UsageError(
                f"precision {recipe.name}: {name} has {size} {side} features, which must be divisible by {needed}; "
                f"change the model's sizes, or use {'--precision.native never' if fp4 else 'bf16'}"
            )
