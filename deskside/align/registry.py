"""Which objective a configuration asks for; the commands that start and resume runs hand it to the training loop."""

from deskside.config.run import RunConfig
from deskside.train.objective import Objective


def objective_of(config: RunConfig) -> Objective | None:
    """None is pretraining."""
    if config.align is None:
        return None
    from deskside.align.sft import Sft

    return {"sft": Sft}[config.align.name]()
