"""A corpus of attacks on the sandbox: code that tries to pass without being right, to escape, or to end a batch."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deskside.evaluate.sandbox import SandboxResult, check, check_many
from tests.evaluate.sandbox_attacks import ATTACKS, HONEST, KINDS, MARKER, RIGHT, TESTS

DATA = Path(__file__).parents[3] / "shared" / "data" / "verifiable"


def test_no_attack_passes_escapes_or_ends_the_batch() -> None:
    """All attacks are one batch. The right code between them must still pass, so
    that no attack disturbs another check.
    """
    jobs = [job for code, tests in ATTACKS.values() for job in ((code, tests), (RIGHT, TESTS))]
    verdicts = check_many(jobs, seconds=1, workers=4)
    passed = [name for name, verdict in zip(ATTACKS, verdicts[::2], strict=True) if verdict.passed]
    assert passed == []
    assert [verdict for verdict in verdicts[1::2] if not verdict.passed] == []
    assert len(ATTACKS) >= 60
    assert not Path(MARKER).exists()


def test_every_kind_of_tests_in_the_corpus_can_be_passed() -> None:
    """A corpus whose tests cannot be passed would prove nothing."""
    for tests in KINDS:
        name = next((word for word in ("double(", "P()") if word in tests), "f(")
        assert any(check(code, tests).passed for code in HONEST if name.strip("()") in code), tests


def descendants(name: str) -> list[int]:
    """Return the living processes whose environment or arguments contain `name`, and their descendants."""
    parents, marked = {}, set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z":
                continue
            parents[int(folder.name)] = int(parent)
            if name.encode() in (folder / "cmdline").read_bytes():
                marked.add(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    grown = True
    while grown:
        more = {child for child, parent in parents.items() if parent in marked} - marked
        marked |= more
        grown = bool(more)
    return sorted(marked)


def wait_until(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("killed", ["caller", "server", "supervisor"])
def test_nothing_is_left_of_a_check_whose_ancestor_is_killed(killed: str, tmp_path: Path) -> None:
    """The code sleeps for a million seconds and ignores all signals that it can."""
    name = f"sandbox-{os.getpid()}-{killed}"
    program = (
        "import sys, time, threading\nfrom deskside.evaluate.sandbox import check\n"
        "code = 'import time\\ndef f():\\n    time.sleep(10**6)'\n"
        "threading.Thread(target=check, args=(code, 'f()'), kwargs={'seconds': 10**5}, daemon=True).start()\n"
        "time.sleep(10**6)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", program, name])
    try:
        found: list[int] = []

        def all_there() -> bool:
            found[:] = descendants(name)
            return len(found) == 5

        assert wait_until(all_there), found
        # caller, server, supervisor, solution and judge, in the order in which they start
        chain = sorted(found)
        os.kill(chain[("caller", "server", "supervisor").index(killed)], signal.SIGKILL)
        below = chain[2:] if killed != "supervisor" else chain[3:]
        below += [chain[1]] if killed == "caller" else []

        def gone() -> bool:
            return not [pid for pid in below if alive(pid)]

        assert wait_until(gone), below
    finally:
        caller.kill()
        caller.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_server_is_started_again() -> None:
    assert check(RIGHT, TESTS).passed
    from deskside.evaluate import sandbox

    assert sandbox._server._process is not None
    sandbox._server._process.kill()
    sandbox._server._process.wait()
    assert check(RIGHT, TESTS) == SandboxResult(True, "")


def test_a_forked_child_has_a_server_of_its_own() -> None:
    assert check(RIGHT, TESTS).passed
    child = os.fork()
    if child == 0:
        os._exit(0 if check(RIGHT, TESTS).passed else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert check(RIGHT, TESTS).passed


def test_helpers_of_the_task_are_not_the_code_s_to_replace() -> None:
    """HumanEval 32, 38 and 50 test one function with another function of the prompt."""
    prompt = "def twice(x):\n    return 2 * x\ndef half(x):\n    'Halve it.'\n"
    tests = "assert twice(half(4)) == 4\n"
    right = prompt + "    return x / 2\n"
    forged = "def half(x):\n    return 0\ndef twice(x):\n    return 4\n"
    assert check(right, tests, "half", prompt) == SandboxResult(True, "")
    assert not check(forged, tests, "half", prompt).passed
    assert not check("twice = 1", tests, "half", prompt).passed


# What right solutions may do


@pytest.mark.parametrize(
    ("code", "tests"),
    {
        "prints a lot": (RIGHT, "import sys\nprint('x' * (1 << 20)); sys.stderr.write('y' * (1 << 20))\n" + TESTS),
        "objects": (
            "class Node:\n    def __init__(self, data):\n        self.data, self.left = data, None\n"
            "    def __eq__(self, other):\n        return self.data == other.data\n"
            "def depth(node):\n    return 0 if node is None else 1 + depth(node.left)\n",
            "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(3)\nassert depth(root) == 3\n"
            "assert root.left.data == 2 and root.left is root.left and isinstance(root, Node)\n"
            "assert Node(1) == Node(1) and Node(1) != Node(2) and root != 1 and not isinstance(1, Node)\n",
        ),
        "objects in a list": (
            "class Pair:\n    def __init__(self, a):\n        self.a = a\ndef total(items):\n"
            "    return sum(i.a for i in items)\n",
            "assert total([Pair(1), Pair(2)]) == 3",
        ),
        "functions of the tests": (
            "def apply(f, x):\n    return f(x)\ndef inverse(x):\n    return -x\n",
            "assert apply(lambda x: x + 1, 2) == 3\nassert apply(inverse, 2) == -2\nassert apply(len, [1]) == 1\n"
            "assert apply(lambda x: inverse(x) * 2, 2) == -4\n",
        ),
        "functions of the code": ("def adder(n):\n    return lambda x: x + n\n", "assert adder(2)(3) == 5"),
        "endless generator": (
            "def naturals():\n    n = 0\n    while True:\n        yield n\n        n += 1\n",
            "from itertools import islice\nassert list(islice(naturals(), 1000)) == list(range(1000))",
        ),
        "generator that raises": (
            "def g():\n    yield 1\n    yield 2\n    raise KeyError('end')\n",
            "it = g()\nassert next(it) == 1\nassert next(it) == 2\n"
            "try:\n    next(it)\nexcept KeyError:\n    ok = 1\nassert ok",
        ),
        "exceptions of its own": (
            "class Low(ValueError):\n    pass\ndef f(x):\n    raise Low('low')\n",
            "try:\n    f(1)\nexcept Low:\n    a = 1\ntry:\n    f(1)\nexcept ValueError:\n    b = 1\nassert a == b == 1",
        ),
        "exits": ("def f():\n    raise SystemExit(2)\n", "try:\n    f()\nexcept SystemExit:\n    ok = 1\nassert ok"),
        "a builtin's name": ("def sum(a, b):\n    return a + b\n", "assert sum(1, 2) == 3"),
        "types": ("def f(x, kind):\n    return isinstance(x, kind)\n", "assert f(1, int) and not f(1, str)"),
        "modules without import": (
            "import sys\ndef f(x):\n    return sys.getsizeof(x)\n",
            "assert f(()) == sys.getsizeof(())"),
        "decimals and dates": (
            "from decimal import Decimal\nfrom datetime import date\n"
            "def f():\n    return Decimal('0.1'), date(2026, 1, 2)\n",
            "from decimal import Decimal\nfrom datetime import date\nassert f() == (Decimal('0.1'), date(2026, 1, 2))",
        ),
    }.values(),
)  # fmt: skip
def test_right_solutions_pass(code: str, tests: str) -> None:
    assert check(code, tests) == SandboxResult(True, "")


# The data sets whose reference solutions must pass


def records(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name) as file:
        return [json.loads(line) for line in file]


def humaneval() -> list[tuple[str, ...]]:
    rows = records("HumanEval.jsonl.gz")
    return [
        (
            row["prompt"] + row["canonical_solution"],
            f"{row['test']}\ncheck({row['entry_point']})",
            row["entry_point"],
            row["prompt"],
        )
        for row in rows
    ]


def mbpp() -> list[tuple[str, ...]]:
    rows = records("mbpp.jsonl.gz")
    return [
        (row["code"], "\n".join([row["test_setup_code"], *row["test_list"], *row["challenge_test_list"]]))
        for row in rows
    ]


# Those that the first sandbox failed: a built-in name, nodes and pairs, a type, and a module that is not imported.
HARD = (125, 366, 532, 595, 600, 926)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/verifiable")
def test_some_reference_solutions_pass() -> None:
    problems = mbpp()
    jobs = humaneval()[:164:16] + [problems[at] for at in HARD]
    assert [v for v in check_many(jobs) if not v.passed] == []


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/verifiable")
@pytest.mark.parametrize(("jobs", "count"), [(humaneval, 164), (mbpp, 974)])
def test_all_reference_solutions_pass(jobs: Callable[[], list[tuple[str, ...]]], count: int) -> None:
    verdicts = check_many(jobs(), seconds=60)
    assert [(at, verdict.reason) for at, verdict in enumerate(verdicts) if not verdict.passed] == []
    assert len(verdicts) == count
