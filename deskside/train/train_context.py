"""The parts of a training run that its components share.

`TrainContext` is built once per process, when the model is ready. The step, the trainer, the checkpointer and the
objective all take it instead of its parts.
"""

from dataclasses import dataclass, field

from deskside.config.run import RunConfig
from deskside.model.transformer import Transformer
from deskside.precision.convert import QuantizedModel
from deskside.train.loop.guard import Guard
from deskside.train.objective import NextToken, Objective
from deskside.train.parallel import World
from deskside.train.prepare.attention_backends import AttentionBackends


@dataclass(kw_only=True)
class TrainContext:
    """A model that is ready to train in this process, and the configuration that it trains with."""

    config: RunConfig
    world: World
    model: Transformer
    attention: AttentionBackends
    precision: QuantizedModel
    objective: Objective = field(default_factory=NextToken)

    def __post_init__(self) -> None:
        self.guard = Guard(self.config.guard)
