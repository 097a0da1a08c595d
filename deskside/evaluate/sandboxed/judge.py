"""The process that runs the tests. What a model wrote never runs here; it is asked, and its answers are only data."""

import ast
import builtins
import importlib
import symtable
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from deskside.evaluate.sandboxed.channel import (
    CHUNK,
    NOT_A_MESSAGE,
    REASON_CHARACTERS,
    Channel,
    ProtocolError,
    consumed,
    decode,
    described,
    encode,
    error_message,
    exception_from,
)
from deskside.evaluate.sandboxed.lock import PRELOADED

End = Callable[[bool, str], NoReturn]


class Judge:
    """The tests' side of the channel.

    Args:
        channel: The connection to the solution.
        end: Reports the verdict and ends the process at once, so that no test can swallow it.
    """

    def __init__(self, channel: Channel, end: End):
        self._channel = channel
        self._end = end
        self._remotes: dict[int, Remote] = {}
        self._streams: dict[int, RemoteIterator] = {}
        self._exceptions: dict[str, type[BaseException]] = {}
        self._callbacks: list[Any] = []

    def run(self, tests: str, helpers: str, entry_point: str) -> NoReturn:
        """Run the tests and report. They pass if they come to their end and used something of the solution."""
        try:
            tree = ast.parse(tests)
            uses = Uses(tests, tree)
            names = self._names(uses, helpers, entry_point)
            exec(compile(tree, "<tests>", "exec"), names)
        except BaseException as error:  # noqa: BLE001 - SystemExit is no pass either
            self._end(False, described(error))
        self._end(True, "")

    def _names(self, uses: "Uses", helpers: str, entry_point: str) -> dict[str, Any]:
        """Return the globals of the tests. What the tests' own side defines is never taken from the solution."""
        names: dict[str, Any] = {"__name__": "__tests__"}
        exec(compile(helpers, "<helpers>", "exec"), names)
        names |= {name: importlib.import_module(name) for name in uses.modules if name not in names}
        started = self._receive()
        if "failed" in started:
            self._end(False, str(started["failed"])[:REASON_CHARACTERS])
        defined = started.get("names")
        if not isinstance(defined, list):
            self._end(False, NOT_A_MESSAGE)
        if entry_point and entry_point not in defined:
            self._end(False, f"NameError: name {entry_point!r} is not defined")
        wanted = [n for n in uses.names if n in defined and (n not in names or n == entry_point)]
        if not wanted:
            self._end(False, "the tests use nothing that the code defines")
        return names | {name: self._ask({"global": name}) for name in wanted}

    def request(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Have the solution carry out an operation. Returns its value or raises the exception that it raised."""
        sent = {k: self._encoded(v) for k, v in kwargs.items()}
        return self._ask({"op": operation, "args": [self._encoded(v) for v in args], "kwargs": sent}, args)

    def _ask(self, message: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
        try:
            self._channel.send(message)
        except ProtocolError as error:
            self._end(False, str(error))
        while "callback" in (reply := self._receive()):
            self._call_back(reply)
        try:
            raised = exception_from(reply, self._exceptions) if "error" in reply else None
        except ProtocolError as error:
            self._end(False, str(error))
        if raised is not None:
            raise raised
        try:
            changed = [(args[at], self._decoded(after)) for at, after in reply.get("changed", ())]
            value = self._decoded(reply["value"])
        except (ProtocolError, KeyError, TypeError, ValueError, IndexError):
            self._end(False, NOT_A_MESSAGE)
        for mine, theirs in changed:
            _overwrite(mine, theirs)
        return value

    def _receive(self) -> dict[str, Any]:
        try:
            return self._channel.receive()
        except ProtocolError as error:
            self._end(False, str(error))

    def _call_back(self, message: dict[str, Any]) -> None:
        """Call a function of the tests that was passed to the solution."""
        try:
            function = self._callbacks[message["callback"]]
            args = [self._decoded(v) for v in message["args"]]
            kwargs = {k: self._decoded(v) for k, v in message["kwargs"].items()}
        except (ProtocolError, KeyError, TypeError, IndexError, AttributeError):
            self._end(False, NOT_A_MESSAGE)
        try:
            self._channel.send({"value": self._encoded(function(*args, **kwargs))})
        except ProtocolError as error:
            self._end(False, str(error))
        except Exception as error:  # noqa: BLE001 - the tests' function raises for the solution to handle
            self._channel.send(error_message(error))

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _decoded(self, value: Any) -> Any:
        return decode(value, self._resolve)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote | RemoteIterator):
            return {"object": number_of(value)}
        if isinstance(value, Iterator):
            return consumed(value, self._refer)
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        raise TypeError(f"a {type(value).__name__} of the tests cannot be passed to the code")

    def _resolve(self, tag: str, inner: Any) -> Any:
        if tag == "exception":
            name, *bases = [str(base) for base in inner]
            base = type(exception_from({"error": bases, "text": ""}, self._exceptions))
            return self._exceptions.setdefault(name, type(name, (base,), {}))
        if not isinstance(inner, int):
            raise ValueError("a reference without a number")
        if tag == "object":
            return self._remotes.setdefault(inner, Remote(self, inner))
        if tag == "stream":
            return self._streams.setdefault(inner, RemoteIterator(self, inner))
        raise ValueError(f"no such tag: {tag}")


class Uses:
    """The names that tests expect from outside.

    Only the tests decide this, never the code: it cannot replace a built-in function or a module of the standard
    library. The exception is a solution that is asked to define one, `assert sum(10, 15) == 6`: if the tests use a
    single built-in function and no other name from outside, that function is what is tested.
    """

    def __init__(self, tests: str, tree: ast.Module):
        bases = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        loads = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        outside = _outside(symtable.symtable(tests, "<tests>", "exec"))
        # `math.pi` without an import is the module; `copy(x)` is a function of the solution.
        self.modules = outside & set(PRELOADED) - {n.id for n in loads if id(n) not in bases}
        self.names = outside - set(vars(builtins)) - self.modules
        if not self.names:
            functions = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call))
            called = {f.id for f in functions if isinstance(f, ast.Name)} & outside & set(vars(builtins))
            if len(called) == 1:
                self.names |= called


def _outside(tests: symtable.SymbolTable) -> set[str]:
    """Return the names that the tests read and do not bind at their top level."""
    bound = {s.get_name() for s in tests.get_symbols() if s.is_assigned() or s.is_imported()}
    read = {s.get_name() for s in tests.get_symbols() if s.is_referenced()}
    tables = list(tests.get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
        bound |= {s.get_name() for s in table.get_symbols() if s.is_assigned() and s.is_declared_global()}
    return read - bound


def _overwrite(mine: Any, theirs: Any) -> None:
    """Give a mutable argument the content that the solution left in it."""
    if isinstance(mine, list) and isinstance(theirs, list):
        if len(mine) == len(theirs):
            for at, (old, new) in enumerate(zip(mine, theirs, strict=True)):
                if isinstance(old, list | dict | set) and type(old) is type(new):
                    _overwrite(old, new)  # other names of the tests for this object see the change, too
                else:
                    mine[at] = new
        else:
            mine[:] = theirs
    elif isinstance(mine, dict | set) and isinstance(theirs, dict | set):
        mine.clear()
        mine.update(theirs)


def number_of(remote: "Remote | RemoteIterator") -> int:
    """Return the number of a remote object, without asking the solution for an attribute."""
    return object.__getattribute__(remote, "_number")


class RemoteIterator:
    """An iterator of the solution, read in chunks that double, so that an endless one can be used, too."""

    def __init__(self, judge: Judge, number: int):
        self._judge, self._number = judge, number
        self._items: list[Any] = []
        self._wanted, self._ended = 1, False

    def __iter__(self) -> "RemoteIterator":
        return self

    def __next__(self) -> Any:
        if not self._items and not self._ended:
            items, self._ended = self._judge.request("take", self, self._wanted)
            self._items = list(items)[::-1]
            self._wanted = min(2 * self._wanted, CHUNK)
        if not self._items:
            raise StopIteration
        return self._items.pop()


class Remote:
    """An object of the solution: a function, a class, or an instance of one.

    A plain value never equals one, and neither operand of a comparison or of arithmetic with one may be a plain value:
    otherwise the solution would be told what is expected. Two of the solution's own objects are compared by it.
    """

    __slots__ = ("_judge", "_number")

    def __init__(self, judge: Judge, number: int):
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)  # protocols of copy, pickle and others look for these
        return _judge(self).request("getattr", self, name)

    def __iter__(self) -> Any:
        return iter(_judge(self).request("iter", self))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(_judge(self).request("isinstance", value, self))


def _judge(remote: Remote) -> Judge:
    return object.__getattribute__(remote, "_judge")


def _requests(operation: str) -> Callable[..., Any]:
    """Return a method of `Remote` that has the solution carry out an operation."""

    def method(self: Remote, *args: Any, **kwargs: Any) -> Any:
        return _judge(self).request(operation, self, *args, **kwargs)

    return method


def _compares(operation: str) -> Callable[..., Any]:
    """Return a method of `Remote` for an operation between two of the solution's objects."""

    def method(self: Remote, other: Any) -> Any:
        return _judge(self).request(operation, self, other) if isinstance(other, Remote) else NotImplemented

    return method


for _name in [
    "call",
    "setattr",
    "delattr",
    "getitem",
    "setitem",
    "delitem",
    "len",
    "bool",
    "hash",
    "str",
    "repr",
]:
    setattr(Remote, f"__{_name}__", _requests(_name))
for _name in ["eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul"]:
    setattr(Remote, f"__{_name}__", _compares(_name))
