"""TRL's own loss code (1.16; the trainers of DPO, KTO, CPO, ORPO and GRPO) on given logits, without a trainer.

The methods are called with an object that has only the attributes they read, so TRL's own code runs.
"""

import importlib.util
import sys
from collections import defaultdict
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def trainers() -> Any:
    """Return (DPOTrainer, GRPOTrainer, selective_log_softmax). Skips the test if TRL is not installed."""
    pytest.importorskip("trl")
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("psutil") is None:  # TRL imports it, but it is not needed here
            patch.setitem(sys.modules, "psutil", module_from_spec(ModuleSpec("psutil", None)))
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.utils import selective_log_softmax
    return DPOTrainer, GRPOTrainer, selective_log_softmax


def _accelerator() -> SimpleNamespace:
    def same(value: Tensor, **_: Any) -> Tensor:
        return value

    return SimpleNamespace(
        device=torch.device("cpu"),
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        num_processes=1,
        sync_gradients=True,
    )


def _metrics() -> Any:
    return {"train": defaultdict(list), "eval": defaultdict(list)}


def dpo(
    logits_BTV: Tensor,
    reference_BTV: Tensor,
    tokens_BT: Tensor,
    completion_BT: Tensor,
    *,
    loss: str,
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, dict[str, float]]:
    """Return TRL's mean loss and metrics. All chosen rows come first, then all rejected ones."""
    trainer, _, selective_log_softmax = trainers()
    counted = completion_BT[:, 1:]

    def outputs(logits: Tensor) -> SimpleNamespace:
        logprobs = selective_log_softmax(logits[:, :-1], tokens_BT[:, 1:]) * counted
        zero = torch.zeros_like(logprobs)
        return SimpleNamespace(log_probs=logprobs, entropy=zero, mean_logits=zero, is_top1=zero.bool())

    class Model:
        training = True

        def __call__(self, **_: Any) -> SimpleNamespace:
            return outputs(logits_BTV)

    with torch.no_grad():
        reference_S = outputs(reference_BTV).log_probs.sum(1)
    chosen, rejected = reference_S.chunk(2)
    me = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=_accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=label_smoothing,
        use_weighting=False,
        _metrics=_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    batch = {
        "input_ids": tokens_BT,
        "attention_mask": torch.ones_like(tokens_BT),
        "completion_mask": completion_BT,
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    found = trainer._compute_loss(me, Model(), batch, False)
    return found, {k: v[-1] for k, v in me._metrics["train"].items() if isinstance(v[-1], float)}


def reference_free(
    logits_BTV: Tensor,
    tokens_BT: Tensor,
    mask_BT: Tensor,
    completion_BT: Tensor,
    *,
    loss: str,
    **options: float,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss and metrics of TRL's CPOTrainer or ORPOTrainer. Rows are
    ordered as in `dpo`. mask_BT: 0 for padding.
    """
    trainers()
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    trainer = ORPOTrainer if loss == "orpo" else CPOTrainer
    me = SimpleNamespace(
        accelerator=_accelerator(),
        is_encoder_decoder=False,
        pad_token_id=0,
        padding_value=0,
        aux_loss_enabled=False,
        loss_type={"cpo": "sigmoid"}.get(loss, loss),
        label_smoothing=0.0,
        alpha=0.0,
    )
    vars(me).update(options)
    for name in ("concatenated_inputs", "get_batch_logps"):
        setattr(me, name, getattr(trainer, name))
    for name in ("concatenated_forward", "odds_ratio_loss", "cpo_loss"):
        if hasattr(trainer, name):
            setattr(me, name, getattr(trainer, name).__get__(me))
    labels = tokens_BT.masked_fill(completion_BT == 0, -100)
    batch = {}
    for name, whole in (("input_ids", tokens_BT), ("attention_mask", mask_BT), ("labels", labels)):
        batch[f"chosen_{name}"], batch[f"rejected_{name}"] = whole.chunk(2)

    def model(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=logits_BTV)

    found: tuple[Tensor, dict[str, float]] = trainer.get_batch_loss_metrics(me, model, batch)
    return found


def kto(
    logits_BTV: Tensor,
    reference_BTV: Tensor,
    tokens_BT: Tensor,
    completion_BT: Tensor,
    label_B: Tensor,
    kl_logps_B: Tensor,
    kl_reference_B: Tensor,
    *,
    beta: float,
    weights: tuple[float, float],
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss and metrics of TRL's KTOTrainer.

    kl_logps_B, kl_reference_B: log-probabilities of the mismatched answers.
    """
    *_, selective_log_softmax = trainers()
    from trl import KTOTrainer

    counted = completion_BT[:, 1:]

    def logprobs(logits: Tensor) -> Tensor:
        found: Tensor = selective_log_softmax(logits[:, :-1], tokens_BT[:, 1:]) * counted
        return found

    def model(**_: Any) -> SimpleNamespace:
        found = logprobs(logits_BTV)
        zero = torch.zeros_like(found)
        return SimpleNamespace(log_probs=found, entropy=zero, mean_logits=zero)

    me = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=_accelerator(),
        aux_loss_enabled=False,
        calculate_KL=True,
        _compute_kl_logps=lambda *_: kl_logps_B,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=beta,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        _metrics=_metrics(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    batch = {
        "input_ids": tokens_BT,
        "attention_mask": torch.ones_like(tokens_BT),
        "completion_mask": completion_BT,
        "label": label_B,
        "ref_logps": logprobs(reference_BTV).sum(1).detach(),
        "ref_KL_logps": kl_reference_B,
    }
    found = KTOTrainer._compute_loss(me, model, batch, False)
    return found, {k: v[-1] for k, v in me._metrics["train"].items() if isinstance(v[-1], float)}


def grpo(
    logits_SLV: Tensor,
    tokens_SL: Tensor,
    mask_SL: Tensor,
    advantage_S: Tensor,
    sampled_SL: Tensor,
    reference_SL: Tensor,
    *,
    loss: str,
    ratio: str,
    low: float,
    high: float,
    kl: float,
    longest: int,
    tool_mask_SL: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return TRL's loss and metrics of sampled answers. The logits are those of the answers' own positions.

    tool_mask_SL: 0 for the tokens of tool results.
    """
    _, trainer, selective_log_softmax = trainers()
    logprobs = selective_log_softmax(logits_SLV, tokens_SL)
    me = SimpleNamespace(
        accelerator=_accelerator(),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=ratio,
        beta=kl,
        loss_type=loss,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=longest,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True),
        _metrics=_metrics(),
    )
    batch = {
        "prompt_ids": torch.zeros(len(tokens_SL), 0, dtype=torch.long),
        "prompt_mask": torch.zeros(len(tokens_SL), 0, dtype=torch.long),
        "completion_ids": tokens_SL,
        "completion_mask": mask_SL.long(),
        "advantages": advantage_S,
        "old_per_token_logps": sampled_SL,
        "ref_per_token_logps": reference_SL,
        "num_items_in_batch": (mask_SL if tool_mask_SL is None else mask_SL * tool_mask_SL).sum(),
    }
    if tool_mask_SL is not None:
        batch["tool_mask"] = tool_mask_SL.long()
    found = trainer._compute_loss(me, SimpleNamespace(training=True), batch)
    return found, {k: v[-1] for k, v in me._metrics["train"].items() if isinstance(v[-1], float)}
