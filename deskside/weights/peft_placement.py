"""The place of each adapter of a PEFT directory in our model: a projection, and its rows in a fused weight."""

from typing import NamedTuple

import torch

from deskside.config.model import ModelConfig
from deskside.model.transformer import Transformer
from deskside.ops.linear import Linear
from deskside.utils.errors import UsageError
from deskside.weights.hf import by_hf_name
from deskside.weights.hf_families import family_of
from deskside.weights.peft_adapters import LowRank, PeftAdapters, in_our_rows


class Placement(NamedTuple):
    """The adapter of one projection: rows `start:stop` of the Linear at `path`, where they are called `name`."""

    path: str
    name: str
    start: int
    stop: int
    low_rank: LowRank


def placements(adapters: PeftAdapters, config: ModelConfig) -> tuple[list[Placement], list[str]]:
    """Return the adapters of the Linears of the blocks, and the names of everything else that the directory changes.

    Raises UsageError for modules that the model does not have, and RunError for a wrong shape.
    """
    with torch.device("meta"):
        skeleton = Transformer(config)  # has the names of all weights, even if those of the model are codes
    by_name = by_hf_name(skeleton, family_of(config))
    path_of = {
        id(module.weight): path
        for path, module in skeleton.named_modules()
        if isinstance(module, Linear) and module.role == "matrix"
    }
    placed: list[Placement] = []
    others = [*adapters.tensors, *adapters.rows, *adapters.experts]
    for module in adapters.low_rank:
        if f"{module}.weight" not in by_name:
            raise UsageError(f"{adapters.folder}: adapts {module}, which this base model does not have")
        parts = by_name[f"{module}.weight"]
        if not all(id(part.parameter) in path_of for part in parts):
            others.append(module)
            continue
        low_rank, row = in_our_rows(adapters, module, parts, config), 0
        for part in parts:
            path, name = path_of[id(part.parameter)], part.name.split(".")[-2]
            piece = low_rank.rows(row, row + part.stop - part.start)
            placed.append(Placement(path, name, part.start, part.stop, piece))
            row += part.stop - part.start
    return placed, others
