"""Batches on the GPU equal those on the CPU, however late the copies, the GPU or the host are."""

import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from deskside.data.reading.loader import Batch, Loader, LoaderOptions
from deskside.data.reading.rows import PackedDataset
from tests.gpu.card import DEVICE, NEEDS_CARD, spin

pytestmark = NEEDS_CARD

STEPS = 150


def contents(batch: Batch) -> dict[str, Any]:
    """Return copies of a batch's contents, made on its device by the stream that consumes it."""
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in values.items()}


def consume(dataset: PackedDataset, device: str, late: str, document_mask: bool) -> list[dict[str, Any]]:
    """Consume STEPS steps of two micro-batches. `late` names what is slow: "copies", "card", "host" or "nobody"."""
    taken = []
    with Loader(
        dataset, LoaderOptions(1, 0, 12, 6, device=torch.device(device), document_mask=document_mask)
    ) as loader:
        for _ in range(STEPS):
            if late == "copies":
                with torch.cuda.stream(loader._stream):  # the requested copies arrive a millisecond later
                    spin(1)
            batches = next(loader)
            if late == "card":
                spin(1)
            if late == "host":
                time.sleep(0.002)
            taken += [contents(batch) for batch in batches]
            del batches  # from here on, a later step may reuse its memory
    assert not any(t.name.startswith("deskside-loader") for t in threading.enumerate())
    return taken


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("late", ["nobody", "host", "card", "copies"])
def test_batches_are_those_of_the_cpu(late: str, document_mask: bool, prepared: Path) -> None:
    dataset = PackedDataset(prepared, "train", 128)
    expected = consume(dataset, "cpu", "nobody", document_mask)
    got = consume(dataset, DEVICE, late, document_mask)
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert mine[name].device.type == DEVICE
                assert torch.equal(mine[name].cpu(), value), f"{name} of micro-batch {number}"
            else:
                assert mine[name] == value, f"{name} of micro-batch {number}"
