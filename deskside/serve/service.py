"""The served model and its limits, which all routes of the server share."""

from dataclasses import dataclass

from deskside.data.encoder import EncoderInfo
from deskside.serve.admission import Admission
from deskside.serve.metrics import Metrics
from deskside.serve.protocol import ApiError
from deskside.serve.worker import Worker
from deskside.weights.load import Loaded

HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


@dataclass
class Service:
    """The served model and its limits.

    Attributes:
        loaded: The model.
        worker: The thread of the engine.
        name: Model name in the API.
        max_choices: Maximum number of running and waiting choices.
        max_tokens: Maximum tokens per answer.
        max_length: Maximum tokens of a prompt and its answer together.
        admission, metrics: Of this server.
        encoder: The library that encodes prompts; None is tokenizers.
        adapters: Names in the API of the engine's adapters, in the order of their numbers from 1.
    """

    loaded: Loaded
    worker: Worker
    name: str
    max_choices: int
    max_tokens: int
    max_length: int
    encoder: EncoderInfo | None = None
    adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.admission = Admission(self.max_choices)
        self.metrics = Metrics(self.worker.engine)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model and of its adapters."""
        return (self.name, *self.adapters)

    def adapter_number(self, name: str | None) -> int:
        """Return the engine's number of a served name; 0 is the model itself, also without a name."""
        return 0 if name is None else self.names.index(name)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names a model that is not served."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"model: {name[:80]} is not served; this server serves {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
