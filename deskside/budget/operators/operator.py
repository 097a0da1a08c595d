"""One type of work in an optimizer step, and the groups by which its time is computed and shown."""

from dataclasses import dataclass
from typing import Literal

from deskside.budget.format_costs import RunsAs

Group = Literal[
    "matmul", "head", "attention", "traffic", "loss_traffic", "weights", "quantize",
    "optimizer_matmul", "optimizer_traffic", "muon", "communication", "offload", "layers",
]  # fmt: skip

PRODUCTS: tuple[Group, ...] = ("matmul", "head", "attention", "optimizer_matmul")
TRAFFIC: tuple[Group, ...] = ("traffic", "quantize", "loss_traffic", "weights", "optimizer_traffic")
# Fixed delays, and the efficiency that says how long one of them is.
DELAYS: dict[Group, str] = {"layers": "layer_seconds", "muon": "muon_seconds"}
# The item of a step's time that a group of operators counts as; recomputation is a separate item.
ITEM_OF: dict[Group, str] = {
    "matmul": "matmul", "head": "loss", "attention": "attention", "traffic": "traffic", "loss_traffic": "loss",
    "weights": "traffic", "quantize": "quantize", "optimizer_matmul": "optimizer", "optimizer_traffic": "optimizer",
    "muon": "optimizer", "communication": "communication", "offload": "offload", "layers": "launches",
}  # fmt: skip


@dataclass(frozen=True)
class Operator:
    """All work of one type in an optimizer step on one GPU.

    Attributes:
        amount: FLOPs of products, layers x passes in the group "layers", steps in the group "muon", otherwise bytes.
        recompute: True if the operator repeats a forward because of activation checkpointing.
        width: head_dim, for attention.
        runs_as: The format whose rate a product runs at.
        rowwise: True for FP8 products with a scale per row.
        share: This operator's share of all FLOPs or bytes with this name.
        windowed: True for attention with a sliding window.
        grouped_rate: Rate of a product relative to one large dense product. Below 1 for grouped products of experts.
    """

    name: str
    group: Group
    amount: float
    recompute: bool = False
    width: int = 0
    runs_as: RunsAs = "bf16"
    rowwise: bool = False
    share: float = 1.0
    windowed: bool = False
    grouped_rate: float = 1.0

    @property
    def item(self) -> str:
        """The item of a step's time that this operator counts as."""
        return "recompute" if self.recompute else ITEM_OF[self.group]
