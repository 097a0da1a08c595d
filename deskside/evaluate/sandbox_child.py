"""What runs inside of the sandbox: a file of its own, started by `sandbox.py` with nothing but the standard library.

It imports what solutions commonly import, takes every right away from itself, and only then reads text that nobody has
seen. Two processes work together. The *code* process holds the solution and calls its functions on demand. The *judge*
process runs the tests, in which those functions are stand-ins that send their arguments over a socket and get a plain
value back. So nothing of a solution ever runs where its tests are judged.
"""

import ast
import builtins
import ctypes
import importlib
import json
import os
import platform
import resource
import struct
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

UNLOCKED = 97  # exit code: the lock did not hold, and nothing was run
MESSAGE_BYTES = 1 << 22
REASON_CHARACTERS = 300
PRELOADED = (
    "abc", "array", "base64", "bisect", "builtins", "calendar", "cmath", "collections", "collections.abc", "copy",
    "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json",
    "math", "numbers", "operator", "random", "re", "secrets", "statistics", "string", "struct", "sys", "textwrap",
    "time", "types", "typing", "unicodedata", "zlib", "_strptime", "encodings.idna",
)  # fmt: skip

# Reading, writing and closing what is open, memory, signals of its own, clocks, waiting, random numbers, and the end.
# No opening, no network, no new process or thread, no signal to others.
SYSTEM_CALLS = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 23, 24, 25, 28, 35, 39, 60, 79, 96, 98, 100, 131, 186, 201,
         202, 219, 228, 229, 230, 231, 270, 271, 318, 324, 334),
    ),
    "aarch64": (
        0xC00000B7,
        (17, 57, 62, 63, 64, 72, 73, 80, 93, 94, 98, 101, 113, 114, 115, 124, 128, 132, 134, 135, 139, 153, 165, 169,
         172, 178, 214, 215, 216, 222, 226, 233, 278, 283, 293),
    ),
}  # fmt: skip


def lock(seconds: int, memory_bytes: int) -> None:
    """Take all rights away from this process. Exits with UNLOCKED where the kernel does not take part."""
    for name in PRELOADED:
        importlib.import_module(name)
    hard = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 16,
    }
    for what, limit in hard.items():
        resource.setrlimit(what, (limit, limit))
    architecture, allowed = SYSTEM_CALLS.get(platform.machine(), (0, ()))
    if not allowed or not _filter(architecture, allowed):
        sys.exit(UNLOCKED)
    try:
        open("/dev/null").close()
    except OSError:
        return
    sys.exit(UNLOCKED)


def _filter(architecture: int, allowed: tuple[int, ...]) -> bool:
    """seccomp with a filter in classic BPF: another architecture is killed, any other system call gets EPERM."""

    def instruction(code: int, yes: int, no: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, yes, no, value)

    load, equal, give = 0x20, 0x15, 0x06
    program = [
        instruction(load, 0, 0, 4),
        instruction(equal, 1, 0, architecture),
        instruction(give, 0, 0, 0x80000000),
        instruction(load, 0, 0, 0),
        *(instruction(equal, len(allowed) - at, 0, number) for at, number in enumerate(allowed)),
        instruction(give, 0, 0, 0x00050001),
        instruction(give, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(program), 8 * len(program))
    pointer = struct.pack("<H6xQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    no_new_privileges, seccomp, by_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0):
        return False
    return not libc.prctl(seccomp, by_filter, ctypes.c_char_p(pointer), 0, 0)


class Channel:
    """Messages between the two processes: four bytes of length, then JSON."""

    def __init__(self, number: int):
        self._number = number

    def send(self, message: Any) -> None:
        data = json.dumps(message).encode()
        if len(data) > MESSAGE_BYTES:
            raise ValueError("a value is too large")
        view = memoryview(struct.pack("<I", len(data)) + data)
        while view:
            view = view[os.write(self._number, view) :]

    def receive(self) -> Any:
        (length,) = struct.unpack("<I", self._exactly(4))
        if length > MESSAGE_BYTES:
            raise ValueError("a value is too large")
        return json.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = os.read(self._number, count - len(data))
            if not part:
                raise EOFError("the code ended its process")
            data += part
        return bytes(data)


# Values that may travel, by value. Types of the solution's own become what they are built on, or are refused.


def encode(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(v) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in dict.items(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, Iterator):
        return {"iterator": [encode(v) for v in value]}
    raise TypeError(f"a {type(value).__name__} cannot leave the sandbox")


def decode(value: Any) -> Any:
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("no message of this protocol")
        return value
    ((tag, inner),) = value.items()
    if tag in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, tag)(decode(v) for v in inner)
    if tag == "dict":
        return {decode(k): decode(v) for k, v in inner}
    if tag == "bytes":
        return bytes.fromhex(inner)
    if tag in ("complex", "range"):
        return getattr(builtins, tag)(*inner)
    if tag == "iterator":
        return iter([decode(v) for v in inner])
    raise ValueError("no message of this protocol")


# The code process


def serve(channel: Channel, source: str) -> None:
    """Run the solution, say what it defines, then call its functions until nobody asks any more."""
    module = types.ModuleType("__solution__")
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, "<solution>", "exec"), module.__dict__)
        names = {n: v for n, v in vars(module).items() if not n.startswith("__")}
        found: dict[str, Any] = {"functions": [n for n, v in names.items() if callable(v)], "values": {}}
        for name, value in names.items():
            if not callable(value) and isinstance(value, int | float | str | list | tuple | dict | set):
                try:
                    found["values"][name] = encode(value)
                except TypeError:
                    continue
    except BaseException as error:  # noqa: BLE001 - whatever the code does
        channel.send({"failed": _said(error)})
        return
    channel.send(found)
    while True:
        try:
            request = channel.receive()
        except EOFError:
            return
        try:
            positional = [decode(v) for v in request["args"]]
            named = {k: decode(v) for k, v in request["kwargs"].items()}
            result = encode(vars(module)[request["name"]](*positional, **named))
            channel.send({"value": result, "args": [encode(v) for v in positional]})
        except BaseException as error:  # noqa: BLE001 - whatever the code does
            channel.send({"error": type(error).__name__, "text": _said(error)})


# The judge process


def judge(channel: Channel, tests: str) -> dict[str, Any]:
    """Run the tests; passed when they come to their end."""
    try:
        tree = ast.parse(tests)
        found = channel.receive()
        if "failed" in found:
            return {"passed": False, "reason": str(found["failed"])[:REASON_CHARACTERS]}
        wanted = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(vars(builtins))
        names: dict[str, Any] = {"__name__": "__tests__"}
        names |= {n: decode(v) for n, v in found["values"].items() if n in wanted}
        names |= {n: _stand_in(channel, n) for n in found["functions"] if n in wanted}
        exec(compile(tree, "<tests>", "exec"), names)
    except BaseException as error:  # noqa: BLE001 - SystemExit is no pass either
        return {"passed": False, "reason": _said(error)}
    return {"passed": True, "reason": ""}


def _stand_in(channel: Channel, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        sent = {k: encode(v) for k, v in kwargs.items()}
        channel.send({"name": name, "args": [encode(v) for v in args], "kwargs": sent})
        reply = channel.receive()
        if "error" in reply:
            kind: Any = getattr(builtins, str(reply["error"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                kind = RuntimeError
            raise kind(str(reply.get("text", ""))[:REASON_CHARACTERS])
        for mine, theirs in zip(args, reply["args"], strict=True):  # what was changed in place
            if isinstance(mine, list):
                mine[:] = decode(theirs)
            elif isinstance(mine, dict | set):
                changed = decode(theirs)
                mine.clear()
                mine.update(changed)
        return decode(reply["value"])

    call.__name__ = name
    return call


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 - an exception of the code's own
        text = ""
    return f"{type(error).__name__}: {text}"[:REASON_CHARACTERS]


def main() -> None:
    role, number, seconds, memory = sys.argv[1], *(int(value) for value in sys.argv[2:])
    sys.set_int_max_str_digits(0)
    channel = Channel(number)
    lock(seconds, memory)
    text = sys.stdin.buffer.read().decode(errors="replace")
    if role == "code":
        serve(channel, text)
    else:
        verdict = judge(channel, text)
        sys.stdout.write(json.dumps(verdict))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
