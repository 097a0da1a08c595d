"""A stage of a run, with its data and the results of its dry steps."""

from dataclasses import dataclass

from deskside.train.objective import RowDataset


@dataclass
class StageWork:
    """One stage of the run: its data and batch, and the results of its dry steps.

    until: fraction of the run at which the stage ends. window: attention window in tokens; None keeps the model's own.
    micro_rows: rows per pass and process. dry_seconds: seconds per step.
    """

    until: float
    sequence_length: int
    window: int | None
    tokens_per_step: int
    dataset: RowDataset
    micro_rows: int = 0
    dry_seconds: float = 0.0


def same_shape(one: StageWork, other: StageWork) -> bool:
    """Return True if stages differ only in the tokens per step."""
    return (one.sequence_length, one.window) == (other.sequence_length, other.window)
