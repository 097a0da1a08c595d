"""Which attention backends a run uses; `setup.choose_attention` settles it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AttentionBackends:
    """The attention backends of a run: for full layers and for windowed ones.

    `stages` holds them by a stage's (sequence length, window), where those differ from the run's own.
    """

    full: str
    windowed: str | None = None
    stages: Mapping[tuple[int, int | None], tuple[str, str | None]] = field(default_factory=dict)

    def at(self, sequence_length: int, window: int | None) -> tuple[str, str | None]:
        """(full, windowed) for rows of this length in a stage that gives this window (None: the configuration's)."""
        return self.stages.get((sequence_length, window), (self.full, self.windowed))
