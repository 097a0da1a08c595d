"""Build a model that is ready to train on this machine: data, precision, compilation, sharding."""

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
from deskside.config.recipes import recipe_named
from deskside.config.run import RunConfig
from deskside.config.sections import AdapterConfig
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.heldout import validation_warnings
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.shards import read_index
from deskside.model.init import allocate, initialize
from deskside.model.transformer import Transformer
from deskside.precision.backends import not_in_checkpoints
from deskside.precision.convert import QuantizedModel, convert
from deskside.precision.frozen import stored_bytes
from deskside.precision.hardware_caps import NONE, HardwareCaps, hardware_caps
from deskside.precision.lora import num_trained_parameters
from deskside.precision.selfcheck import CheckResult, check, check_head
from deskside.train import parallel
from deskside.train.objective import Objective
from deskside.train.parallel import World
from deskside.train.prepare.batch_size_finder import StageWork
from deskside.train.prepare.check_step import check_block
from deskside.train.state.init_weights import InitialWeights
from deskside.utils.errors import RunError, UsageError
from deskside.weights import frozen_base
from deskside.weights.checkpoint import load_weights

Say = Callable[[str], None]


def ensure_data(config: RunConfig, world: World, say: Say) -> Path:
    """Return the path of the run's prepared dataset, after preparing it from `data.sources` if it does not exist."""
    assert config.data.path is not None  # checked by `preflight.check_start`
    path = Path(config.data.path)
    if world.is_rank_zero and config.data.sources and not (path / "index.json").exists():
        say(f"preparing {', '.join(config.data.sources)} into {path}")
        prepare(
            list(config.data.sources),
            path,
            CorpusOptions(
                vocab_size=config.model.vocab_size, val_fraction=config.data.val_fraction, seed=config.seed
            ),
        )
    world.barrier()
    if world.is_rank_zero and config.align is None and (path / "index.json").is_file():
        for line in validation_warnings(read_index(path)):
            say(f"warning: {line}")
    return path


def choose_recipe(
    run: RunConfig, device: torch.device, say: Say, recorded: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the name of the precision recipe, and its facts: self-check errors and what runs natively.

    recorded: the facts of the run that is resumed. Its recipe and everything that was chosen by timing stay the same.
    Raises UsageError for a recipe that fails its self-check here.
    """
    config, recorded = run.precision, recorded or {}
    name = recorded.get("chosen") or config.name
    wanted = ("bf16" if device.type == "cuda" else "fp32") if name == "auto" else name
    way = False if config.native == "never" else None
    caps = _usable_caps(run, wanted, device, say, recorded)
    result = check(wanted, device, way, config.backend, caps)
    if not result.ok and name == "auto" and wanted != "fp32":
        say(f"bf16 fails its self-check here ({result.reason}): training in fp32")
        wanted = "fp32"
        result = check(wanted, device)
    if not result.ok:
        raise UsageError(f"precision.name: {wanted} fails its self-check here: {result.reason}; use another")
    wanted = recipe_named(wanted).name
    if recipe_named(wanted).quantized and not result.native:
        _say_emulated(wanted, result, say)
    if kept := not_in_checkpoints(config.backend, recipe_named(wanted)):
        say(f"{config.backend} keeps {kept} to itself: a resumed run is not the same to the last bit")
    facts = {"chosen": wanted, "asked": name, "errors": dict(result.errors), "native": result.native}
    if recipe_named(wanted).quantized:
        facts["units"] = asdict(caps if result.native else NONE)
    if config.head == "fp8":
        facts["head"] = _check_head(device, way, result.native, say)
    return wanted, facts


def _usable_caps(
    run: RunConfig, recipe: str, device: torch.device, say: Say, recorded: Mapping[str, Any]
) -> HardwareCaps:
    """Return the low-precision formats of the GPU that this run can use."""
    asked = run.precision
    if not recipe_named(recipe).quantized or asked.native == "never" or asked.backend != "deskside":
        return NONE
    before = recorded.get("units")
    caps = hardware_caps(device, before.get("mxfp8") if isinstance(before, dict) else None)
    if caps.fp4 and (reason := run.native_fp4_problem()):
        say(f"NVFP4 products are emulated: on this card's tensor cores, {reason}")
        return replace(caps, fp4=False)
    return caps


def _check_head(device: torch.device, way: bool | None, layers: bool, say: Say) -> dict[str, Any]:
    """Check the FP8 head. layers: whether the layers' products run natively. Raises UsageError if it fails."""
    head = check_head(device, way)
    if not head.ok:
        raise UsageError(f"precision.head: fp8 fails its self-check here: {head.reason}; use bf16")
    if not head.native:
        _say_emulated("the head's FP8", head, say)
    elif not layers:
        say("the head's products run in FP8 on tensor cores")
    return {"native": head.native, "errors": dict(head.errors)}


def _say_emulated(what: str, result: CheckResult, say: Say) -> None:
    why = f" ({result.reason.removeprefix('emulated: ')})" if result.reason else ""
    say(f"{what} is emulated on this device{why}: right numbers, at no more than BF16's speed")


@dataclass(frozen=True)
class Start:
    """Origin of a model's weights: given ones, random ones (`initial` is None), or the directory of a resumed run."""

    initial: InitialWeights | None
    run_dir: Path
    resumed: bool
    say: Say


def build_model(config: RunConfig, world: World, recipe: str, start: Start | None = None) -> Transformer:
    """Return the model on its device, with given or random weights, in the recipe's activation dtype.

    With adapters, the frozen base weights are written to the run directory, and read from there on resume.
    """
    initial = start.initial if start is not None else None
    if config.adapter is not None:
        if start is not None and start.resumed:
            model = frozen_base.reopen(start.run_dir, config.model, config.adapter, config.seed, world.device)
        elif initial is None:
            raise UsageError(
                "adapter: there is nothing to adapt; give trained weights with --init RUN|HF_DIR"
            )
        else:
            model = frozen_base.make(
                config.model, config.adapter, config.seed, initial.weights, world.device, initial.fresh
            )
            if start is not None and world.is_rank_zero:
                frozen_base.keep(model, start.run_dir)
        if start is not None:
            facts = adapter_facts(model, config.adapter)
            start.say(
                f"adapters of rank {facts['rank']}: {facts['trained_parameters']:,} parameters train, "
                f"{facts['frozen_bytes'] / 2**20:,.0f} MiB of weights are frozen in {facts['base']}; blocks run "
                f"unfused, because {facts['fused']}"
            )
    else:
        model = allocate(config.model, world.device)
        initialize(model, config.seed)
        if initial is not None:
            load_weights(model, initial.weights)
    convert(model, "fp32" if recipe == "fp32" else "bf16")
    return model


def adapter_facts(model: Transformer, adapter: AdapterConfig) -> dict[str, Any]:
    """Return what plan.json records of a run with adapters."""
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
    """The execution mode of the step ("fused", "block", "model" or "off") and the converted model."""

    mode: str
    precision: QuantizedModel


def prepare_execution(
    config: RunConfig, model: Transformer, world: World, recipe: str, facts: Mapping[str, Any] | None = None
) -> Execution:
    """Apply the precision recipe, activation checkpointing, compilation and sharding, in this order.

    facts: the result of `choose_recipe`. Without them, every format is assumed native and the GPU is queried.
    """
    facts = facts or {}
    native = bool(facts.get("native", True))
    backend = _backend(config, recipe)
    mode = execution_mode(config, recipe, world.device)
    if mode == "fused" and world.device.type == "cuda":
        check_block(model)
    cache = config.precision.weight_cache and not world.sharded
    precision = convert(
        model,
        config.precision.recipe(recipe),
        config.precision.model_copy(update={"weight_cache": cache}),
        fused=mode == "fused",
        native=native,
        head_native=facts["head"]["native"] if "head" in facts else None,
        # Stochastic rounding must differ between replicas, or its noise would not average out.
        seed=config.seed + world.rank,
        caps=HardwareCaps(**facts["units"]) if "units" in facts else None,
    )
    what = config.compute.activation_checkpointing
    if backend == "transformer-engine":
        _count_passes(model, precision)
    precision.set_checkpointing(what)
    recompute(model.layers, what, precision.is_fused)
    if mode in ("block", "model"):
        # All blocks share one code object, which is compiled once per stage and window, with and without gradients.
        # Beyond torch's recompile limit it would silently fall back to eager.
        torch._dynamo.config.recompile_limit = 8 * (1 + len(config.stages()))
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    if mode == "block":
        for block in model.layers:
            block.compile(dynamic=False)
    elif mode == "model":
        model.hidden_and_router = torch.compile(model.hidden_and_router, dynamic=False)  # type: ignore[method-assign]
    if world.sharded:
        parallel.shard(model, model.layers, ("loss_and_balance", "token_losses"), world)
    return Execution(mode, precision)


def _backend(config: RunConfig, recipe: str) -> str:
    return config.precision.backend if recipe_named(recipe).quantized else "deskside"


def execution_mode(config: RunConfig, recipe: str, device: torch.device) -> str:
    """Return the execution mode (see `Execution`). Raises UsageError for an unsupported combination."""
    mode: str = config.compute.compile
    if config.adapter is not None:
        return mode if mode != "auto" else "block" if device.type == "cuda" else "off"
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
                f"compute.compile: {mode} does not go with precision.backend {backend}; use auto"
            )
        return mode
    uncovered = model_uncovered_reason(config.model)
    if mode == "auto":
        if device.type != "cuda":
            return "fused" if quantized and uncovered is None else "off"
        return "fused" if uncovered is None else ("off" if quantized else "block")
    if mode == "fused" and uncovered:
        raise UsageError(f"compute.compile: fused does not cover this model ({uncovered}); use auto")
    return mode


def _count_passes(model: Transformer, precision: QuantizedModel) -> None:
    """Tell the precision backend where a forward pass of the model begins and ends."""
    forward = model.hidden_and_router

    @wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with precision.forward_context():
            return forward(*args, **kwargs)

    model.hidden_and_router = inside  # type: ignore[method-assign]


def be_deterministic(config: RunConfig) -> None:
    """Use deterministic kernels only. Raises RunError if CUBLAS_WORKSPACE_CONFIG was not set before torch started."""
    if not config.deterministic:
        return
    torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available() and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RunError("deterministic: start with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment")


def open_stages(config: RunConfig, path: Path, objective: Objective) -> list[StageWork]:
    """Open the training split, packed for the sequence length of every stage."""
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
    blocks: Iterable[Any], what: str, fused: Callable[[nn.Module], bool] = lambda sublayer: False
) -> None:
    """Selective activation checkpointing: wrap "none", "attention", "mlp" or "block" of every block.

    Each level recomputes more in the backward pass and keeps less (Chen et al. 2016, arXiv 1604.06174). The forwards
    are wrapped from outside. fused: whether a sublayer is fused in some steps. Fused sublayers recompute by
    themselves (`QuantizedModel.recompute`), because their state is not among autograd's saved tensors; a block with
    such a sublayer is wrapped sublayer by sublayer, and the wrapper does nothing while the sublayer's forward is
    overridden.
    """
    for block in blocks:
        sublayers = {"attention": block.attn, "mlp": block.mlp}
        chosen = [sublayer for kind, sublayer in sublayers.items() if what in (kind, "block")]
        if what == "block" and not any(fused(sublayer) for sublayer in chosen):
            chosen = [block]
        for part in chosen:
            _wrap(part)


def _wrap(module: Any) -> None:
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if getattr(module, "execution", None) is not None:
            return original(*args, **kwargs)
        # Nothing in a block draws random numbers, so their state need not be preserved.
        return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = forward
