"""The model of a run and what its steps need."""

from dataclasses import dataclass, field

from deskside.config.run import RunConfig
from deskside.model.dropout import ResidualDropout
from deskside.model.transformer import Transformer
from deskside.optim.average import WeightAverage
from deskside.precision.convert import QuantizedModel
from deskside.train.attention_backends import AttentionBackends
from deskside.train.loop.guard import Guard
from deskside.train.next_token import NextToken
from deskside.train.objective import Objective
from deskside.train.parallel import World


@dataclass(kw_only=True)
class TrainContext:
    """A model that is ready to train in this process, with everything that a step needs besides the optimizer.

    is_compiled: torch.compile compiles the model or its blocks.
    """

    config: RunConfig
    world: World
    model: Transformer
    attention: AttentionBackends
    precision: QuantizedModel
    objective: Objective = field(default_factory=NextToken)
    is_compiled: bool = False
    average: WeightAverage | None = None

    def __post_init__(self) -> None:
        self.guard = Guard(self.config.guard)
        rate, seed = self.config.dropout, self.config.seed
        self.dropout = ResidualDropout(self.model, rate, seed) if rate else None
