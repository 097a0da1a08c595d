"""The data of all arms, prepared before the first trial: trials that prepared it themselves would race for it."""

from collections.abc import Callable, Sequence
from pathlib import Path

from deskside.data.corpus.prepare import prepare
from deskside.study.spec.expand import PlannedArm
from deskside.train.prepare.preflight import check_start
from deskside.utils.errors import UsageError


def prepare_all(arms: Sequence[PlannedArm], say: Callable[[str], None]) -> None:
    """Make every dataset that is not there yet. Raises UsageError for an arm without data, and for two that would
    prepare one folder differently."""
    first: dict[str, PlannedArm] = {}
    for arm in arms:
        try:
            check_start(arm.config)
        except UsageError as error:
            raise UsageError(f"arm {arm.id}: {error}") from None
        path = str(arm.config.data.path)  # check_start has seen to it
        if (Path(path) / "index.json").exists():
            continue
        before = first.setdefault(path, arm)
        if _made_of(before) != _made_of(arm):
            raise UsageError(
                f"data.path: {path}: arms {before.id} and {arm.id} would prepare it differently; give each its own "
                f"data.path, or prepare it with: deskside data prepare"
            )
    for path, arm in first.items():
        data, vocabulary = arm.config.data, arm.config.model.vocab_size
        say(f"preparing {', '.join(data.sources)} into {path}")
        prepare(list(data.sources), path, vocab_size=vocabulary, val_fraction=data.val_fraction, seed=1)


def _made_of(arm: PlannedArm) -> tuple[object, ...]:
    data = arm.config.data
    return tuple(data.sources), data.val_fraction, arm.config.model.vocab_size
