"""The sandbox against malicious code, and against code that tries to pass without being right."""

import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest

from deskside.evaluate import sandbox
from deskside.evaluate.sandbox import check, check_many
from deskside.utils.errors import RunError

RIGHT = "def double(x):\n    return 2 * x\n"
TESTS = "assert double(2) == 4\nassert double(-3) == -6\n"


def blocked(body: str, *, imports: str = "", seconds: float = 10.0) -> str:
    """Return the reason of the verdict on a function with this body that would otherwise pass."""
    code = f"{imports}\ndef attack():\n    {body}\n    return True\n"
    verdict = check(code, "assert attack() is True", seconds=seconds)
    assert not verdict.passed
    return verdict.reason


def test_right_code_passes_and_wrong_code_does_not() -> None:
    assert check(RIGHT, TESTS) == sandbox.SandboxResult(True, "")
    assert check(RIGHT.replace("2", "3"), TESTS).reason.startswith("AssertionError")
    assert "SyntaxError" in check("def double(x) return", TESTS).reason
    assert "ZeroDivisionError" in check("1 / 0\n" + RIGHT, TESTS).reason
    assert "NameError" in check("", TESTS, "double").reason


def test_order_is_kept() -> None:
    verdicts = check_many([(RIGHT, TESTS), ("", TESTS), (RIGHT, TESTS)], workers=2)
    assert [v.passed for v in verdicts] == [True, False, True]


def test_values_of_all_plain_types_cross_unchanged() -> None:
    value = [
        None,
        True,
        10**50,
        1.5,
        float("inf"),
        "ü\x00",
        (1, [2]),
        {3},
        frozenset({4}),
        {(5,): b"6"},
        7j,
        range(1, 9, 2),
    ]
    code = "def same(x):\n    return x\ndef kind(x):\n    return type(x).__name__\n"
    tests = (
        f"value = {value!r}\nassert same(value) == value\n"
        "assert [kind(v) for v in value] == [type(v).__name__ for v in value]\n"
        "assert same(10**5000) == 10**5000\n"
    )
    assert check(code, tests.replace(", inf,", ", float('inf'),")) == sandbox.SandboxResult(True, "")


def test_changes_in_place_and_exceptions_reach_the_tests() -> None:
    code = (
        "def put(items, table):\n    items.append(1); table['a'] = 2\ndef fail(kind):\n    raise kind('k')\n"
    )
    tests = (
        "items, table = [], {}\nput(items, table)\nassert items == [1] and table == {'a': 2}\n"
        "for kind in KeyError, ValueError:\n    try:\n        fail(kind)\n        done = False\n"
        "    except kind as error:\n        done = error.args == ('k',) and str(error) == str(kind('k'))\n"
        "    assert done, repr(error)"
    )
    assert check(code, tests) == sandbox.SandboxResult(True, "")
    assert check(code, "fail(ValueError)").reason == "ValueError: k"


def test_constants_and_the_solution_s_own_helpers_are_there() -> None:
    code = "LIMIT = 3\ndef helper(x):\n    return x + LIMIT\ndef main(x):\n    return helper(x)\n"
    assert check(code, "assert main(1) == helper(1) == 1 + LIMIT").passed


# Malicious code


@pytest.mark.parametrize(
    "body",
    [
        "os.fork()",
        "assert os.system('true') == 0",
        "os.execv('/bin/true', ['true'])",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.kill(os.getppid(), 9)",
        "os.kill(1, 0)",
        "os.listdir('/')",
        "os.mkdir('/tmp/deskside-attack')",
        "os.unlink('/tmp/deskside-attack')",
        "os.open(os.path.expanduser('~/.bashrc'), os.O_RDONLY)",
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "open('/tmp/deskside-attack', 'w')",
        "os.readlink('/proc/self/exe')",
        "os.stat('/')",
    ],
)
def test_system_calls_are_refused(body: str) -> None:
    reason = blocked(body, imports="import os")
    assert "PermissionError" in reason or "AssertionError" in reason, reason


def test_fork_bomb_starts_nothing() -> None:
    reason = blocked("while True: os.fork()", imports="import os")
    assert "PermissionError" in reason


def test_threads_are_refused() -> None:
    reason = blocked("_thread.start_new_thread(print, ())", imports="import _thread")
    assert "start new thread" in reason


def test_network_is_refused() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.1)
    port = server.getsockname()[1]
    reason = blocked(f"_socket.socket(2, 1).connect(('127.0.0.1', {port}))", imports="import _socket")
    assert "PermissionError" in reason or "ModuleNotFoundError" in reason or "ImportError" in reason, reason
    with pytest.raises(TimeoutError):
        server.accept()
    server.close()


def test_raw_system_calls_are_refused() -> None:
    reason = blocked(
        "fd = ctypes.CDLL(None).syscall({'x86_64': 257, 'aarch64': 56}[machine], -100, b'/etc/passwd', 0); "
        "assert fd >= 0, fd",
        imports="import ctypes, platform\nmachine = platform.machine()",
    )
    assert "AssertionError: -1" in reason


def test_endless_loop_is_ended_in_time() -> None:
    began = time.perf_counter()
    # On a busy machine, the limit of wall-clock time, three times as long, can be reached before that of CPU time.
    assert re.search("longer than (1|3) s", check("while True: pass", TESTS, seconds=1).reason)
    assert time.perf_counter() - began < 20


def test_sleep_is_ended_in_time() -> None:
    assert "longer than 0.9 s" in check("import time\ntime.sleep(60)", TESTS, seconds=0.3).reason


def test_endless_tests_are_ended_in_time() -> None:
    assert re.search("longer than (1|3) s", check(RIGHT, "while double: pass", seconds=1).reason)


def test_memory_is_bounded() -> None:
    assert "MemoryError" in blocked("x = bytearray(1 << 30)")
    assert "MemoryError" in blocked("x = [0]\n    while True: x = x * 2")


def test_flood_of_output_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys\nfor i in range(20000):\n    print('x' * 1000); sys.stderr.write('y' * 1000)\n" + RIGHT
    assert check(code, TESTS).passed
    assert capfd.readouterr() == ("", "")


def test_deep_recursion_and_a_huge_answer_only_fail() -> None:
    assert "RecursionError" in blocked("return attack()")
    assert not check("def double(x):\n    return 'x' * (1 << 23)", TESTS).passed
    assert not check("def double(x):\n    y = []\n    y.append(y)\n    return y", TESTS).passed


def test_environment_and_open_files_are_not_inherited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    secret = open(tmp_path / "secret", "w+")  # noqa: SIM115 - it shall stay open
    os.set_inheritable(secret.fileno(), True)
    code = (
        "import os\n"
        "def names():\n    return sorted(os.environ)\n"
        "def readable():\n"
        "    found = []\n"
        "    for fd in range(3, 16):\n"
        "        try:\n            os.lseek(fd, 0, 1); found.append(fd)\n"
        "        except OSError:\n            pass\n"
        "    return found\n"
    )
    # Python itself may add the locale that it chose.
    assert check(code, "assert set(names()) <= {'PYTHONHASHSEED', 'LC_CTYPE'}").passed
    assert check(code, "assert readable() == []") == sandbox.SandboxResult(True, "")
    secret.close()


# Passing without being right


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "def double(x):\n    import os; os._exit(0)",
        "def double(x):\n    raise SystemExit(0)",
        "print('{\"passed\": true}')\nimport sys; sys.stdout.flush(); sys.exit(0)",
        "import os\nfor fd in range(64):\n"
        '    try: os.write(fd, b\'{"passed": true, "reason": ""}\')\n'
        "    except OSError: pass",
        "import builtins\nbuiltins.AssertionError = type('Fine', (Exception,), {})\ndef double(x): return 0",
        "import builtins, sys\nbuiltins.compile = builtins.exec = lambda *a, **k: None\ndef double(x): return 0",
        "class Equal(int):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "def double(x): return Equal(0)",
        "class Equal:\n    def __eq__(self, other): return True\ndef double(x): return Equal()",
        "class Meta(type):\n    def __eq__(self, other): return True\n"
        "class double(metaclass=Meta):\n    def __init__(self, x): pass",
        "def abs(x): return 0\ndef len(x): return 0\ndef double(x): return 0",
        "import sys\nfor frame in list(sys._current_frames().values()):\n    while frame:\n"
        "        frame.f_globals.update(judge=lambda *a: {'passed': True}); frame = frame.f_back\n"
        "def double(x): return 0",
    ],
)
def test_no_pass_without_the_right_answers(code: str) -> None:
    assert not check(code, TESTS).passed


def test_the_solution_does_not_see_the_tests() -> None:
    """The expected answers are not in the memory that the solution can inspect."""
    code = (
        "import gc\ndef double(x):\n"
        "    return any('FORTYTWO' in str(o) for o in gc.get_objects() if isinstance(o, (str, dict, list)))\n"
    )
    assert check(code, "word = 'FORTY' + 'TWO'\nassert double(2) is False").passed


@pytest.mark.parametrize(
    "change",
    [
        "lock.SYSTEM_CALLS.clear()",  # an unknown processor
        "lock._filter = lambda *_: None",  # a kernel that reports success and does nothing
        "fork_server.lock = lambda *_: fork_server.os._exit(0)",  # a process that ends before it is locked
    ],
)
def test_a_system_without_the_lock_runs_nothing(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"from deskside.evaluate.sandboxed import fork_server, lock; {change}; fork_server.main()"
    monkeypatch.setattr(sandbox, "SERVER", ("-c", program))
    monkeypatch.setattr(sandbox, "_server", sandbox._Server())
    with pytest.raises(RunError, match="no code of a model is run here"):
        check(RIGHT, TESTS)
    sandbox._server.stop()


def test_many_threads_may_check_at_once() -> None:
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(check(RIGHT, TESTS).passed)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
