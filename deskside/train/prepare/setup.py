"""Prepare data and model for training on this machine: precision recipe, initial weights, compilation, sharding."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from deskside.config.dimensions import model_uncovered_reason
from deskside.config.recipes import default_precision, expert_recipe, recipe_named
from deskside.config.run import RunConfig
from deskside.config.sections import AdapterConfig
from deskside.data.corpus.heldout import validation_warnings
from deskside.data.corpus.prepare_sources import prepare_sources
from deskside.data.reading.index import read_index
from deskside.data.reading.index_file import is_prepared
from deskside.kernels.functional import create_cuda_context_for_autograd
from deskside.kernels.moe import grouped_backend
from deskside.model.init import InitOptions, allocate, initialize
from deskside.model.transformer import Transformer
from deskside.ops.composite import Sublayer
from deskside.optim.tied import begin_tied
from deskside.precision.backends import not_in_checkpoints
from deskside.precision.convert import QuantizedModel, convert
from deskside.precision.frozen import stored_bytes
from deskside.precision.hardware_caps import NONE, HardwareCaps, hardware_caps
from deskside.precision.lora import num_trained_parameters
from deskside.precision.selfcheck import CheckResult, check, check_experts, check_head
from deskside.train import parallel
from deskside.train.activation_offload import ActivationOffload
from deskside.train.loop.graph_support import check_execution
from deskside.train.loop.stage_work import StageWork
from deskside.train.objective import Objective
from deskside.train.parallel import World
from deskside.train.prepare.kept_checks import check_block_once, kept_check
from deskside.train.prepare.matmul_backend import check_matmul
from deskside.train.state.init_weights import InitialWeights
from deskside.utils.errors import RunError, UsageError
from deskside.utils.trials import NO_CACHE, TrialCache
from deskside.weights import frozen_base
from deskside.weights.peft_training import load_adapters

Say = Callable[[str], None]


def ensure_data(config: RunConfig, world: World, say: Say) -> Path:
    """Return the path of the run's prepared data. It is prepared from `data.sources` first if it does not exist."""
    assert config.data.path is not None  # checked by `preflight.check_start`
    path = Path(config.data.path)
    if config.data.sources:
        with world.rank_zero_first() as is_first:
            if is_first:
                prepare_sources(config, say)
    if world.is_rank_zero and config.align is None and is_prepared(path):
        for line in validation_warnings(read_index(path)):
            say(f"warning: {line}")
    return path


def choose_recipe(
    run: RunConfig,
    device: torch.device,
    say: Say,
    recorded: Mapping[str, Any] | None = None,
    cache: TrialCache = NO_CACHE,
) -> tuple[str, dict[str, Any]]:
    """Return the name of the precision recipe, and its entries of plan.json: self-check errors, and what runs natively.

    recorded: these entries of the run that is resumed. Its recipe and all choices that were made by timing are kept.
    cache: keeps the self-checks of deskside's own layers that pass. Raises UsageError for a recipe that fails its
    self-check on this machine.
    """
    config, recorded = run.precision, recorded or {}
    configured = recorded.get("chosen") or config.name
    name = configured
    if configured == "auto":
        name = default_precision(device.type == "cpu")
    native = False if config.native == "never" else None  # None: native if this device can
    caps = _usable_caps(run, name, device, say, recorded)
    problem = {"recipe": name, "device": device.type, "native": native, "caps": asdict(caps)}
    result = kept_check(
        cache if config.backend == "deskside" else NO_CACHE,
        problem,
        lambda: check(name, device, native, config.backend, caps),
    )
    if not result.ok and configured == "auto" and name != "fp32":
        say(f"bf16 fails its self-check on this machine ({result.reason}): training in fp32")
        name = "fp32"
        result = check(name, device)
    if not result.ok:
        raise UsageError(
            f"precision.name: {name} fails its self-check on this machine: {result.reason}; use another recipe"
        )
    recipe = recipe_named(name)
    if recipe.quantized and not result.native:
        _say_emulated(recipe.name, result, say)
    if state := not_in_checkpoints(config.backend, recipe):
        say(f"{config.backend} does not give access to {state}: a resumed run is not bit-identical")
    facts: dict[str, Any] = {
        "chosen": recipe.name,
        "asked": configured,
        "errors": dict(result.errors),
        "native": result.native,
    }
    if recipe.quantized:
        if run.model.num_experts:
            facts["experts"] = _check_experts(
                recipe.name, device, native if result.native else False, caps, say, cache
            )
            caps = replace(caps, grouped_fp8=facts["experts"]["native"])
        facts["units"] = asdict(caps if result.native else NONE)
    if run.model.num_experts:
        facts["grouped_products"] = _grouped_backend(run, device, recipe.name, say)
    if config.head == "fp8":
        facts["head"] = _check_head(device, native, result.native, say, cache)
    return recipe.name, facts


def _usable_caps(
    run: RunConfig, recipe: str, device: torch.device, say: Say, recorded: Mapping[str, Any]
) -> HardwareCaps:
    """Return the low-precision formats of the tensor cores that this run can use."""
    config = run.precision
    if not recipe_named(recipe).quantized or config.native == "never" or config.backend != "deskside":
        return NONE
    recorded_caps = recorded.get("units")
    caps = hardware_caps(device, recorded_caps.get("mxfp8") if isinstance(recorded_caps, dict) else None)
    if caps.fp4 and (reason := run.native_fp4_problem()):
        say(f"NVFP4 products are emulated: on this card's tensor cores, {reason}")
        return replace(caps, fp4=False)
    return caps


def _check_experts(
    recipe: str, device: torch.device, native: bool | None, caps: HardwareCaps, say: Say, cache: TrialCache
) -> dict[str, Any]:
    """Check the experts' products and return their entries of plan.json. Raises UsageError if the check fails."""
    used = expert_recipe(recipe_named(recipe)).name
    problem = {"experts": used, "device": device.type, "native": native, "caps": asdict(caps)}
    result = kept_check(cache, problem, lambda: check_experts(recipe, device, native, caps))
    if not result.ok:
        raise UsageError(
            f"precision.name: experts in {used} fail their self-check on this machine: {result.reason}; use bf16"
        )
    if used != recipe:
        say(f"experts are computed in {used}, because grouped products support no other scaling of FP8")
    if not result.native:
        _say_emulated(f"the experts' {used}", result, say)
    return {"chosen": used, "native": result.native, "errors": dict(result.errors)}


def _grouped_backend(run: RunConfig, device: torch.device, recipe: str, say: Say) -> str:
    """Return which backend computes the experts' unquantized products."""
    model = run.model
    shape = (model.num_experts, model.moe_intermediate_size, model.hidden_size)
    dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
    backend = grouped_backend(device, dtype, shape, run.batch.sequence_length * model.num_experts_per_tok)
    if backend == "loop" and device.type == "cuda":
        say("experts are computed one after the other, which is slow on a GPU")
    return backend


def _check_head(
    device: torch.device, native: bool | None, layers_native: bool, say: Say, cache: TrialCache
) -> dict[str, Any]:
    """Check the FP8 head and return its entries of plan.json. Raises UsageError if the check fails.

    layers_native: True if the products of the layers run natively.
    """
    problem = {"head": "fp8", "device": device.type, "native": native}
    head = kept_check(cache, problem, lambda: check_head(device, native))
    if not head.ok:
        raise UsageError(f"precision.head: fp8 fails its self-check on this machine: {head.reason}; use bf16")
    if not head.native:
        _say_emulated("the head's FP8", head, say)
    elif not layers_native:
        say("the head's products run in FP8 on tensor cores")
    return {"native": head.native, "errors": dict(head.errors)}


def _say_emulated(name: str, result: CheckResult, say: Say) -> None:
    why = f" ({result.reason.removeprefix('emulated: ')})" if result.reason else ""
    say(f"{name} is emulated on this device{why}: same numerics, but no faster than BF16")


@dataclass(frozen=True)
class WeightSource:
    """Where a model's weights come from: `initial`, a random initialization if that is None, or a resumed run."""

    initial: InitialWeights | None
    run_dir: Path
    resumed: bool
    say: Say


def build_model(
    config: RunConfig, world: World, recipe: str, source: WeightSource | None = None
) -> Transformer:
    """Return the model on its device, with the given or random weights, in the recipe's activation dtype.

    With adapters, the frozen base weights are written to the run directory, and read from there on resume.
    """
    initial = source.initial if source is not None else None
    if config.adapter is not None:
        if source is not None and source.resumed:
            model = frozen_base.load(source.run_dir, config.model, config.adapter, config.seed, world.device)
        elif initial is None:
            raise UsageError("adapter: adapters need trained weights; give them with --init MODEL")
        else:
            model = frozen_base.build(
                config.model, config.adapter, config.seed, initial.weights, world.device, initial.fresh
            )
            if initial.adapters is not None:
                load_adapters(model, initial.adapters)
            if source is not None and world.is_rank_zero:
                frozen_base.save(model, source.run_dir)
        if source is not None:
            facts = adapter_facts(model, config.adapter)
            source.say(
                f"adapters of rank {facts['rank']}: {facts['trained_parameters']:,} parameters train, "
                f"{facts['frozen_bytes'] / 2**20:,.0f} MiB of weights are frozen in {facts['base']}; blocks run "
                f"unfused, because {facts['fused']}"
            )
    else:
        dtype = torch.float32 if config.optim.weights == "float32" else torch.bfloat16
        model = allocate(config.model, world.device, dtype)
        initialize(model, config.seed, InitOptions(embedding_std=config.embedding_std()))
        if config.schedule.tied_until:
            begin_tied(model.embed.weight, model.head_weight, initial is not None)
        if initial is not None:
            initial.load_into(model)
    convert(model, "fp32" if recipe == "fp32" else "bf16")
    return model


def adapter_facts(model: Transformer, adapter: AdapterConfig) -> dict[str, Any]:
    """Return the entries of plan.json about adapters."""
    trained = num_trained_parameters(model)
    return {
        "rank": adapter.rank,
        "scale": adapter.scale,
        "base": adapter.base,
        "trained_parameters": trained,
        "frozen_bytes": stored_bytes(model) - 4 * trained,
        "fused": "the fused sublayers do not support adapters",
    }


@dataclass(frozen=True)
class Execution:
    """Execution mode of the steps, and the handle of the model's precision.

    mode: "fused" (hand-written kernels), "block" or "model" (what torch.compile compiles), or "off" (eager).
    """

    mode: str
    precision: QuantizedModel


def prepare_execution(
    config: RunConfig,
    model: Transformer,
    world: World,
    recipe: str,
    facts: Mapping[str, Any] | None = None,
    cache: TrialCache = NO_CACHE,
) -> Execution:
    """Apply precision recipe, activation checkpointing and offloading, compilation and sharding, in this order.

    facts: the second result of `choose_recipe`. Without it, the recipe runs natively on what the GPU supports. cache:
    keeps the check of the fused kernels if they pass it.
    """
    facts = facts or {}
    native = bool(facts.get("native", True))
    backend = _backend(config, recipe)
    mode = execution_mode(config, recipe, world.device)
    if config.compute.cuda_graph == "on":
        check_execution(world.device, mode)
    # If all checks were kept from earlier runs, nothing has created the context yet.
    create_cuda_context_for_autograd(world.device)
    if mode == "fused" and world.device.type == "cuda":
        check_block_once(model, world.device, cache)
    cache_weights = config.precision.weight_cache and not world.sharded
    precision = convert(
        model,
        config.precision.recipe(recipe),
        config.precision.model_copy(update={"weight_cache": cache_weights}),
        fused=mode == "fused",
        native=native,
        head_native=facts["head"]["native"] if "head" in facts else None,
        # Stochastic rounding must differ between replicas, or its noise would not average out.
        seed=config.seed + world.rank,
        caps=HardwareCaps(**facts["units"]) if "units" in facts else None,
    )
    check_matmul(config, precision, world)
    checkpointed = config.compute.activation_checkpointing
    if backend == "transformer-engine":
        _mark_forward_passes(model, precision)
    precision.set_checkpointing(checkpointed)
    recompute(model.layers, checkpointed, precision.is_fused)
    if config.compute.mlp_chunk_tokens is not None:
        if mode != "fused":
            raise UsageError(
                f"compute.mlp_chunk_tokens: needs fused kernels, and this run uses compute.compile {mode}; leave it "
                "out, or use --compute.compile fused"
            )
        precision.set_mlp_chunk(config.compute.mlp_chunk_tokens)
    if config.compute.activation_offloading:
        if mode != "fused":
            raise UsageError(
                f"compute.activation_offloading: needs fused kernels, and this run uses compute.compile {mode}; "
                "leave it out, or use --compute.compile fused"
            )
        ActivationOffload(world.device).attach(list(model.layers))
    _compile(model, mode, len(config.stages()))
    if world.sharded:
        parallel.shard(model, model.layers, ("loss_and_router", "multi_token_loss", "token_losses"), world)
    return Execution(mode, precision)


def _compile(model: Transformer, mode: str, stages: int) -> None:
    """Compile each block or the whole model with torch.compile, as the execution mode says."""
    if mode not in ("block", "model"):
        return
    # All blocks share one code object. It is compiled for every stage and window, with and without gradients. Beyond
    # its recompile limit, torch would silently run it eagerly.
    torch._dynamo.config.recompile_limit = 8 * (1 + stages)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if mode == "model":
        model.hidden_and_router = torch.compile(model.hidden_and_router, dynamic=False)  # type: ignore[method-assign]
        return
    for block in model.layers:
        block.compile(dynamic=False)


def _backend(config: RunConfig, recipe: str) -> str:
    return config.precision.backend if recipe_named(recipe).quantized else "deskside"


def execution_mode(config: RunConfig, recipe: str, device: torch.device) -> str:
    """Return the mode (see `Execution`) that `compute.compile` selects. Raises UsageError if it is not supported."""
    mode: str = config.compute.compile
    if config.adapter is not None:
        if mode != "auto":
            return mode
        return "block" if device.type == "cuda" else "off"
    backend = _backend(config, recipe)
    quantized = recipe_named(recipe).quantized
    if backend != "deskside":
        if backend == "transformer-engine" and config.compute.activation_checkpointing != "none":
            raise UsageError(
                "compute.activation_checkpointing: transformer-engine's layers cannot be run twice for one gradient; "
                "use none, or precision.backend deskside"
            )
        if mode == "auto":
            return "block" if backend == "torchao" and device.type == "cuda" else "off"
        if mode == "fused" or (backend == "transformer-engine" and mode != "off"):
            raise UsageError(
                f"compute.compile: precision.backend {backend} does not support {mode}; use auto"
            )
        return mode
    uncovered = model_uncovered_reason(config.model)
    if mode == "auto":
        if device.type != "cuda":
            return "fused" if quantized and uncovered is None else "off"
        if uncovered is None:
            return "fused"
        return "off" if quantized or config.parallel.context > 1 else "block"
    if mode == "fused" and uncovered:
        raise UsageError(f"compute.compile: fused does not cover this model ({uncovered}); use auto")
    return mode


def _mark_forward_passes(model: Transformer, precision: QuantizedModel) -> None:
    """Tell the precision backend where a forward pass of the model begins and ends."""
    forward = model.hidden_and_router

    @wraps(forward)
    def forward_in_context(*args: Any, **kwargs: Any) -> Any:
        with precision.forward_context():
            return forward(*args, **kwargs)

    model.hidden_and_router = forward_in_context  # type: ignore[method-assign]


def use_deterministic_kernels(config: RunConfig) -> None:
    """Use only deterministic kernels if configured. Raises RunError if CUBLAS_WORKSPACE_CONFIG is not set for them."""
    if not config.deterministic:
        return
    torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available() and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RunError(
            "deterministic: set the environment variable CUBLAS_WORKSPACE_CONFIG=:4096:8 and start again"
        )


def open_stages(config: RunConfig, path: Path, objective: Objective) -> list[StageWork]:
    """Return the stages of the run, each with the training split packed for its sequence length."""
    return [
        StageWork(
            until=stage.until,
            sequence_length=stage.sequence_length,
            window=stage.window,
            tokens_per_step=config.stage_tokens(stage),
            dataset=objective.open(config, path, "train", stage.sequence_length),
        )
        for stage in config.stages()
    ]


def recompute(
    blocks: Iterable[Any], part: str, is_fused: Callable[[nn.Module], bool] = lambda sublayer: False
) -> None:
    """Apply activation checkpointing to a part of every block: "none", "attention", "mlp" or "block".

    The part's activations are recomputed in the backward pass (Chen et al. 2016, arXiv 1604.06174).

    is_fused: returns True for sublayers that are fused in some steps. Torch cannot checkpoint fused sublayers, because
    their state is not among autograd's saved tensors; `QuantizedModel.set_checkpointing` makes them recompute. A block
    with such a sublayer is therefore wrapped sublayer by sublayer, and the wrapper does nothing while the sublayer is
    fused.
    """
    for block in blocks:
        sublayers = {"attention": block.attn, "mlp": block.mlp}
        chosen = [sublayer for kind, sublayer in sublayers.items() if part in (kind, "block")]
        if part == "block" and not any(is_fused(sublayer) for sublayer in chosen):
            chosen = [block]
        for module in chosen:
            _checkpoint_forward(module)


def _checkpoint_forward(module: nn.Module) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if isinstance(module, Sublayer) and module.forward_override is not None:
            return original(*args, **kwargs)  # the sublayer is fused
        # Blocks use no random numbers, so the generator's state need not be preserved.
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = forward
