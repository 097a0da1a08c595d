"""Names of factor levels that a reader understands, from the labels of the arms."""

from collections.abc import Sequence

from deskside.study.results import Arm


def level_labels(arms: Sequence[Arm], factor: str, levels: Sequence[str]) -> dict[str, str]:
    """Return level -> the parts that the labels of all its arms have and no other label has, or else the level itself.

    The level "8x2048x16" of arms like "8 x 2048, 16 passes, FP8" is called "8 x 2048", if the labels of other levels
    are like "16 x 2048, 16 passes, FP8".
    """
    labels = {
        level: _common_parts([arm for arm in arms if arm.levels.get(factor) == level]) for level in levels
    }
    others = {
        level: {part for arm in arms if arm.levels.get(factor) != level for part in arm.label.split(", ")}
        for level in levels
    }
    names = {
        level: ", ".join(part for part in parts if part not in others[level]) or level
        for level, parts in labels.items()
    }
    return names if len(set(names.values())) == len(names) else {level: level for level in levels}


def _common_parts(arms: Sequence[Arm]) -> list[str]:
    """Return the parts between commas that the labels of all arms have, in their order."""
    parts = [arm.label.split(", ") for arm in arms]
    return [part for part in parts[0] if all(part in other for other in parts)] if parts else []
