"""The memory that fine-tuning of a model needs on a card: the verdict of `deskside plan` for a short run."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from deskside.config import merge
from deskside.config.model import ModelConfig
from deskside.plan.candidates import setting_on_card
from deskside.plan.combinations import minimum_over_changes
from deskside.plan.given_model import GivenModel
from deskside.plan.request import PlanBudget, PlanRequest
from deskside.plan.verdict import judge
from deskside.utils.errors import UsageError

ROW_TOKENS = 2048  # or the longest row of the model
ROWS = 8  # per step, one per pass
TOKENS = 10e6  # of the run; the verdict depends on it only if the run takes more than a year
RANK = 16
# Trained parameters: all weights, adapters on weights in BF16, and adapters on weights in 4 bits.
METHODS: dict[str, dict[str, Any] | None] = {
    "full": None,
    "lora": {"rank": RANK, "base": "bf16"},
    "qlora": {"rank": RANK, "base": "nf4"},
}


@dataclass(frozen=True)
class FinetuningNeed:
    """Verdict on fine-tuning a model. answer: as in `plan.verdict`, or "unsupported". reasons: texts for people.

    memory_bytes: expected GPU memory; with "no", the least that any combination of options needs; None if unsupported.
    """

    answer: Literal["yes", "yes-if", "no", "unsupported"]
    memory_bytes: int | None
    reasons: tuple[str, ...]


def finetuning_need(
    request: PlanRequest,
    name: str,
    model: ModelConfig,
    adapter: Mapping[str, Any] | None,
    with_remedies: bool = True,
) -> FinetuningNeed:
    """Return the needs of supervised fine-tuning with AdamW on the card of a request.

    adapter: the configuration of the adapters; None trains all weights. with_remedies: as in `judge`, for the reasons.
    """
    length = min(ROW_TOKENS, model.max_position_embeddings)
    training: dict[str, Any] = {
        "align": {"name": "sft", "data": ["conversations.jsonl"]},
        "data": {"document_mask": True},
        "optim": {"name": "adamw"},
        "batch": {"sequence_length": length, "tokens": ROWS * length, "micro_tokens": length},
    }
    if adapter is not None:
        training["adapter"] = dict(adapter)
    layers = [*merge.resolved_layers("model", model.model_dump(mode="json")), training]
    try:
        config = merge.build(layers)
    except UsageError as error:
        return FinetuningNeed("unsupported", None, (str(error),))
    explicit = frozenset(".".join(path) for path in merge.merge(layers)[1])
    given = GivenModel(name, tuple(layers), config, name, explicit)
    request = replace(request, given=given, budget=PlanBudget("tokens", TOKENS))
    verdict = judge(request, with_remedies)
    reasons = tuple(reason.text for reason in verdict.reasons)
    if verdict.chosen is None or verdict.answer == "no":
        least = minimum_over_changes(request, setting_on_card(request, config), same_task=True)
        return FinetuningNeed("no", round(least.memory_bytes[1]), reasons)
    return FinetuningNeed(verdict.answer, round(verdict.chosen.estimate.memory_bytes[1]), reasons)
