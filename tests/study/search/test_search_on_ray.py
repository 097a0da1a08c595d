"""A search on a Ray cluster whose head is killed during a trial: it ends with the command that continues it."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from deskside.study.search.outcome import arm_id, read_outcome
from tests.study.fake_trials import ROOT
from tests.study.ray_cluster import checkpoints, events, new_cluster, wait_for
from tests.train.test_resume import preset

pytestmark = pytest.mark.timeout(900)


def begin(folder: Path, *argv: str) -> "subprocess.Popen[bytes]":
    """Start `deskside search` in a folder."""
    command = [sys.executable, "-m", "deskside", "search", *argv, "--executor", "ray"]
    with (folder / "err.txt").open("ab") as err:
        return subprocess.Popen(
            command, cwd=folder, stdout=err, stderr=err, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )


@pytest.mark.full
@pytest.mark.parametrize("ends", ["by itself", "Ctrl-C twice"])
def test_a_dead_head_ends_the_search_with_one_line(ends: str, data: Path, tmp_path: Path) -> None:
    """The second of three trials runs when the head's server dies. A new head finishes the search."""
    preset(tmp_path, data, schedule={}, checkpoint={"every": "1s"}, evaluate={"tokens": 500})
    search, err = tmp_path / "searches" / "tiny", tmp_path / "err.txt"
    trials = search / "trials"
    options = (
        "--hours 0.2 --trials 3 --seeds 1 --pruner none --proxy none --over optim.lr "
        "--schedule.length 15s --minutes-per-trial 0.25"
    )
    with new_cluster() as first:
        address = first.address
        process = begin(tmp_path, "tiny.toml", *options.split())

        def in_second_trial() -> bool:
            assert process.poll() is None, err.read_text()
            started = events(trials, "started")
            return len(started) == 2 and bool(checkpoints(trials, started[1]))

        wait_for(in_second_trial)
        first.head_node.kill_gcs_server()
        if ends == "Ctrl-C twice":
            for _ in range(2):
                time.sleep(2)
                process.send_signal(signal.SIGINT)
        code = process.wait(timeout=120)
        told = [line for line in err.read_text().splitlines() if line]
    resume = "continue with: deskside search searches/tiny --resume --executor ray"
    assert "Traceback" not in str(told) and "rpc_client" not in str(told), told
    if ends == "by itself":
        assert code == 1, told
        assert [line for line in told if "deskside: " in line] == told[-1:] and address in told[-1]
        assert told[-1].endswith(resume)
    else:
        assert code == 130, told
        assert [line for line in told if line.endswith(resume)]
    before = {trial.number: trial for trial in read_outcome(search).trials if trial.status == "finished"}
    assert 0 in before and len(before) < 3
    with new_cluster():
        assert begin(tmp_path, "searches/tiny", "--resume").wait() == 0, err.read_text()
    outcome = read_outcome(search)
    assert outcome.complete and outcome.counts() == {"finished": 3}
    assert {trial.number: trial for trial in outcome.trials if trial.number in before} == before
    started = events(trials, "started")
    starts = Counter(event["arm"] for event in started)
    assert all(starts[arm_id(number)] == 1 for number in before)
    again = [arm for arm, count in starts.items() if count == 2]
    assert [event["arm"] for event in started if event["resumed"]] == again and len(started) == 3 + len(again)
