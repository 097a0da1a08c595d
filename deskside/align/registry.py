"""Which objective a configuration asks for; the commands that start and resume runs hand it to the training loop."""

from deskside.config.run import RunConfig
from deskside.train.objective import Objective


def objective_of(config: RunConfig) -> Objective | None:
    """None is pretraining."""
    if config.align is None:
        return None
    if config.align.name == "dpo":
        from deskside.align.dpo import Dpo

        return Dpo(config.align)
    if config.align.name == "grpo":
        from deskside.align.grpo import Grpo

        return Grpo(config.align)
    from deskside.align.sft import Sft

    return Sft()
