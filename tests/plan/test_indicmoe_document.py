"""The planned figures of docs/indicmoe.md, compared with what the planner says now."""

import re
from pathlib import Path

import pytest

from deskside.plan.estimate import StepEstimate
from deskside.plan.planner import make_plan
from tests.plan.made import ask

DOCUMENT = Path(__file__).parents[2] / "docs/indicmoe.md"
ACTIVATIONS, STATES = {"activation_offloading": True}, {"offload": True}
# Row of the table of cards: name of the GPU, options of `compute`, options of `optim`
CARDS = {
    "RTX 5090": ("rtx5090", {}, {}),
    "RTX 4090": ("rtx4090", ACTIVATIONS, {}),
    "RTX 5060 Ti, 16 GB": ("rtx5060ti 16gb", ACTIVATIONS, STATES),
    "RTX 4080": ("rtx4080", ACTIVATIONS, STATES),
}


def planned(
    gpu: str, compute: dict[str, bool], optim: dict[str, bool], tmp_path: Path, tokens: int = 131072
) -> StepEstimate:
    """Return the estimate for the settings of the table."""
    overrides = {
        "optim": {"name": "adamw", "states": "8bit", "weights": "bfloat16", **optim},
        "batch": {"tokens": tokens, "micro_tokens": 16384},
        "compute": {
            "activation_checkpointing": "block",
            "loss_chunk_tokens": 2048,
            "attention": "cudnn",
            **compute,
        },
    }
    plan = make_plan(ask(overrides, gpu=gpu, preset="indicmoe-3b", probes=str(tmp_path / "none")))
    assert plan.requested is not None
    return plan.requested


def cells(first: str) -> list[str]:
    """Return the cells of the row of a table that begins with `first`."""
    row = next(line for line in DOCUMENT.read_text("utf-8").splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def numbers(cell: str) -> list[float]:
    return [float(found.replace(",", "")) for found in re.findall(r"\d[\d,]*\.?\d*", cell)]


@pytest.mark.parametrize("card", CARDS)
def test_the_table_of_cards_is_the_planners(card: str, tmp_path: Path) -> None:
    row = cells(card)
    on_card, on_h200 = (planned(name, *CARDS[card][1:], tmp_path) for name in (CARDS[card][0], "h200"))
    low, expected, high = on_card.tokens_per_second
    assert numbers(row[8]) == pytest.approx([expected, low, high], rel=0.005)
    assert numbers(row[6]) == pytest.approx([on_h200.tokens_per_second[1]], rel=0.005)
    assert numbers(row[3]) == pytest.approx([on_h200.memory.allocated / 2**30], abs=0.06)


def test_the_answers_to_the_claims_are_the_planners(tmp_path: Path) -> None:
    step = planned(*CARDS["RTX 5090"], tmp_path, tokens=524288)
    seconds, tokens, _, days, steps = numbers(cells("One second per step, 27.8 h for 100,000 steps")[1])
    assert (tokens, steps) == (524288, 100000) and days == pytest.approx(seconds * steps / 86400, rel=0.02)
    assert seconds == pytest.approx(step.step_seconds, rel=0.02)
    assert numbers(cells("50 to 100 tokens per second")[1])[0] == pytest.approx(
        524288 / step.step_seconds, rel=0.005
    )
