"""The objectives of post-training (SFT, DPO, KTO, GRPO), which the training loop optimizes, and their data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deskside.config.run import RunConfig
    from deskside.train.objective import Objective


def objective_of(config: RunConfig) -> Objective | None:
    """Return the objective that the configuration names, or None for pretraining."""
    if config.align is None:
        return None
    if config.align.name == "dpo":
        from deskside.align.dpo import Dpo

        return Dpo(config.align)
    if config.align.name == "kto":
        from deskside.align.kto import Kto

        return Kto(config.align)
    if config.align.name == "grpo":
        from deskside.align.grpo import Grpo

        return Grpo(config.align)
    from deskside.align.sft import Sft

    return Sft()
