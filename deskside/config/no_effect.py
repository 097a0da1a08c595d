"""Rules of configuration keys that have no effect because of the value of another key.

`config/merge.py` refuses such a key, or drops it if a higher layer set the other one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deskside.config.optim import MuonConfig
from deskside.config.run import RunConfig
from deskside.config.schedule import WsdConfig


@dataclass(frozen=True)
class NoEffect:
    """A rule: `key` has no effect, because of the value of `cause`, if `ignored(config)` is True."""

    key: str
    cause: str
    ignored: Callable[[RunConfig], bool]
    remedy: str


def _has_experts(config: RunConfig) -> bool:
    return config.model.num_experts > 0


def _not_fused(config: RunConfig) -> bool:
    """Return True if compute.compile excludes the fused sublayers."""
    return config.compute.compile in ("off", "block", "model")


def _no_embedding_rate(config: RunConfig) -> bool:
    """Return True if no embedding has its own rate: a tied one has the head's, and position embeddings remain."""
    return config.model.tie_word_embeddings and config.model.position_embedding != "learned"


def _no_bf16_weight_gradient(config: RunConfig) -> bool:
    """Return True if no block, projection or step computes a weight gradient in BF16."""
    precision = config.precision
    if not precision.quantized:
        return precision.name == "fp32"
    bf16_blocks = any(precision.recipe().kept_blocks(config.model.num_hidden_layers))
    bf16_steps = precision.warmup_steps > 0 or precision.bf16_from is not None
    return not (bf16_blocks or precision.keep or bf16_steps)


# (keys separated by spaces, cause, ignored, remedy). The first rule that applies is reported.
_RULES: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    (
        "model.rope_theta",
        "model.position_embedding",
        lambda c: c.model.position_embedding == "learned",
        "learned positions have no frequencies: remove it, or use position_embedding rope",
    ),
    (
        "model.norm_bias",
        "model.norm",
        lambda c: c.model.norm == "rmsnorm" and c.model.norm_bias,
        "RMSNorm has no bias: remove it, or use norm layernorm",
    ),
    (
        "model.fused_gate_up",
        "model.gated_mlp",
        lambda c: not c.model.gated_mlp,
        "there is no gate to fuse: remove it, or use gated_mlp true",
    ),
    (
        "model.num_experts_per_tok model.moe_intermediate_size model.norm_topk_prob model.scoring_func "
        "model.router_aux_loss_coef model.router_z_loss_coef model.shared_expert_intermediate_size",
        "model.num_experts",
        lambda c: c.model.num_experts == 0,
        "the model is dense: set num_experts",
    ),
    (
        "model.router_bias_update_rate",
        "model.num_experts",
        lambda c: c.model.scoring_func == "softmax" and c.model.router_bias_update_rate > 0,
        "a softmax router has no bias, because Qwen3-MoE has none: set scoring_func sigmoid",
    ),
    ("model.intermediate_size", "model.num_experts", _has_experts, "experts have moe_intermediate_size"),
    ("model.fused_gate_up", "model.num_experts", _has_experts, "experts are always fused: remove it"),
    (
        "optim.weight_decay_schedule optim.cautious_weight_decay optim.weight_decay_epochs",
        "optim.weight_decay",
        lambda c: c.optim.weight_decay == 0 and not getattr(c.optim, "table_weight_decay", 0),
        "weight_decay is 0: remove it, or set weight_decay",
    ),
    (
        "optim.momentum_start",
        "optim.momentum_warmup_steps",
        lambda c: isinstance(c.optim, MuonConfig) and c.optim.momentum_warmup_steps == 0,
        "the momentum does not warm up: remove it, or set momentum_warmup_steps",
    ),
    (
        "optim.momentum_cooldown",
        "optim.momentum_end",
        lambda c: isinstance(c.optim, MuonConfig) and c.optim.momentum_end is None,
        "the momentum does not change at the end: remove it, or set momentum_end",
    ),
    (
        "optim.normalize_beta",
        "optim.normalize",
        lambda c: isinstance(c.optim, MuonConfig) and c.optim.normalize == "none",
        "nothing is normalized: remove it, or use normalize neuron",
    ),
    (
        "schedule.decay_shape schedule.decay_power schedule.final_lr_fraction",
        "schedule.decay",
        lambda c: isinstance(c.schedule, WsdConfig) and c.schedule.decay == 0,
        "decay is 0: remove it, or set decay",
    ),
    (
        "schedule.batch_growth_until",
        "schedule.batch_growth",
        lambda c: c.schedule.batch_growth == 1,
        "the batch does not grow: remove it, or set batch_growth",
    ),
    (
        "schedule.batch_lr",
        "schedule.batch_growth",
        lambda c: c.schedule.batch_lr != "constant" and len({c.stage_tokens(s) for s in c.stages()}) == 1,
        "all steps have as many tokens: remove it, or set batch_growth",
    ),
    (
        "schedule.clock",
        "schedule.length",
        lambda c: c.schedule.length is not None and c.schedule.length.unit != "seconds",
        "the length is not in time: remove it, or give --hours",
    ),
    (
        "data.packing",
        "align.name",
        lambda c: c.align is not None,
        "conversations are not cut at the ends of rows: remove it",
    ),
    ("data.val_fraction", "align.name", lambda c: c.align is not None, "use --align.val_fraction"),
    (  # DPO and GRPO read their data in a fixed order and without prefetching
        "data.weights data.language_temperature data.source_temperature data.prefetch",
        "align.name",
        lambda c: c.align is not None and c.align.name != "sft",
        "only deskside train and sft use it: remove it",
    ),
    (
        "data.val_fraction",
        "data.sources",
        lambda c: not c.data.sources,
        "it applies only to data.sources: remove it, or set data.sources",
    ),
    (
        "multi_token.until",
        "multi_token.weights",
        lambda c: not c.multi_token.weights,
        "only the next token is predicted: remove it, or set multi_token.weights",
    ),
    (
        "evaluate.tokens",
        "evaluate.every",
        lambda c: c.evaluate.every is None,
        "the evaluation at the end uses the whole split: remove it, or set evaluate.every",
    ),
    (
        "optim.ema_nesterov_decay optim.ema_nesterov_start optim.ema_nesterov_until",
        "optim.ema_nesterov",
        lambda c: not c.optim.ema_nesterov,
        "EMA-Nesterov is off: remove it, or set optim.ema_nesterov",
    ),
    (
        "optim.embedding_lr",
        "model.tie_word_embeddings",
        _no_embedding_rate,
        "the embedding is also the head and has its rate: remove it, or use model.tie_word_embeddings false",
    ),
    (
        "optim.embedding_lr optim.head_lr",
        "adapter.rank",
        lambda c: c.adapter is not None,
        "adapters and what trains beside them have one rate: remove it, or set optim.lr",
    ),
    (
        "average.start average.every average.blend average.offload",
        "average.name",
        lambda c: c.average.name == "none",
        "no weights are averaged: remove it, or use average.name ema or tail",
    ),
    (
        "average.half_life",
        "average.name",
        lambda c: c.average.name != "ema",
        "only an exponential average has one: remove it, or use average.name ema",
    ),
    (
        "precision.keep_first precision.keep_last precision.keep precision.head precision.warmup_steps "
        "precision.bf16_from precision.native precision.backend",
        "precision.name",
        lambda c: not c.precision.quantized,
        "nothing is quantized in fp32 and bf16: remove it, or use a precision.name such as fp8",
    ),
    (
        "precision.weight_cache",
        "precision.name",
        lambda c: c.precision.name == "fp32",
        "the FP32 weights are used directly: remove it, or use another precision.name",
    ),
    (
        "precision.accumulate",
        "precision.name",
        _no_bf16_weight_gradient,
        "no weight gradient is computed in BF16: remove it, or use precision.name bf16",
    ),
    (
        "precision.accumulate",
        "compute.compile",
        lambda c: _not_fused(c) and not c.precision.keep,
        "autograd adds up the gradients: remove it, or use compute.compile fused",
    ),
    (
        "precision.weight_cache",
        "compute.compile",
        lambda c: _not_fused(c) and not c.precision.quantized,
        "weights are cast where they are used: remove it, or use compute.compile fused",
    ),
    (
        "precision.weight_cache precision.accumulate precision.native",
        "precision.backend",
        lambda c: c.precision.backend != "deskside",
        "the other libraries have no such option: remove it, or use precision.backend deskside",
    ),
    (
        "precision.weight_cache precision.accumulate",
        "adapter.rank",
        lambda c: c.adapter is not None,
        "it is an option of the fused sublayers, which do not support adapters: remove it",
    ),
    (
        "model.router_bias_update_rate",
        "adapter.rank",
        lambda c: c.adapter is not None and c.model.router_bias_update_rate > 0,
        "routers are frozen beside adapters: remove it",
    ),
    (
        "optim.scale",
        "adapter.rank",
        lambda c: c.adapter is not None,
        "the scaling rules are for models without adapters; adapters take optim.lr as it is: remove it",
    ),
)
NO_EFFECT = tuple(
    NoEffect(key, cause, ignored, remedy) for keys, cause, ignored, remedy in _RULES for key in keys.split()
)


def has_effect(key: str, config: RunConfig) -> bool:
    """Return True if no other key takes the effect of this key away."""
    return not any(rule.key == key and rule.ignored(config) for rule in NO_EFFECT)
