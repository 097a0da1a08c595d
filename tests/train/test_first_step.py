"""Modules that a run imports before its first step has ended, in separate processes because imports persist."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train import tiny_run

# Each takes seconds to import, and only compiled and sharded runs need them.
HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.checkpoint")

STEP = """
import json, sys
import deskside.train.training_run
from benchmarks.step_config import configuration
from deskside.probe.point import StepTimer, prepare_step, random_batches
from deskside.train import environment_record

keys = {"preset": "demo", "precision": "%s", "tokens": 128, "micro_tokens": 128, "sequence_length": 64}
prepared = prepare_step(configuration({**keys, "optimizer": "muon", "device": "cpu"}))
world = prepared.stepper.world
batches = random_batches(prepared.rows, prepared.fit.micro_rows, prepared.rows_per_step, world)
timer = StepTimer(prepared.stepper, batches, prepared.fit.accumulation, environment_record.Sensors(world.device))
timer.read(timer.launch())
print(json.dumps([timer.losses, sorted(sys.modules)]))
"""


# The emulated formats' sublayers are differentiated with torch's operators, which imports sympy.
@pytest.mark.parametrize(
    "precision, heavy",
    [("fp32", {*HEAVY, "sympy"}), pytest.param("fp8-delayed", {*HEAVY}, marks=pytest.mark.full)],
)
def test_a_first_step_imports_no_compiler_and_no_sharding(precision: str, heavy: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEP % precision], capture_output=True, text=True, check=True, timeout=300
    )
    losses, modules = json.loads(done.stdout.splitlines()[-1])
    assert len(losses) == 1 and 0 < losses[0] < 20
    assert not heavy & {*modules}


def test_a_run_records_what_its_start_took(data: Path, tmp_path: Path) -> None:
    tiny_run.train(tmp_path, tiny_run.config(data, schedule={"length": "3 steps"}))
    startup = tiny_run.plan(tmp_path / "run")["startup"]
    parts = ["imports", "self-check", "data", "model", "attention trial", "sublayers", "compile and fit"]
    assert list(startup["seconds"]) == [*parts, "evaluation", "checkpoint", "first step"]
    assert (
        all(seconds >= 0 for seconds in startup["seconds"].values()) and startup["provenance"] == "measured"
    )
    events = (tmp_path / "run" / "events.log").read_text().splitlines()
    assert sum("compile and fit" in line for line in events) == 1
