"""Runs over several machines (nodes), started by torchrun on each: what all nodes must see, checked before training.

The run directory must be one folder that every node reaches by the same path, such as a network file system: rank 0
writes it, each process reads its checkpoints, and processes that share a sharded model write their parts of these. The
data may be a copy on each node, since it is only read, but it must be the same data.
"""

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from deskside.train.parallel import World
from deskside.utils import launched
from deskside.utils.errors import RunError, UsageError, first_line
from deskside.utils.parsing import json_value

WAIT_SECONDS = 300.0  # for the processes of other nodes to start


def node_count() -> int:
    """Return the number of machines of this run; torchrun tells each process how many run on its node."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return size // int(os.environ.get("LOCAL_WORLD_SIZE", size))


def check_run_is_shared(world: World, run: Path) -> None:
    """Raise UsageError on every rank unless all nodes see the run that rank 0 has created."""
    if node_count() > 1:
        _refuse_blind(world.gather(_view(run)), run)


def check_resumed_run_is_shared(run: Path) -> None:
    """Raise UsageError on every rank unless all nodes see the run to resume.

    Without this check, the nodes that see the run would wait for those that don't, which have ended. It uses torchrun's
    store, because there is no process group yet: its device is in the run's configuration.
    """
    if node_count() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    key = f"deskside/run/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # the store outlives a restart
    with explain_lost_process(run):
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=WAIT_SECONDS))
        store.set(f"{key}/{rank}", json.dumps(_view(run)))
        views = [tuple(json_value(store.get(f"{key}/{other}"))) for other in range(size)]
    _refuse_blind(views, run)


def check_data_is_equal(world: World, fingerprint: str) -> None:
    """Raise UsageError on every rank unless all nodes have opened the same data."""
    if node_count() == 1:
        return
    views = world.gather((socket.gethostname(), fingerprint))
    others = sorted({host for host, found in views if found != views[0][1]})
    if others:
        raise UsageError(
            f"data.path: {', '.join(others)} has other data there than {views[0][0]}; copy the folder from "
            f"{views[0][0]}, or use one that all nodes share"
        )


@contextlib.contextmanager
def explain_lost_process(run: Path) -> Iterator[None]:
    """Turn torch's error about a process that has ended into a RunError.

    Under `train/launch.py` the error stays as it is, because the launcher sees all processes and prints the error that
    caused the others.
    """
    try:
        yield
    except RuntimeError as error:
        lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        if not lost or launched.is_launched():
            raise
        cause = first_line(error)[:200]
        raise RunError(
            f"another process of this run has ended or cannot be reached ({cause}); its node says why; then start all "
            f"nodes again with --resume {run}"
        ) from error


def _view(run: Path) -> tuple[str, str]:
    """Return this node's name, and a digest of the run that it sees, or "" if it sees none."""
    try:
        seen = hashlib.sha256((run / "run.json").read_bytes()).hexdigest()
    except OSError:
        seen = ""
    return socket.gethostname(), seen


def _refuse_blind(views: list[tuple[str, str]], run: Path) -> None:
    """Raise UsageError if some nodes do not see the run that others see. views: of all ranks, from `_view`."""
    witness, run_seen = next((view for view in views if view[1]), views[0])
    blind = sorted({host for host, seen in views if seen != run_seen})
    if blind:
        raise UsageError(
            f"{run}: {', '.join(blind)} does not see the run that {witness} sees there; all nodes must reach one "
            f"folder by the same path: give a shared one with --runs, such as a mounted network file system"
        )
