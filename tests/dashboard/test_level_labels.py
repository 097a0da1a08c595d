"""Names of factor levels."""

from deskside.dashboard.level_labels import level_labels
from deskside.study.results import Arm


def arm(label: str, **levels: str) -> Arm:
    return Arm(id=label, label=label, group="main", levels=levels, baseline="", trials=[])


def test_a_level_is_called_what_only_the_labels_of_its_arms_have() -> None:
    arms = [
        arm(f"{rows} x 2048, 16 passes, {name}", work=f"{rows}x2048x16", precision=name.lower())
        for rows in (8, 16)
        for name in ("BF16", "FP8")
    ]
    names = {"8x2048x16": "8 x 2048", "16x2048x16": "16 x 2048"}
    assert level_labels(arms, "work", list(names)) == names
    assert level_labels(arms, "precision", ["bf16", "fp8"]) == {"bf16": "BF16", "fp8": "FP8"}


def test_a_level_without_such_a_part_keeps_its_name() -> None:
    arms = [
        arm("baseline", kv="mha", mlp="swiglu"),
        arm("GELU", kv="mha", mlp="gelu"),
        arm("MQA", kv="mqa", mlp="swiglu"),
    ]
    assert level_labels(arms, "kv", ["mha", "mqa", "gqa"]) == {"mha": "mha", "mqa": "MQA", "gqa": "gqa"}
