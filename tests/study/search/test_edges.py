"""The best trial at the edge of a searched range, and the `--over` that goes on from there."""

from pathlib import Path
from typing import Any

import pytest

from deskside.study.search.edges import Edges, find_edges
from deskside.study.search.space import dimensions
from tests.study.search.made_search import plan

FOLDER = Path("searches/made")


def edges(over: str, command: str = "deskside search demo --hours 1", **best: Any) -> Edges:
    """Return the edges of a search whose best trial has the defaults but for `best`, by key with __ for a point."""
    made = plan(Path("data"), over, command=command)
    changed = {key.replace("__", "."): value for key, value in best.items()}
    settings = {one.key: changed.get(one.key, one.default) for one in made.space}
    return find_edges(
        made,
        {one.name: _parameter(one.kind, one.default, settings[one.key]) for one in made.space},
        settings,
        FOLDER,
    )


def _parameter(kind: str, default: Any, value: Any) -> Any:
    if kind == "doublings":
        return (
            (value // default).bit_length() - 1 if value >= default else 1 - (default // value).bit_length()
        )
    return 1 - value if kind == "one minus" else value


def test_a_best_trial_inside_says_nothing() -> None:
    found = edges("optim.lr,model.depth,optim.normalize")
    assert found == Edges() and found.text() == ""


@pytest.mark.parametrize(
    ("over", "best", "moved"),
    [
        ("model.depth=2:8", {"model__depth": 2}, "model.depth=1:4"),
        ("model.depth=2:8", {"model__depth": 8}, "model.depth=4:16"),
        ("optim.lr", {"optim__lr": 0.0052}, "optim.lr=0.000625:0.04"),
        ("optim.lr", {"optim__lr": 0.3}, "optim.lr=0.04:2.56"),
        ("batch.tokens", {"batch__tokens": 8 * 2048}, "batch.tokens=2048:131072"),
        ("schedule.decay", {"schedule__decay": 0.12}, "schedule.decay=0:0.65"),
        ("schedule.decay", {"schedule__decay": 0.88}, "schedule.decay=0.5:1"),
        ("schedule.warmup", {"schedule__warmup": 0.1}, "schedule.warmup=0.02:0.15"),
        ("optim.momentum", {"optim__momentum": 0.99}, "optim.momentum=0.95:0.99777"),
    ],
)
def test_a_range_moves_by_half_but_keeps_the_default(over: str, best: dict[str, Any], moved: str) -> None:
    found = edges(over, **best)
    assert found.over == moved
    made = plan(Path("data"))
    assert [one.key for one in dimensions(found.over, made.trial())] == [over.partition("=")[0]]


def test_other_keys_stay_as_they_were() -> None:
    found = edges("optim.lr=0.01:0.08,schedule.decay,optim.normalize,model.depth=2:8", model__depth=2)
    assert found.over == "optim.lr=0.01:0.08,schedule.decay,optim.normalize,model.depth=1:4"
    assert "model.depth 2 (the low end of 2 to 8 layers" in found.text() and found.over in found.text()


def test_what_cannot_go_further_is_said() -> None:
    found = edges("schedule.warmup", schedule__warmup=0.0)
    assert found.over == found.command == "" and "cannot go further" in found.text()


def test_the_next_command_is_this_one_with_another_range() -> None:
    command = "deskside search 'my preset.toml' --hours 1 --over model.depth=2:8 --out=a --seeds 2"
    found = edges("model.depth=2:8", command, model__depth=2)
    expected = (
        "search 'my preset.toml' --hours 1 --seeds 2 --out searches/made-further --over model.depth=1:4"
    )
    assert found.command == expected
