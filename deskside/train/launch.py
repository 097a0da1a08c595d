"""Start one process per GPU for `--gpus`, and end with one exit code and one message.

The processes are started by torch's launcher (`torch.distributed.elastic.multiprocessing`), with the environment that
torchrun would give them, so training cannot tell them apart. torchrun's agent itself is not used: it ends the processes
30 s after a Ctrl-C even if they are saving, takes any failure for exit code 1, and prints a traceback for each.

- Rendezvous: a store on a free port of this machine, opened by this process, so that several launches never collide.
- Output: only that of rank 0. The error that caused the others is printed once, with its rank unless it is a usage
  error or the same in all.
- Signals: each process has its own session, so that Ctrl-C reaches only this process, which passes signals on. The
  processes save after the first one. After a second Ctrl-C they end without saving, but rank 0 first completes a
  checkpoint that it is writing. A third kills them.
- Failure: the other processes are ended after `SETTLE_SECONDS`, which lets them end by themselves. If a signal has
  ended one during start-up, they are ended after `STOP_SECONDS`, because they may wait for it on the GPU.
- If this process is killed, the kernel kills the others (`utils/launched.py`).
"""

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from deskside.utils import launched, signals
from deskside.utils.child_process import cpu_cores
from deskside.utils.errors import ProcessError, RunError, UsageError
from deskside.utils.quick_start import quick_imports

POLL_SECONDS = 0.05
SETTLE_SECONDS = 2.0  # after a failure, until the others are asked to end: they may fail for the same reason
# After one signal, from the end of the first process until the others are asked to end. They save together, then end
# together.
STOP_SECONDS = 60.0
GRACE_SECONDS = 5.0  # from being asked to end to being killed: a process that waits in NCCL cannot react
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED_CODES = frozenset(128 + number for number in FORWARDED)
OUTPUT_LINES = 30  # the last ones of a process that ended without reporting an error


def process_count(gpus: str | None, device: str) -> int:
    """Return how many processes `--gpus` asks for, each with a GPU; None asks for one.

    In a process that was started as one of several, by this module or by torchrun, it is their number.

    Args:
        gpus: A number, or "auto" for all GPUs that this process sees.
        device: `compute.device`. Only "cpu" starts several processes on the CPU.

    Raises UsageError for other text, too few GPUs, or a number that torchrun contradicts.
    """
    if gpus is not None and gpus != "auto" and not (gpus.isascii() and gpus.isdigit() and int(gpus) > 0):
        raise UsageError(f"--gpus: {gpus} is neither a number above zero nor auto")
    if "WORLD_SIZE" in os.environ:
        size = int(os.environ["WORLD_SIZE"])
        if gpus not in (None, "auto") and int(str(gpus)) != size:
            raise UsageError(f"--gpus: {gpus} contradicts torchrun, which started {size}; leave it out")
        return size
    if gpus is None or gpus == "1":
        return 1
    if device == "cpu":
        if gpus == "auto":
            raise UsageError(
                "--gpus: auto counts GPUs, and compute.device is cpu; give a number of processes"
            )
        return int(gpus)
    with quick_imports():
        import torch

    visible = torch.cuda.device_count()
    if gpus == "auto":
        return max(1, visible)
    if int(gpus) > visible:
        raise UsageError(
            f"--gpus: {gpus} are more than the {visible} that torch finds here (CUDA_VISIBLE_DEVICES can hide some); "
            f"to start processes on the CPU instead, add --compute.device cpu"
        )
    return int(gpus)


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `deskside ARGUMENTS` in several processes of this machine.

    Returns 0 if all end with 0, and 128 + N if signal N stopped them and rank 0 has said what it saved. Otherwise
    raises KeyboardInterrupt after a signal, or the error that caused the others: UsageError, or ProcessError with the
    exit code of that process, 128 + N if signal N killed it.
    """
    with quick_imports():
        from torch.distributed import TCPStore
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes

    # torch's warnings repeat what this module says in one line.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = range(processes)
    with tempfile.TemporaryDirectory(prefix="deskside-") as folder, _Forwarder() as forwarder:
        # Until `launched.begin`, because an interrupt while Python starts prints a traceback.
        with signals.hold(signal.SIGINT):
            context = start_processes(
                "deskside",
                sys.executable,
                dict.fromkeys(ranks, ("-m", "deskside", *arguments)),
                {rank: _environment(rank, processes, store.port) for rank in ranks},
                DefaultLogsSpecs(folder, {rank: Std.ALL for rank in ranks if rank}),
            )
            forwarder.begin(context.pids())
        try:
            ended_by_launcher = _wait(context, forwarder)
            result = context.wait(0)
        finally:
            context.close(signal.SIGKILL)
        if result is None:
            raise RunError("processes do not end after SIGKILL: their driver hangs; restart the machine")
        failures = result.failures
        own = {rank: failure for rank, failure in failures.items() if rank not in ended_by_launcher}
        if not failures:
            return 0
        if forwarder.received and not any(_kind(failure) == "error" for failure in own.values()):
            return _stopped(forwarder.received[0], failures)
        raise _cause(own, processes, context.stderrs)


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return the environment variables of one process."""
    threads = max(1, cpu_cores() // processes)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process has the store, not rank 0
        "TORCHELASTIC_RESTART_COUNT": "0",  # earlier versions of torch name their keys in the store after it
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        **launched.environment(),
    }


class _Forwarder:
    """Context manager that passes SIGINT, SIGTERM and SIGHUP on to the processes.

    torch's `start_processes` sets its own handlers, which `begin` replaces. `received`: the signals so far.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._pids: tuple[int, ...] = ()
        numbers = (*FORWARDED, signal.SIGQUIT)
        self._previous = {number: signal.getsignal(number) for number in numbers}

    def __enter__(self) -> "_Forwarder":
        return self

    def begin(self, pids: Mapping[int, int]) -> None:
        """Pass on signals from now on. Under nohup, SIGHUP stays ignored."""
        self._pids = tuple(pids.values())
        for number, previous in self._previous.items():
            ours = number in FORWARDED and previous is not signal.SIG_IGN
            signal.signal(number, self._forward if ours else previous)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from torch.distributed.elastic.multiprocessing import SignalException

        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if isinstance(error, SignalException):  # a signal before `begin`; torch has ended the processes
            raise signals.interrupt(error.sigval) from None


def _wait(context: Any, forwarder: _Forwarder) -> list[int]:
    """Wait until all processes have ended, or end them. Return the ranks that were ended here.

    A process that ends with the exit code of a signal was asked to stop, so it is no failure. After a second signal,
    rank 0 may take any time to complete a checkpoint.
    """
    pids = context.pids()
    end_at = math.inf
    while True:
        codes = {rank: _exit_code(pid) for rank, pid in pids.items()}
        running = [rank for rank, code in codes.items() if code is None]
        if not running:
            return []
        interrupts = forwarder.received.count(signal.SIGINT)
        failed = any(code not in (None, 0) and code not in STOPPED_CODES for code in codes.values())
        if failed or (interrupts > 1 and codes[0] is not None):
            end_at = min(end_at, time.monotonic() + SETTLE_SECONDS)
        elif len(forwarder.received) == 1 and STOPPED_CODES.intersection(codes.values()):
            end_at = min(end_at, time.monotonic() + STOP_SECONDS)
        if interrupts > 2:
            context.close(signal.SIGKILL)
            return running
        if time.monotonic() >= end_at:
            context.close(signal.SIGTERM, timeout=GRACE_SECONDS)
            return running
        time.sleep(POLL_SECONDS)


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a process, -N after signal N, None while it runs. Leaves it for torch to collect."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _kind(failure: Any) -> str | None:
    """Return the kind of error that a process has reported, None if it has reported none."""
    kind: str | None = failure.error_file_data.get("kind")
    return kind


def _stopped(number: int, failures: Mapping[int, Any]) -> int:
    """Return the exit code if rank 0 has said what it saved. Otherwise raise the interrupt, with rank 0's remedy."""
    rank_0 = failures.get(0)
    if rank_0 is not None and rank_0.exitcode in STOPPED_CODES and _kind(rank_0) is None:
        return 128 + number
    error = signals.interrupt(number)
    if rank_0 is not None:
        for remedy in rank_0.error_file_data.get("remedies", ()):
            signals.add_remedy(error, remedy)
    raise error


def _cause(
    failures: Mapping[int, Any], processes: int, outputs: Mapping[int, str]
) -> UsageError | ProcessError:
    """Return the error that caused the others. If its process has reported none, print the end of its output.

    failures: rank -> torch's `ProcessFailure`; outputs: rank -> file with its standard error, "" if not redirected.
    """
    rank = min(failures, key=lambda rank: _order(failures[rank]))
    cause = failures[rank]
    if _kind(cause) is not None:
        text = cause.message.removeprefix("deskside: ")
        if cause.exitcode == UsageError.exit_code:
            return UsageError(text)
    else:
        text = (
            f"was killed by {cause.signal_name()}" if cause.exitcode < 0 else f"ended with {cause.exitcode}"
        )
        if outputs[rank]:
            with Path(outputs[rank]).open(encoding="utf-8", errors="replace") as file:
                sys.stderr.writelines(deque(file, OUTPUT_LINES))
    of_all = len(failures) == processes and len({failure.message for failure in failures.values()}) == 1
    code = cause.exitcode if cause.exitcode > 0 else 128 - cause.exitcode
    return ProcessError(text if of_all else f"rank {rank}: {text}", code)


def _order(failure: Any) -> tuple[int, float]:
    """Return a sort key: the failure that probably caused the others first.

    When a process ends, the others fail in their next collective with an unexpected error, or torch aborts them.
    """
    kind, aborted = _kind(failure), failure.exitcode == -signal.SIGABRT
    if kind == "error":
        group = 0
    elif failure.exitcode < 0 and not aborted:
        group = 1
    else:
        group = 3 if kind == "stopped" else 2
    return group, float(failure.error_file_data.get("seconds", failure.timestamp))
