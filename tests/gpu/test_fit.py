"""Micro-batch fitting against a real memory limit, in a separate process,
because running out of memory may leave traces.
"""

import gc
import json
from pathlib import Path

import torch

from tests.gpu.card import ADAMW, NEEDS_CARD, QUICK, config, losses
from tests.train import tiny_run

pytestmark = NEEDS_CARD

ROOM = 2 * 2**30  # bytes; the matmul that measures the GPU's speed needs less than one of the two
# The layer is so wide that a pass of all rows exceeds ROOM: it needs more than 0.1 MiB a token.
ROWS = 256
WIDE = {"intermediate_size": 8192}
BATCH = {"tokens": ROWS * 128, "micro_tokens": ROWS * 128}


def run_with_little_memory(root: Path, prepared: Path) -> None:
    """Run in a child process: the same run with all memory and with ROOM."""
    given = config(
        prepared, model=WIDE, batch=BATCH, schedule={"length": "6 steps"}, optim=ADAMW, compute=QUICK
    )
    tiny_run.train(root, given, "roomy")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, ROOM / total), 0)
    tiny_run.train(root, given, "tight")


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_batch(data: Path, tmp_path: Path) -> None:
    child = tiny_run.call(run_with_little_memory, tmp_path, data, log=tmp_path / "log")
    assert child.wait() == 0, child.text()
    roomy, tight = tmp_path / "roomy", tmp_path / "tight"
    (whole,), (fitted,) = tiny_run.plan(roomy)["fit"], tiny_run.plan(tight)["fit"]
    assert (whole["micro_rows"], whole["accumulation"]) == (ROWS, 1)
    tried = [attempt["micro_rows"] for attempt in fitted["attempts"]]
    assert len(tried) > 1 and tried == [ROWS >> n for n in range(len(tried))]
    assert [attempt["fits"] for attempt in fitted["attempts"]] == [False] * (len(tried) - 1) + [True]
    assert fitted["micro_rows"] * fitted["accumulation"] == ROWS
    assert f"{ROWS} rows do not fit (CUDA out of memory" in tiny_run.events(tight)

    # Training ran within the limit, and computed the same as the run with all memory.
    assert [row["step"] for row in tiny_run.rows(tight)] == list(range(1, 7))
    assert [row["tokens"] for row in tiny_run.rows(tight)] == [row["tokens"] for row in tiny_run.rows(roomy)]
    assert not any(row["skipped"] for row in tiny_run.rows(tight))
    for one, two in zip(losses(tight), losses(roomy), strict=True):
        assert abs(one - two) < 3e-2
    assert json.loads((tight / "summary.json").read_text())["peak_memory_gib"] <= ROOM / 2**30
