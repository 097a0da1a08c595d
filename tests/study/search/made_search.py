"""A search with fake trials whose loss is known: they run inside this process and take no time."""

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deskside.config import presets
from deskside.config.duration import Duration
from deskside.data.reading.index import SCHEMA_VERSION, DatasetIndex, ShardInfo, SplitInfo, TokenizerInfo
from deskside.data.reading.tags import TagCount, TagInfo
from deskside.plan.card import PlanCard
from deskside.study.execute.devices import Device
from deskside.study.execute.trial_process import STOPPED, TrialEnd, TrialJob
from deskside.study.search.conduct import conduct
from deskside.study.search.memory_check import MemoryCheck
from deskside.study.search.outcome import Outcome
from deskside.study.search.proxy import Proxy
from deskside.study.search.search_folder import SearchFolder, SearchPlan
from deskside.study.search.space import dimensions
from deskside.utils.machine import this_machine

BEST_LR = 0.11
STARTS = "starts.txt"  # a line for every start of a trial, with its configuration


def loss(config: dict[str, Any], share: float = 1.0) -> float:
    """Return the loss after a share of the time: lowest at BEST_LR, with a little noise from the seed."""
    distance = math.log(config["optim"]["lr"] / BEST_LR)
    return 1.0 + 0.05 * distance**2 + 0.5 * (1 - share) + 1e-4 * math.sin(config["seed"])


class MadeTrial:
    """A trial that passes one evaluation with every poll. With hang, it stays at the first one."""

    pid = None

    def __init__(self, job: TrialJob, hang: bool):
        self.run, self.config, self.hang, self.rung, self.stopped = Path(job.run), job.config, hang, 0, False
        (self.run / "run.json").write_text(json.dumps({"config": job.config}))
        self.seconds = Duration.parse(job.config["schedule"]["length"]).value

    def poll(self) -> TrialEnd | None:
        if self.stopped:
            return TrialEnd(STOPPED, "", 1.0)
        if self.hang:
            return None
        self.rung += 1
        if self.rung < 4:
            share = self.rung / 4
            row = {"step": self.rung, "tokens": 100 * self.rung, "seconds": share * self.seconds + 0.01}
            with (self.run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row | {"loss": 3.0, "val_bpb": loss(self.config, share)}) + "\n")
            time.sleep(0.002)
            return None
        (self.run / "summary.json").write_text(
            json.dumps({"val_bpb": loss(self.config), "status": "finished"})
        )
        return TrialEnd("finished", "", self.seconds + 1)

    def seconds_without_progress(self) -> float:
        return 0.0

    def kill_hung(self, reason: str) -> TrialEnd:
        raise AssertionError(reason)

    def stop(self) -> None:
        self.stopped = True

    def kill(self) -> None:
        self.stopped = True


class MadeExecutor:
    """Starts fake trials. hang_at: the number of the start from which on trials hang."""

    def __init__(self, folder: Path, hang_at: int = 10**6, devices: int = 1):
        self.file, self.hang_at, self.count = folder / STARTS, hang_at, devices

    def devices(self) -> Sequence[Device]:
        return [Device(f"cpu:{number}") for number in range(self.count)]

    def wait_until_idle(self, run: Path) -> None:
        pass

    def start(self, job: TrialJob, device: Device, lock: int | None) -> MadeTrial:
        with self.file.open("a") as file:
            file.write(json.dumps(job.config) + "\n")
        return MadeTrial(job, hang=len(self.file.read_text().splitlines()) >= self.hang_at)

    def prepare(self, device: Device, lock: int | None) -> None:
        pass

    def close(self) -> None:
        pass


def starts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / STARTS).read_text().splitlines()]


def check(gib: float = 64.0) -> MemoryCheck:
    here = this_machine()
    return MemoryCheck(PlanCard("made", int(gib * 2**30), "made", None, here), int(gib * 2**30), 0.1, 0, None)


def plan(data: Path, over: str = "optim.lr", **changed: Any) -> SearchPlan:
    given = {"data": {"path": str(data), "sources": []}, "compute": {"device": "cpu"}}
    layers = [*presets.layers("demo"), given]
    made = SearchPlan(
        name="made", created="", command="deskside search demo --hours 1", deskside="0", base="demo", given=given,
        layers=layers, space=[], proxy=Proxy({}, "trials are whole runs"), target_seconds=60.0, trial_seconds=60.0,
        hours=1.0, setup_seconds=1.0, confirm_at_target=True, seeds=3, sampler="tpe", prune=True, max_trials=12,
        seed=1, memory_fraction=0.85,
    )  # fmt: skip
    made = replace(made, **changed)
    return replace(made, space=dimensions(over, made.trial()))


def made_index() -> str:
    """Return the index of a data set that is not there, with fewer tokens than the demo's vocabulary has."""
    shard = ShardInfo(
        file="0.bin", table="0.docs", tokens=8, documents=1, text_bytes=8, token_text_bytes=8, checksum="", key="",
        table_checksum="", tags={0: TagCount(documents=1, tokens=8)},
    )  # fmt: skip
    index = DatasetIndex(
        schema_version=SCHEMA_VERSION, dtype="uint16", bad_input={}, ignored_files={}, duplicates_of_validation=0,
        arguments={}, splits={"train": SplitInfo.of([shard])}, tags=[TagInfo(source="made", lang="")],
        tokenizer=TokenizerInfo(checksum="", vocab_size=300, eos="<eos>", eos_id=0),
    )  # fmt: skip
    return index.model_dump_json()


def begin(folder: Path, over: str = "optim.lr", **changed: Any) -> tuple[SearchFolder, SearchPlan]:
    """Begin a search in a folder that contains synthetic data."""
    data = folder.parent / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "index.json").write_text(made_index())
    made, where = plan(data, over, **changed), SearchFolder(folder)
    where.create(made)
    return where, made


def run(
    where: SearchFolder, hang_at: int = 10**6, gib: float = 64.0, devices: int = 1
) -> tuple[Outcome, str | None]:
    return conduct(where, where.read(), MadeExecutor(where.path.parent, hang_at, devices), check(gib))


if __name__ == "__main__":  # a search in a process that can be killed
    run(SearchFolder(Path(sys.argv[1])), int(sys.argv[2]))
