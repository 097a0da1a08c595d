"""The names of a run's attention backends, for each kind of layer and each stage."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AttentionBackends:
    """Names of the attention backends of a run: for layers with full attention, and for windowed ones.

    `stages` has the names for stages with another sequence length or window, by (sequence length, window). `shared` has
    the names for rows that processes share in training, or is None without shared rows. In evaluation, each process has
    whole rows.
    """

    full: str
    windowed: str | None = None
    stages: Mapping[tuple[int, int | None], tuple[str, str | None]] = field(default_factory=dict)
    shared: "AttentionBackends | None" = None

    def at(self, sequence_length: int, window: int | None) -> tuple[str, str | None]:
        """Return the names (full, windowed) for a stage. window: that of the stage; None is the model's own window."""
        return self.stages.get((sequence_length, window), (self.full, self.windowed))
