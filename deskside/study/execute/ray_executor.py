"""Trials on the nodes of a Ray cluster, one at a time on each GPU, or on each node of a cluster without GPUs.

For every trial there is a Ray actor on the chosen node, which starts the same process as on one machine
(`trial_process.py`) and waits for it. Ray reserves the GPU for the actor and reports when its node has died. Ray is
used because clusters of unlike machines already run it (SLURM, Kubernetes and plain ssh all start it).

The study's folder and its data must be on storage that every node mounts at the same path. If a node dies, its trial
then continues from the newest checkpoint on another node. If only the connection was lost, the process of the old
attempt may still run: it saves and stops when its actor dies, and holds a lock in the study's folder until then. A new
attempt waits for this lock.

If the head of the cluster dies, the study ends (`head_calls.py`). The trials on other nodes save and end by themselves
when Ray ends there, after about a minute.
"""

import atexit
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deskside.study.execute.attempt_lock import attempt_lock, is_idle
from deskside.study.execute.devices import THREADS, Device
from deskside.study.execute.head_calls import HeadCalls
from deskside.study.execute.trial_process import (
    LOST,
    OUTCOME_FILE,
    STOPPED,
    Progress,
    TrialEnd,
    TrialJob,
    TrialProcess,
    read_outcome,
)
from deskside.utils.errors import RunError, UsageError, first_line
from deskside.utils.machine import code_version

UNUSABLE = "unusable"  # status of a trial that a node cannot run, which ends the study
POLL_SECONDS = 0.1
REFRESH_SECONDS = 1.0  # between two looks at the list of nodes
AVOID_SECONDS = 30.0  # after a loss: Ray takes some seconds to notice that a node has died
CALL_SECONDS = 20.0  # for an answer of an actor
# Ray prints the last lines of a dead node's log on standard output, also with log_to_driver=False. The study reports a
# lost node itself. Ray reads these variables when it is imported, and then leaves out all lines.
QUIET = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


class TrialSupervisor:
    """The actor that runs one trial on its node. Ray calls it in two threads: `run` waits, the others do not."""

    def __init__(self) -> None:
        self._process: TrialProcess | None = None
        self._stop_requested = False

    def run(
        self, job: dict[str, Any], environment: dict[str, str], folder: str, code: str
    ) -> tuple[str, str, float]:
        """Run a trial and return (status, reason, seconds). The status is UNUSABLE if this node cannot run trials.

        folder, code: the study's working directory and the version of deskside, which must be the same here.
        """
        try:
            end = self._run(TrialJob(**job), environment, folder, code)
        except (RunError, OSError) as error:
            end = TrialEnd(UNUSABLE, f"node {socket.gethostname()}: {error}", 0.0)
        return end.status, end.reason, end.seconds

    def _run(self, job: TrialJob, environment: dict[str, str], folder: str, code: str) -> TrialEnd:
        if code_version() != code:
            raise RunError(f"has deskside {code_version()}, and the study {code}; install the same")
        if not Path(folder, job.run).is_dir():
            raise RunError(
                f"does not see {Path(folder, job.run)}; put the study and its data on storage that all nodes mount at "
                f"the same path"
            )
        os.chdir(folder)  # relative paths in the configuration are relative to it
        with attempt_lock(Path(job.run)) as lock:
            if self._stop_requested:
                return TrialEnd(STOPPED, "stopped with the study", 0.0)
            self._process = TrialProcess(job, environment, lock)
            if self._stop_requested:
                self._process.stop()
            while (end := self._process.poll()) is None:
                time.sleep(POLL_SECONDS)
        return end

    def ready(self) -> None:
        """Do nothing. The call returns once the actor has started."""

    def stop(self) -> None:
        """Ask the trial to save and end."""
        self._stop_requested = True
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """Kill the trial."""
        self._stop_requested = True
        if self._process is not None:
            self._process.kill()


class RayTrial:
    """A trial on a node of the cluster.

    Args:
        options: Options of the actor: its node, and its share of the node's GPUs and cores.

    Raises RunError if the head of the cluster does not answer.
    """

    pid = None

    def __init__(self, job: TrialJob, device: Device, options: dict[str, Any], head: HeadCalls):
        import ray

        self._head = head
        self._run = Path(job.run)
        self._progress = Progress(self._run)
        self._started = time.monotonic()
        self._lost = ""
        self._stop_requested = False
        (self._run / OUTCOME_FILE).unlink(missing_ok=True)
        self._actor: Any = head.get(
            lambda: ray.remote(TrialSupervisor).options(max_concurrency=2, **options).remote()
        )
        self._ready = self._actor.ready.remote()
        self._end = self._actor.run.remote(asdict(job), device.environment, os.getcwd(), code_version())

    def poll(self) -> TrialEnd | None:
        """Return how the trial ended, LOST if its node or actor died, or None while it runs.

        A trial is STOPPED if the head died. Its process may still run; only a later attempt waits for it.
        Raises RunError for a node that cannot run trials.
        """
        import ray

        if self._head.dead:
            return self._end_by_outcome(STOPPED, "the head of the Ray cluster died")
        if not self._lost:
            ready, _ = ray.wait([self._end], timeout=0)
            if not ready:
                return None
            try:
                status, reason, seconds = ray.get(self._end)
            # The second one: the node died before it had started the actor.
            except (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError) as error:
                self._lost = f"its node or process was lost: {first_line(error)}"
                if "creation task" in str(error):  # the node has no deskside, for example
                    raise RunError(
                        f"a node cannot start trials: {str(error).strip().splitlines()[-1]}"
                    ) from None
            else:
                self._end_actor()
                if status == UNUSABLE:
                    self._lost = reason
                    raise RunError(reason)
                return TrialEnd(status, reason, seconds)
        if not is_idle(self._run):
            return None  # the old process still saves
        return self._end_by_outcome(STOPPED if self._stop_requested else LOST, self._lost)

    def _end_by_outcome(self, status: str, reason: str) -> TrialEnd:
        """Return the end that the process recorded, or one with this status if it recorded none or was stopped."""
        seconds = time.monotonic() - self._started
        outcome = read_outcome(self._run) if is_idle(self._run) else None
        if outcome is not None and outcome[0] != STOPPED:
            return TrialEnd(*outcome, seconds)
        return TrialEnd(status, reason, seconds)

    def _end_actor(self) -> None:
        import ray

        self._head.begin(lambda: ray.kill(self._actor))

    @property
    def lost(self) -> bool:
        return bool(self._lost)

    def seconds_without_progress(self) -> float:
        """Return the seconds since the last progress; 0 while the actor waits for a GPU."""
        import ray

        return self._progress.seconds_without() if ray.wait([self._ready], timeout=0)[0] else 0.0

    def kill_hung(self, reason: str) -> TrialEnd:
        self.kill()
        return self._end_by_outcome("failed", reason)

    def stop(self) -> None:
        """Ask the trial to save and end. If the actor still waits for a GPU, there is nothing to save."""
        import ray

        self._stop_requested = True
        if self._head.dead:
            return
        if ray.wait([self._ready], timeout=0)[0]:
            self._actor.stop.remote()
        else:
            self._end_actor()

    def kill(self) -> None:
        """Kill the trial, and wait until its process has ended or its node is known to be dead."""
        import ray

        self._stop_requested = True
        if self._head.dead:
            return
        lost = ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError
        with contextlib.suppress(*lost, ray.exceptions.GetTimeoutError):
            ray.get(self._actor.kill.remote(), timeout=CALL_SECONDS)
            ray.wait([self._end], timeout=CALL_SECONDS)
        self._end_actor()


class RayExecutor:
    """Runs trials on the nodes of the Ray cluster at $RAY_ADDRESS, by default the one that this machine belongs to.

    kinds: `compute.device` of the arms. If all are "cpu", or the cluster has no GPU, each node is one device.
    Raises UsageError if there is no cluster or Ray is not installed.
    """

    def __init__(self, kinds: Collection[str]):
        os.environ.update(QUIET)
        try:
            import ray
        except ImportError:
            raise UsageError(
                "--executor ray: needs Ray; install it with: pip install 'deskside[ray]'"
            ) from None
        if not ray.is_initialized():
            try:
                ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
            # There is none, or it has another version of Ray.
            except (ConnectionError, RuntimeError) as error:
                raise UsageError(
                    f"--executor ray: {first_line(error)}; start a cluster with: ray start --head, and on the other "
                    f"machines: ray start --address HOST:6379"
                ) from None
        self._head = HeadCalls(ray.get_runtime_context().gcs_address)
        # Registered after Ray's own handler, so that it is called first. A search makes two executors in one process.
        atexit.register(self._leave)
        self._cpu_only = set(kinds) == {"cpu"}
        self._options: dict[str, dict[str, Any]] = {}  # of the actor, by the name of the device
        self._devices: list[Device] = []
        self._asked = time.monotonic()
        self._nodes: Future[list[dict[str, Any]]] | None = None  # the list that the head was asked for
        self._avoided: dict[str, float] = {}  # device -> until when
        self._trials: dict[str, RayTrial] = {}  # the last trial of each device
        self._list_devices(self._head.get(ray.nodes))

    def devices(self) -> Sequence[Device]:
        """Return the devices of the nodes that are alive, except those that have just lost a trial.

        Raises RunError if the head does not answer, or no node is alive.
        """
        import ray

        self._head.check()
        now = time.monotonic()
        if self._nodes is not None and self._nodes.done():
            self._list_devices(self._nodes.result())
            self._nodes = None
        if self._nodes is None and now - self._asked >= REFRESH_SECONDS:
            self._nodes, self._asked = self._head.begin(ray.nodes), now
        for name, trial in list(self._trials.items()):
            if trial.lost:
                del self._trials[name]
                self._avoided[name] = now + AVOID_SECONDS
        return [device for device in self._devices if self._avoided.get(device.name, 0.0) <= now]

    def wait_until_idle(self, run: Path) -> None:
        with attempt_lock(run):
            pass

    def start(self, job: TrialJob, device: Device, lock: int | None) -> RayTrial:
        trial = self._trials[device.name] = RayTrial(job, device, self._options[device.name], self._head)
        return trial

    def prepare(self, device: Device, lock: int | None) -> None:
        pass  # an actor starts with its trial

    def close(self) -> None:
        pass

    def _leave(self) -> None:
        """End the process of a study whose head died, before Ray tries to disconnect from the head.

        Ray takes seconds for that, and crashes if Ctrl-C interrupts it. Everything is saved by then, so Ctrl-C is
        ignored.
        """
        if self._head.dead:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(RunError.exit_code)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _list_devices(self, described: list[dict[str, Any]]) -> None:
        """List the devices of the nodes that ray.nodes() described. Raises RunError if none is alive."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in described if node["Alive"]]
        gpus = {} if self._cpu_only else {n["NodeID"]: int(n["Resources"].get("GPU", 0)) for n in nodes}
        self._devices.clear()
        for node in sorted(nodes, key=lambda node: node["NodeID"]):
            host = f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}"  # two nodes may be on one host
            cores = int(node["Resources"].get("CPU", 0))
            here = gpus.get(node["NodeID"], 0)
            if not here and (any(gpus.values()) or not cores):
                continue  # a node without GPUs, such as the head, in a cluster with some
            share = cores // max(1, here)
            environment = {THREADS: os.environ.get(THREADS, str(max(1, share)))}
            affinity = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            for number in range(max(1, here)):
                name = f"cuda:{number}@{host}" if here else f"cpu@{host}"
                self._devices.append(Device(name, environment))
                self._options[name] = {
                    "num_gpus": 1 if here else 0,
                    "num_cpus": share,
                    "scheduling_strategy": affinity,
                }
        if not self._devices:
            raise RunError("no node of the Ray cluster can run a trial: none is alive, or they have no CPUs")
