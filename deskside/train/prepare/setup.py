"""From a configuration to a model that is ready to train on this machine: data, precision, attention, compile."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from deskside.config.recipes import recipe_named
from deskside.config.run import RunConfig
from deskside.config.schedule import Stage
from deskside.data.corpus.heldout import warnings
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.shards import read_index
from deskside.kernels.attention import Requirements, choose
from deskside.model.init import allocate, initialize
from deskside.model.transformer import Transformer
from deskside.ops.composite import AttentionSublayer, MLPSublayer
from deskside.precision.backends import not_in_checkpoints
from deskside.precision.convert import QuantizedModel, convert, not_covered
from deskside.precision.hardware_caps import NONE, HardwareCaps, hardware_caps
from deskside.precision.selfcheck import check, check_head
from deskside.train import parallel
from deskside.train.objective import Objective, RowDataset
from deskside.train.parallel import World
from deskside.train.prepare.activation_checkpointing import recompute
from deskside.train.prepare.attention_backends import AttentionBackends
from deskside.train.prepare.check_step import check_block
from deskside.train.state import lora_run
from deskside.train.state.init_weights import InitialWeights
from deskside.utils.errors import RunError, UsageError
from deskside.weights.checkpoint_files import load_weights

TRIAL_ROWS = 32  # rows of the batch at which attention is timed: with fewer, the host's part would decide

Say = Callable[[str], None]


def ensure_data(config: RunConfig, world: World, say: Say) -> Path:
    """The prepared dataset of a run, made from `data.sources` first where it does not exist yet."""
    assert config.data.path is not None  # `ready.check_start` has seen to it
    path = Path(config.data.path)
    if world.first and config.data.sources and not (path / "index.json").exists():
        say(f"preparing {', '.join(config.data.sources)} into {path}")
        prepare(
            list(config.data.sources),
            path,
            vocab_size=config.model.vocab_size,
            val_fraction=config.data.val_fraction,
            seed=config.seed,
        )
    world.barrier()
    if world.first and config.align is None and (path / "index.json").is_file():
        for line in warnings(read_index(path)):
            say(f"warning: {line}")
    return path


def choose_recipe(
    run: RunConfig, device: torch.device, say: Say, recorded: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """The precision recipe, and how it is carried out here: what its self-check measured and what runs natively.

    recorded: what this gave when the run began that is resumed: the recipe and what a stopwatch decided stay so.
    Raises UsageError for one that fails here.
    """
    config, recorded = run.precision, recorded or {}
    name = recorded.get("chosen") or config.name
    wanted = ("bf16" if device.type == "cuda" else "fp32") if name == "auto" else name
    way = False if config.native == "never" else None
    found = _units(run, wanted, device, say, recorded)
    result = check(wanted, device, way, config.backend, found)
    if not result.ok and name == "auto" and wanted != "fp32":
        say(f"bf16 fails its self-check here ({result.reason}): training in fp32")
        wanted = "fp32"
        result = check(wanted, device)
    if not result.ok:
        raise UsageError(f"precision.name: {wanted} fails its self-check here: {result.reason}; use another")
    wanted = recipe_named(wanted).name
    if recipe_named(wanted).quantized and not result.native:
        why = f" ({result.reason.removeprefix('emulated: ')})" if result.reason else ""
        say(f"{wanted} is emulated on this device{why}: right numbers, at no more than BF16's speed")
    if kept := not_in_checkpoints(config.backend, recipe_named(wanted)):
        say(f"{config.backend} keeps {kept} to itself: a resumed run is not the same to the last bit")
    facts = {"chosen": wanted, "asked": name, "errors": dict(result.errors), "native": result.native}
    if recipe_named(wanted).quantized:
        facts["units"] = asdict(found if result.native else NONE)
    if config.head == "fp8":
        facts["head"] = _check_head(device, way, result.native, say)
    return wanted, facts


def _units(
    run: RunConfig, recipe: str, device: torch.device, say: Say, recorded: Mapping[str, Any]
) -> HardwareCaps:
    """What the card takes natively besides plain FP8, as far as this run can use it."""
    asked = run.precision
    if not recipe_named(recipe).quantized or asked.native == "never" or asked.backend != "deskside":
        return NONE
    before = recorded.get("units")
    found = hardware_caps(device, before.get("mxfp8") if isinstance(before, dict) else None)
    if found.fp4 and (reason := run.not_for_native_fp4()):
        say(f"NVFP4 products are emulated: on this card's tensor cores, {reason}")
        return replace(found, fp4=False)
    return found


def _check_head(device: torch.device, way: bool | None, layers: bool, say: Say) -> dict[str, Any]:
    """How the head's products in FP8 are carried out. layers: whether those of the layers run natively.

    Raises UsageError where they are wrong.
    """
    head = check_head(device, way)
    if not head.ok:
        raise UsageError(f"precision.head: fp8 fails its self-check here: {head.reason}; use bf16")
    if not head.native:
        why = f" ({head.reason.removeprefix('emulated: ')})" if head.reason else ""
        say(f"the head's FP8 is emulated on this device{why}: right numbers, at no more than BF16's speed")
    elif not layers:
        say("the head's products run in FP8 on tensor cores")
    return {"native": head.native, "errors": dict(head.errors)}


@dataclass(frozen=True)
class Start:
    """What a run's model begins with: given weights or none, or of a resumed run what stands in its directory."""

    initial: InitialWeights | None
    run_dir: Path
    resumed: bool
    say: Say


def build_model(config: RunConfig, world: World, recipe: str, start: Start | None = None) -> Transformer:
    """The model on its device, with given weights or initialised from the seed, in the recipe's dtype of activations.

    With adapters the weights that they stand beside are kept in the run, and read from there when it is resumed.
    """
    initial = start.initial if start is not None else None
    if config.adapter is not None:
        if start is not None and start.resumed:
            model = lora_run.reopen(config, start.run_dir, world.device)
        else:
            weights, fresh = (initial.weights, initial.fresh) if initial is not None else (None, ())
            model = lora_run.make(config, weights, world.device, fresh)
            if start is not None and world.first:
                lora_run.keep_base(model, start.run_dir)
        if start is not None:
            start.say(lora_run.sentence(model, config))
    else:
        model = allocate(config.model, world.device)
        initialize(model, config.seed)
        if initial is not None:
            load_weights(model, initial.weights)
    convert(model, "fp32" if recipe == "fp32" else "bf16")
    return model


def choose_attention(
    config: RunConfig, model: Transformer, world: World, sequence_length: int, recorded: dict[str, Any] | None
) -> tuple[AttentionBackends, dict[str, Any]]:
    """Backends for full and windowed layers: recorded ones for a resumed run, else by checked, timed trials.

    A trial for rows of `sequence_length`, which is also what evaluation uses, and one for every stage that has another
    length or window.
    """
    if recorded:
        stages = {
            (stage["sequence_length"], stage["window"]): _names(stage) for stage in recorded.get("stages", ())
        }
        return AttentionBackends(*_names(recorded), stages), recorded
    tried: dict[tuple[int, int | None], dict[str, Any]] = {}

    def trial(tokens_per_step: int, length: int, override: int | None) -> dict[str, Any]:
        """What was found for full and for windowed layers; the same problem is tried once."""
        own = {config.model.layer_window(i) for i in range(config.model.num_hidden_layers)}
        windows = sorted({w and (override or w) for w in own}, key=lambda w: w is not None)
        rows = min(TRIAL_ROWS, tokens_per_step // length // world.size or 1)
        for window in windows:
            if (length, window) not in tried:
                tried[length, window] = _try_attention(config, model, world.device, rows, length, window)
        found = {"full": tried[length, windows[0]]}
        return found if windows[-1] is None else {**found, "windowed": tried[length, windows[-1]]}

    facts = trial(config.batch.tokens, sequence_length, None)
    # One stage for each (length, window); of two with other batches the first one counts.
    others = {(stage.sequence_length, stage.window): stage for stage in reversed(config.stages())}
    others.pop((sequence_length, None), None)
    if others:
        facts["stages"] = [
            {"sequence_length": length, "window": window} | trial(config.stage_tokens(stage), length, window)
            for (length, window), stage in others.items()
        ]
    return choose_attention(config, model, world, sequence_length, facts)


def _names(found: dict[str, Any]) -> tuple[str, str | None]:
    return found["full"]["name"], (found.get("windowed") or {}).get("name")


def _try_attention(
    config: RunConfig, model: Transformer, device: torch.device, rows: int, length: int, window: int | None
) -> dict[str, Any]:
    """The backend for one kind of layers, and what it was chosen by, as the run records it."""
    need = Requirements(
        batch=rows,
        tokens=length,
        heads=config.model.num_attention_heads,
        kv_heads=config.model.num_key_value_heads,
        head_dim=config.model.head_dim,
        dtype=model.activation_dtype,
        device=device,
        window=window,
        documents=config.data.document_mask,
    )
    choice = choose(need, None if config.compute.attention == "auto" else [config.compute.attention])
    return {
        "name": choice.name,
        "milliseconds": {name: round(s * 1e3, 3) for name, s in choice.seconds.items()},
        "errors": {name: float(f"{error:.2e}") for name, error in choice.errors.items()},
        "rejected": choice.rejected,
    }


@dataclass(frozen=True)
class Execution:
    """How the step is executed: "fused" (hand-written gradients), "block", "model" or "off"; and in which formats."""

    mode: str
    precision: QuantizedModel


def check_execution(config: RunConfig, world: World, recipe: str) -> None:
    """Raises UsageError for an execution that this model or this library cannot have, before anything is made."""
    with torch.device("meta"):
        model = Transformer(config.model)
    execution_mode(config, model, world, recipe)


def prepare_execution(
    config: RunConfig, model: Transformer, world: World, recipe: str, facts: Mapping[str, Any] | None = None
) -> Execution:
    """Products in the recipe's formats, activation checkpointing, compilation and sharding, in this order.

    facts: what `choose_recipe` found; without them everything is native, and the card is asked.
    """
    facts = facts or {}
    native = bool(facts.get("native", True))
    backend = _backend(config, recipe)
    mode = execution_mode(config, model, world, recipe)
    if mode == "fused" and world.device.type == "cuda":
        check_block(model)
    precision = convert(
        model,
        config.precision.recipe(recipe),
        fused=mode == "fused",
        native=native,
        cache=config.precision.weight_cache and not world.sharded,
        accumulate_inside=config.precision.accumulate == "fused",
        head=config.precision.head == "fp8",
        head_native=facts["head"]["native"] if "head" in facts else None,
        keep=config.precision.keep,
        seed=config.seed + world.rank,  # replicas that round alike would not average their noise away
        backend=backend,
        found=HardwareCaps(**facts["units"]) if "units" in facts else None,
    )
    what = config.compute.activation_checkpointing
    if backend == "transformer-engine":
        _count_passes(model, precision)
    precision.recompute(what)
    recompute(model.layers, what, precision.covers)
    if mode in ("block", "model"):
        # All blocks share one piece of code, which is compiled once for each stage and window, with and without
        # gradients. Beyond torch's limit it would go on uncompiled with no more than a warning.
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


def execution_mode(config: RunConfig, model: Transformer, world: World, recipe: str) -> str:
    """How the step is executed: see `Execution`. Raises UsageError for what this model or this library cannot have."""
    if config.adapter is not None:
        return lora_run.execution_mode(config, world.device)
    mode: str = config.compute.compile
    backend = _backend(config, recipe)
    quantized = recipe_named(recipe).quantized
    if backend != "deskside":
        if backend == "transformer-engine" and config.compute.activation_checkpointing != "none":
            raise UsageError(
                "compute.activation_checkpointing: transformer-engine's layers cannot be run twice for one gradient; "
                "use none, or precision.backend deskside"
            )
        if mode == "auto":
            return "block" if backend == "torchao" and world.device.type == "cuda" else "off"
        if mode == "fused" or (backend == "transformer-engine" and mode != "off"):
            raise UsageError(
                f"compute.compile: {mode} does not go with precision.backend {backend}; use auto"
            )
        return mode
    if mode == "auto":
        return _best_mode(model, world, quantized)
    if mode == "fused" and (reason := _why_not_fused(model)):
        raise UsageError(f"compute.compile: fused does not cover this model ({reason}); use auto")
    return mode


def _count_passes(model: Transformer, precision: QuantizedModel) -> None:
    """Let the precision's library know where a forward pass of the model begins and ends."""
    forward = model.hidden_and_router

    @wraps(forward)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with precision.region():
            return forward(*args, **kwargs)

    model.hidden_and_router = inside  # type: ignore[method-assign]


def _best_mode(model: Transformer, world: World, quantized: bool) -> str:
    covered = _why_not_fused(model) is None
    if world.device.type != "cuda":
        return "fused" if quantized and covered else "off"
    return "fused" if covered else ("off" if quantized else "block")


def _why_not_fused(model: Transformer) -> str | None:
    """What the hand-written halves do not cover in this model, None when they cover all of it."""
    for block in model.layers:
        for half in (block.attn, block.mlp):
            if not isinstance(half, AttentionSublayer | MLPSublayer):
                return "it is a mixture of experts"
            if reason := not_covered(half):
                return reason
    return None


def be_deterministic(config: RunConfig) -> None:
    """Only deterministic kernels. Raises RunError when CUDA's workspace was not set up for it before torch began."""
    import os

    if not config.deterministic:
        return
    torch.use_deterministic_algorithms(True)
    if torch.cuda.is_available() and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise RunError("deterministic: start with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment")


@dataclass(frozen=True)
class StagePlan:
    """A stage of the configuration with its data, before the micro-batch is known."""

    stage: Stage
    tokens_per_step: int
    dataset: RowDataset


def open_stages(config: RunConfig, path: Path, objective: Objective) -> list[StagePlan]:
    """The training split packed for every stage."""
    return [
        StagePlan(
            stage, config.stage_tokens(stage), objective.open(config, path, "train", stage.sequence_length)
        )
        for stage in config.stages()
    ]
