"""Two nodes: what they must share is checked on all of them, and a run survives the loss of one without a trace.

The nodes are network namespaces with a virtual cable (veth) between them, and their own host names and mounts.
Creating them needs root and Linux. The checks themselves are also tested with two processes.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from deskside.train import nodes, parallel
from deskside.utils.errors import RunError, UsageError
from tests.train import tiny_run
from tests.train.test_resume import SLOWER, check_same, preset
from tests.train.tiny_run import kill_at_step

BLIND = 2  # exit code of wrong usage


def check(folder: Path, name: str) -> None:
    """Run a check in each of two processes, which play nodes, with files that only one of them has."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    world = parallel.init_distributed("cpu", "auto")
    own = folder / str(world.rank)
    try:
        if name == "run":
            nodes.check_run_is_shared(world, own)
        else:
            nodes.check_data_is_equal(world, (own / "run.json").read_text())
    except UsageError as error:
        (own / "refused").write_text(str(error))
    parallel.destroy_distributed(world)


@pytest.mark.parametrize("name", ["run", "data"])
@pytest.mark.parametrize("same", [True, False])
def test_all_ranks_refuse_what_one_lacks(name: str, same: bool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "run.json").write_text("{}" if same or rank == 0 else "other")
    child = tiny_run.call(check, tmp_path, name, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
    assert [(tmp_path / f"{rank}/refused").exists() for rank in range(2)] == [not same] * 2


def test_the_node_without_the_run_is_named() -> None:
    """It is named also if it is rank 0's node."""
    for views in ([("a", "1"), ("b", "")], [("b", ""), ("a", "1")]):
        with pytest.raises(UsageError, match="b does not see the run that a sees"):
            nodes._refuse_blind(views, Path("runs/x"))
    # `RunDirectory.open` reports that there is none
    nodes._refuse_blind([("a", ""), ("b", "")], Path("runs/x"))


def test_a_node_that_vanishes_before_the_check_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(nodes, "WAIT_SECONDS", 0.5)
    with pytest.raises(RunError, match="another process of this run has ended"):
        nodes.check_resumed_run_is_shared(tmp_path)
    view = json.dumps(("other", ""))
    store.set("deskside/run/0/1", view)
    nodes.check_resumed_run_is_shared(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # what the node saw before its restart is outdated
    with pytest.raises(RunError):
        nodes.check_resumed_run_is_shared(tmp_path)


def test_node_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, local, expected in ((None, None, 1), ("8", "8", 1), ("16", "8", 2), ("4", None, 1)):
        for key, value in (("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", local)):
            monkeypatch.delenv(key, raising=False)
            if value is not None:
                monkeypatch.setenv(key, value)
        assert nodes.node_count() == expected


# Network namespaces


class Cable:
    """Two network namespaces connected by a pair of virtual network interfaces."""

    def __init__(self, folder: Path):
        self.folder, self.names = folder, [f"deskside{os.getpid()}{letter}" for letter in "ab"]
        self.cards = [f"ds{os.getpid()}{letter}" for letter in "ab"]
        self.addresses = ["10.213.77.1", "10.213.77.2"]
        self.started: list[subprocess.Popen[bytes]] = []

    def up(self) -> None:
        one, two = self.names
        for name in self.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            self.cards[0],
            "netns",
            one,
            "type",
            "veth",
            "peer",
            "name",
            self.cards[1],
            "netns",
            two,
        )
        for name, card, address in zip(self.names, self.cards, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")

    def down(self) -> None:
        for name in self.names:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait(30)
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def pids(self, name: str) -> list[int]:
        """Return the ids of all processes on a node."""
        done = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def start(
        self, node: int, arguments: list[str], log: str, before: str = "true"
    ) -> "subprocess.Popen[bytes]":
        """Start `torchrun ... deskside ARGUMENTS` on a node, after a shell command that sees its own mounts."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"{self.addresses[0]}:29400",
            "--rdzv-id",
            "test",
        ]
        torchrun += [
            "--rdzv-conf",
            f"is_host={1 - node}",
            "--local-addr",
            self.addresses[node],
            "-m",
            "deskside",
        ]
        shell = f'hostname node-{"ab"[node]} && {before} && exec "$@"'
        inside = ["ip", "netns", "exec", self.names[node], "unshare", "--uts", "sh", "-c", shell, "sh"]
        environment = {**os.environ, **tiny_run.ONE_THREAD, "GLOO_SOCKET_IFNAME": self.cards[node]}
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                [*inside, *torchrun, *arguments],
                stdout=file,
                stderr=file,
                env=environment,
                cwd=Path(__file__).resolve().parents[2],
            )
        self.started.append(process)
        return process

    def text(self, log: str) -> str:
        return (self.folder / log).read_text("utf-8", errors="replace")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def cable(tmp_path: Path) -> Iterator[Cable]:
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        pytest.skip("two nodes are network namespaces: they need root, ip (iproute2) and unshare")
    cable = Cable(tmp_path)
    try:
        try:
            cable.up()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield cable
    finally:
        cable.down()


@pytest.mark.full
@pytest.mark.parametrize(
    "mode, lost", [("auto", 1), ("shard", 0)], ids=["replicas, second node", "sharded, first node"]
)
def test_a_lost_node_leaves_no_trace(mode: str, lost: int, data: Path, cable: Cable, tmp_path: Path) -> None:
    """Everything on one node is killed, and the other stops. Both resume, and losses and
    weights equal those of an undisturbed run.
    """
    config = preset(tmp_path, data, parallel={"mode": mode}, batch=SLOWER)
    new = ["train", config, "--runs", str(tmp_path / "runs"), "--name"]

    def both(arguments: list[str], log: str) -> list["subprocess.Popen[bytes]"]:
        return [cable.start(node, arguments, f"{log}-{node}") for node in range(2)]

    assert [node.wait(120) for node in both([*new, "whole"], "whole")] == [0, 0], cable.text("whole-0")
    run, whole = tmp_path / "runs" / "killed", tmp_path / "runs" / "whole"
    processes = both([*new, "killed"], "killed")
    alive = lambda: processes[0].poll() is None  # noqa: E731
    kill_at_step(
        run, 25, lambda: [os.kill(pid, signal.SIGKILL) for pid in cable.pids(cable.names[lost])], alive
    )
    assert processes[1 - lost].wait(120) == 1
    assert "another process of this run has ended" in cable.text(f"killed-{1 - lost}")
    assert processes[lost].wait(10) == -signal.SIGKILL
    again = both(["train", "--resume", str(run)], "again")
    assert [node.wait(120) for node in again] == [0, 0], cable.text("again-0")
    assert "resumed at step 20" in tiny_run.events(run)
    check_same(run, whole)


@pytest.mark.full
def test_a_run_on_one_nodes_own_disk_is_refused_by_both(data: Path, cable: Cable, tmp_path: Path) -> None:
    config = preset(tmp_path, data, schedule={"length": "5 steps"})
    runs = tmp_path / "runs"
    runs.mkdir()
    own_disk = f"mount -t tmpfs tmpfs {runs}"

    def both(arguments: list[str], log: str) -> list["subprocess.Popen[bytes]"]:
        return [cable.start(0, arguments, f"{log}-0"), cable.start(1, arguments, f"{log}-1", before=own_disk)]

    new = ["train", config, "--runs", str(runs), "--name", "one"]
    assert [node.wait(120) for node in both(new, "new")] == [1, 1]  # torchrun's exit code for any failure
    assert list(runs.iterdir()) == []
    assert tiny_run.program(new, tmp_path / "alone").wait(120) == 0
    (runs / "one" / "summary.json").unlink()
    assert [node.wait(120) for node in both(["train", "--resume", str(runs / "one")], "again")] == [1, 1]
    for log in ("new", "again"):
        assert all(f"exitcode  : {BLIND}" in cable.text(f"{log}-{node}") for node in range(2)), cable.text(
            log + "-0"
        )
        assert all("node-b does not see the run that node-a" in cable.text(f"{log}-{n}") for n in range(2))
