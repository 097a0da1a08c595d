"""Choose the attention backends of a run: check them against a reference, then time them, or use a kept choice."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from deskside.budget.shape import flops_per_token
from deskside.config.run import RunConfig
from deskside.kernels.attention import Requirements, gathered
from deskside.kernels.attention.cached_choice import choose_cached
from deskside.kernels.attention.choose import Use
from deskside.model.transformer import Transformer
from deskside.train.attention_backends import AttentionBackends
from deskside.train.parallel import World
from deskside.utils.trials import TrialCache

TRIAL_ROWS = 32  # maximum rows of the timed batch
KINDS = ("full", "windowed")  # keys of a trial's results, by the layers' attention
SHARED_ROWS = "shared_rows"  # key of the backend for rows that processes share, in a result


def recorded_attention(recorded: Mapping[str, Any]) -> AttentionBackends:
    """Return the backends that the entries of plan.json name.

    Those written before 2026-11-28 have none for shared rows; `Stepper` then uses the kernels that there were.
    """
    whole = _backends(recorded, "name")
    shared = _backends(recorded, SHARED_ROWS) if SHARED_ROWS in recorded["full"] else None
    return replace(whole, shared=shared)


def _backends(recorded: Mapping[str, Any], key: str) -> AttentionBackends:
    stages = {
        (stage["sequence_length"], stage["window"]): _names(stage, key)
        for stage in recorded.get("stages", ())
    }
    return AttentionBackends(*_names(recorded, key), stages)


def shared_row_names(facts: Mapping[str, Any]) -> str:
    """Return the backends of shared rows in plan.json's entries as text, empty if no rows are shared."""
    trials = [facts, *facts.get("stages", ())]
    names = [trial[kind].get(SHARED_ROWS) for trial in trials for kind in KINDS if kind in trial]
    return ", ".join(dict.fromkeys(name for name in names if name is not None))


def choose_attention(
    config: RunConfig, model: Transformer, world: World, peak_flops: float, cache: TrialCache | None = None
) -> dict[str, Any]:
    """Choose the backends by trials, and return their results for plan.json (see `recorded_attention`).

    There is one trial for rows of `batch.sequence_length`, which evaluation uses too, and one for every stage with
    another length or window.

    peak_flops: FLOP/s of a large matmul, which bounds what a faster backend can save in this run.
    """
    sequence_length, cache = config.batch.sequence_length, cache or TrialCache()
    layer_windows = [config.model.layer_window(i) for i in range(config.model.num_hidden_layers)]
    tokens = run_tokens(config, world, peak_flops) / world.readers
    results: dict[tuple[int, int | None], dict[str, Any]] = {}  # by (sequence length, window)

    def trial(tokens_per_step: int, length: int, stage_window: int | None) -> dict[str, Any]:
        """Return the results for full and windowed layers. Each combination of length and window is tried once."""
        windows: list[int | None] = [None] if None in layer_windows else []
        windows += [stage_window or window for window in set(layer_windows) if window is not None]
        rows = min(TRIAL_ROWS, tokens_per_step // length // world.readers or 1)
        layers = Counter(None if window is None else stage_window or window for window in layer_windows)
        for window in windows:
            if (length, window) not in results:
                need = _requirements(config, model, world.device, rows, length, window)
                use = Use(layers[window] * tokens / (rows * length), peak_flops)
                results[length, window] = _try_attention(config, need, use, cache)
        # A model without full layers uses its windowed backend for both.
        trials = {"full": results[length, windows[0]]}
        return trials if windows[-1] is None else {**trials, "windowed": results[length, windows[-1]]}

    facts = trial(config.batch.tokens, sequence_length, None)
    # If stages with the same length and window differ in their batch, the trial uses the batch of the first.
    others = {(stage.sequence_length, stage.window): stage for stage in reversed(config.stages())}
    others.pop((sequence_length, None), None)
    if others:
        facts["stages"] = [
            {"sequence_length": length, "window": window} | trial(config.stage_tokens(stage), length, window)
            for (length, window), stage in others.items()
        ]
    return facts


def run_tokens(config: RunConfig, world: World, peak_flops: float) -> float:
    """Return the most tokens that the run can train on; infinite if its length is in epochs."""
    length = config.schedule.length
    if length is None or length.unit == "epochs":
        return math.inf
    if length.unit == "tokens":
        return length.value
    if length.unit == "steps":
        return length.value * max(config.stage_tokens(stage) for stage in config.stages())
    fastest = world.size * peak_flops / flops_per_token(config.model, config.batch.sequence_length)
    return length.value * fastest


def _names(trials: Mapping[str, Any], key: str) -> tuple[str, str | None]:
    """Return the names (full, windowed) under this key of the results."""
    windowed = trials.get("windowed") or {}
    return trials["full"][key], windowed.get(key)


def _requirements(
    config: RunConfig, model: Transformer, device: torch.device, rows: int, length: int, window: int | None
) -> Requirements:
    dtype, documents = model.activation_dtype, config.data.document_mask
    return Requirements.of_model(
        config.model, rows, length, dtype, device, window=window, documents=documents
    )


def _try_attention(config: RunConfig, need: Requirements, use: Use, cache: TrialCache) -> dict[str, Any]:
    """Choose the backend for one problem. Return its name, and the times and errors of all candidates.

    If processes share rows, the result also names the backend for that. Raises RunError if no backend is correct, or if
    the one for shared rows is not.
    """
    context = config.parallel.context
    candidates = None if config.compute.attention == "auto" else [config.compute.attention]
    choice, trial = choose_cached(need, cache, candidates, use)
    shared = {}
    if context > 1:
        shared[SHARED_ROWS] = name = gathered.backend_for(need, choice.seconds)
        if name != "gathered":  # plain torch, which would be compared with itself
            gathered.check_chunks(need, context, name)
    return {
        "name": choice.name,
        **shared,
        "milliseconds": {name: round(s * 1e3, 3) for name, s in choice.seconds.items()},
        "errors": {name: float(f"{error:.2e}") for name, error in choice.errors.items()},
        "rejected": choice.rejected,
        "not_tried": choice.not_tried,
        "trial": trial,
    }
