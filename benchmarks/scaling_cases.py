"""The cases of the scaling run, and what the planner expects of each."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import make_request

TOKENS = 65_536  # for each GPU, and of the smaller batch for all
LARGE = 524_288  # of the larger batch for all
PRECISIONS = {"bf16": {"name": "bf16"}, "fp8": {"name": "fp8", "head": "fp8"}}
PRESETS = ("124m", "340m")
SHARDED = ("1.3b", "indicmoe-3b")
SHARDED_TOKENS = 32_768  # for each GPU
SHARED_ROWS = ("340m", "indicmoe-3b")
ROW_TOKENS = 65_536  # of a row that all GPUs share


@dataclass(frozen=True)
class Case:
    """A training configuration and its number of GPUs.

    tokens: of a step, on all GPUs together. mode: replicate, shard (FSDP2), or context, one row that all GPUs share.
    """

    preset: str
    optimizer: str
    precision: str
    gpus: int
    tokens: int
    mode: str = "replicate"
    p2p: bool = True

    @property
    def name(self) -> str:
        """A name such as 124m-muon-bf16-8x65536."""
        parts = [self.preset, self.optimizer, self.precision, f"{self.gpus}x{self.tokens // self.gpus}"]
        return "-".join(parts + [self.mode] * (self.mode != "replicate") + ["no-p2p"] * (not self.p2p))

    @property
    def alone(self) -> "Case":
        """The case of one GPU by which the efficiency is measured: as many tokens for each GPU, or the same row."""
        if self.mode == "context":
            return dataclasses.replace(self, gpus=1, p2p=True)
        return dataclasses.replace(self, gpus=1, tokens=self.tokens // self.gpus, mode="replicate", p2p=True)

    @property
    def is_usual(self) -> bool:
        """True for one GPU with the usual number of tokens, by which most cases are measured."""
        return self.gpus == 1 and self.tokens == TOKENS and self.mode != "context"

    def config(self) -> dict[str, dict[str, Any]]:
        """Return the configuration on top of the preset."""
        config: dict[str, dict[str, Any]] = {
            "optim": {"name": self.optimizer},
            "precision": PRECISIONS[self.precision],
            "batch": {"tokens": self.tokens},
        }
        if self.mode == "context":
            config["batch"]["sequence_length"] = self.tokens
            config["model"] = {"max_position_embeddings": self.tokens}
        if self.gpus > 1:
            context = self.mode == "context"
            config["parallel"] = {"context": self.gpus} if context else {"mode": self.mode}
        return config


def cases(gpus: Sequence[int], p2p: bool = True) -> list[Case]:
    """Return the cases with those of one GPU by which their efficiency is measured, the most important ones first."""
    kinds = list(itertools.product(PRESETS, ("adamw", "muon"), PRECISIONS))
    found: dict[Case, None] = {}  # a set in the order of insertion
    for tokens_of in (lambda number: number * TOKENS, lambda number: TOKENS, lambda number: LARGE):
        for (preset, optimizer, precision), number in itertools.product(kinds, gpus):
            case = Case(preset, optimizer, precision, number, tokens_of(number), p2p=p2p or number == 1)
            found |= {case: None, case.alone: None}
    if p2p:
        for preset, number in itertools.product(SHARDED, gpus):
            mode = "shard" if number > 1 else "replicate"
            found[Case(preset, "adamw", "bf16", number, number * SHARDED_TOKENS, mode=mode)] = None
        for preset, number in itertools.product(SHARED_ROWS, gpus):
            found[Case(preset, "adamw", "bf16", number, ROW_TOKENS, mode="context")] = None
    return list(found)


def forecast(case: Case, gpu: str) -> dict[str, Any]:
    """Return what the planner expects: tokens per second and needed GiB, each as {low, expected, high}."""
    question = PlanQuestion(gpu=gpu, gpus=case.gpus, preset=case.preset, hours=1.0)
    band = make_plan(make_request(question, case.config())).to_json()["bands"][0]
    needed = {key: value / 2**30 for key, value in band["memory"]["needed"].items()}
    return {"case": case.name, "tokens_per_second": band["speed"]["tokens_per_second"], "needed_gib": needed}
