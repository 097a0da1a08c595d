"""The check of an arm before anything runs. Imports no torch, so that a dry run makes it too."""

from deskside.study.spec.expand import PlannedArm
from deskside.train.preflight import check_start
from deskside.utils.errors import UsageError


def check_arm(arm: PlannedArm) -> None:
    """Raise UsageError with the name of the arm if `check_start` refuses its configuration."""
    try:
        check_start(arm.config)
    except UsageError as error:
        raise UsageError(f"arm {arm.id}: {error}") from None
