"""Worker processes: results equal those of one process, in the same order, and no process is left over."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, nullcontext
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import pytest

from deskside.data.chat.prepare_chat import ChatSpec, prepare_chat
from deskside.data.corpus import process_pool
from deskside.utils.errors import RunError
from tests.data import chat_tokenizer
from tests.data.chat.test_prepare_chat import conversations, write
from tests.data.corpus.pool_functions import failing, megabytes, squared, tool
from tests.train.tiny_run import descendants


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two processes, even for a few items."""
    monkeypatch.setattr(process_pool, "cpu_cores", lambda: 2)
    monkeypatch.setattr(process_pool, "MIN_PARALLEL_ITEMS", 8)
    monkeypatch.setattr(process_pool, "ITEMS_PER_TASK", 4)


@pytest.mark.usefixtures("two_processes")
def test_results_are_in_order_with_their_contexts() -> None:
    items = [(lambda n=n: n, n) for n in range(50)]  # contexts are not sent, so they need not be picklable
    with closing(process_pool.map_in_order(items, squared, ("local", 0), partial(tool, "built"))) as results:
        found = [(context(), result) for context, result in results]
    assert [(n, result[0]) for n, result in found] == [(n, n * n) for n in range(50)]
    assert {result[1] for _, result in found} == {"built"}
    assert os.getpid() not in {result[2] for _, result in found} and not active_children()


@pytest.mark.usefixtures("two_processes")
def test_few_items_are_processed_in_this_process() -> None:
    items = [(n, n) for n in range(7)]
    results = list(process_pool.map_in_order(items, squared, ("local", 0), partial(tool, "built")))
    assert results == [(n, (n * n, "local", 0)) for n in range(7)]


@pytest.mark.usefixtures("two_processes")
@pytest.mark.full
def test_closed_generator_leaves_no_process() -> None:
    with closing(
        process_pool.map_in_order([(n, n) for n in range(99)], squared, ("", 0), partial(tool, ""))
    ) as results:
        next(results)
        assert len(active_children()) >= 1
    assert not active_children()


@pytest.mark.usefixtures("two_processes")
def test_dead_worker_raises_run_error() -> None:
    items = [(n, n if n < 20 else -1) for n in range(30)]
    with pytest.raises(
        RunError, match="a process that prepares data was killed, most likely for lack of memory"
    ):
        list(process_pool.map_in_order(items, squared, ("", 0), partial(tool, "")))
    assert not active_children()


@pytest.mark.usefixtures("two_processes")
def test_workers_killed_while_they_send_do_not_block_this_process() -> None:
    """A result of 64 MB exceeds a pipe's buffer, so a worker is sending when the generator is closed."""
    items = [(n, 16_000_000) for n in range(60)]
    with closing(process_pool.map_in_order(items, megabytes, ("", 0), partial(tool, ""))) as results:
        next(results)
    assert not active_children()


def test_exception_in_a_worker_is_raised_in_the_parent() -> None:
    with process_pool.WorkerPool(1, print, ()) as pool:
        for kind, error in (("full disk", RunError), ("unpicklable", RuntimeError)):
            task = pool.submit(failing, kind)
            pool.receive()
            with pytest.raises(error, match="full disk" if kind == "full disk" else "Unpicklable"):
                task.result()
        good = pool.submit(abs, -3)
        pool.receive()
        assert good.result() == 3


@pytest.mark.parametrize("processes", [0, 2])
def test_calls_pass_each_result_to_its_function(processes: int) -> None:
    found: dict[int, tuple[int, str, int]] = {}
    pool = process_pool.WorkerPool(processes, print, ()) if processes else nullcontext()
    with pool as opened, process_pool.Calls(opened) as calls:
        for n in range(20):
            calls.submit(partial(found.__setitem__, n), squared, ("", os.getpid()), n)
    assert {n: result[0] for n, result in found.items()} == {n: n * n for n in range(20)}
    with pytest.raises(RunError, match="full disk"), process_pool.Calls(None) as calls:
        calls.submit(found.clear, failing, "full disk")


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file except .verified.json, which has the other files' modification times."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".verified.json"}


@pytest.mark.full  # tests/align/test_prepared.py compares preference pairs, which take the same path
def test_conversations_are_the_same_from_one_process_and_from_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes are equal, with duplicates, conversations that a template refuses, and invalid lines."""
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    found = conversations(150)
    found[20], found[70] = found[10], [{"role": "user", "content": "hello"}]
    train, val = write(tmp_path / "a.jsonl", found), write(tmp_path / "b.jsonl", found[5:15])
    with open(train, "a") as file:
        file.write('{"messages": 3}\nnot JSON\n')
    for spec in (ChatSpec((train,)), ChatSpec((train,), (val,), turns="last")):
        results = []
        for count in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(process_pool, "cpu_cores", lambda count=count: count)
                patch.setattr(process_pool, "MIN_PARALLEL_ITEMS", 8)
                out = tmp_path / f"{count}-{spec.turns}"
                index = prepare_chat(spec, tokenizer, out, quiet=True, shard_tokens=1500)
            results.append(contents(out))
            reasons = {reason.split(":")[0] for reason in index.bad_input["train"]}
            assert {"the chat template cannot render it", "no conversation"} <= reasons
        assert results[0] == results[1] and len(results[0]) > 8


PREPARE = """
import sys
from pathlib import Path
from deskside.data.corpus import process_pool
from deskside.data.chat.prepare_chat import ChatSpec, prepare_chat
process_pool.cpu_cores = lambda: 2
prepare_chat(ChatSpec((sys.argv[1],)), Path(sys.argv[2]), Path(sys.argv[3]), quiet=True)
"""


def is_running(pid: int) -> bool:
    """Return True if a process is running and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_all_processes_and_leaves_nothing(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer.make(tmp_path / "tokenizer")
    source = write(tmp_path / "a.jsonl", conversations(300) * 20)
    arguments = [source, str(tokenizer), str(tmp_path / "out" / "data")]
    process = subprocess.Popen(
        [sys.executable, "-c", PREPARE, *arguments], stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    deadline = time.monotonic() + 60
    while len(descendants(process.pid)) < 4:  # this process, two workers and the resource tracker
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    started = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130, 1) and stderr.rstrip().endswith("KeyboardInterrupt")
    assert list((tmp_path / "out").iterdir()) == []
    while any(map(is_running, started)):  # the resource tracker ends last
        assert time.monotonic() < deadline + 30
        time.sleep(0.05)
