"""The process that runs the tests.

The model's code never runs here: the judge sends requests to the solution, and decodes the replies as plain data.
"""

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
    decode,
    described,
    encode,
    encode_iterator,
    error_message,
    exception_from,
)
from deskside.evaluate.sandboxed.lock import PRELOADED

End = Callable[[bool, str], NoReturn]  # (passed, reason)


class Judge:
    """Runs the tests, and translates their use of the solution into messages.

    Args:
        channel: The connection to the solution.
        end: Reports the verdict and exits at once. It raises no exception, which a test could catch.
    """

    def __init__(self, channel: Channel, end: End):
        self._channel = channel
        self._end = end
        self._remotes: dict[int, Remote] = {}
        self._streams: dict[int, RemoteIterator] = {}
        self._exceptions: dict[str, type[BaseException]] = {}
        self._callbacks: list[Any] = []

    def run(self, tests: str, helpers: str, entry_point: str) -> NoReturn:
        """Run the tests and report the verdict. They pass if they finish and use a name that the solution defines."""
        try:
            tree = ast.parse(tests)
            uses = Uses(tests, tree)
            names = self._names(uses, helpers, entry_point)
            exec(compile(tree, "<tests>", "exec"), names)
        except BaseException as error:  # noqa: BLE001 - SystemExit must not pass either
            self._end(False, described(error))
        self._end(True, "")

    def _names(self, uses: "Uses", helpers: str, entry_point: str) -> dict[str, Any]:
        """Return the globals of the tests: helpers, modules, and the names that the solution defines."""
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
        # The solution must not replace a helper, except the function under test.
        from_solution = [n for n in uses.names if n in defined and (n not in names or n == entry_point)]
        if not from_solution:
            self._end(False, "the tests use nothing that the code defines")
        return names | {name: self._ask({"global": name}) for name in from_solution}

    def request(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """Let the solution execute an operation. Return its value, or raise the exception that it raised."""
        message = {
            "op": operation,
            "args": [self._encoded(v) for v in args],
            "kwargs": {k: self._encoded(v) for k, v in kwargs.items()},
        }
        return self._ask(message, args)

    def _ask(self, message: dict[str, Any], args: tuple[Any, ...] = ()) -> Any:
        """Send a request and return the value of the reply, after applying the solution's changes to `args`."""
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
            changed = [(args[index], self._decoded(content)) for index, content in reply.get("changed", ())]
            value = self._decoded(reply["value"])
        except (ProtocolError, KeyError, TypeError, ValueError, IndexError):
            self._end(False, NOT_A_MESSAGE)
        for argument, content in changed:
            _overwrite(argument, content)
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
        except Exception as error:  # noqa: BLE001 - the solution may handle what the tests' function raises
            self._channel.send(error_message(error))

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _decoded(self, value: Any) -> Any:
        return decode(value, self._resolve)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, Remote | RemoteIterator):
            return {"object": number_of(value)}
        if isinstance(value, Iterator):
            return encode_iterator(value, self._refer)
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
    """The names that the tests use without defining them: `modules`, and `names` that the solution should define.

    They depend only on the tests, so the code cannot replace a built-in function or a module of the standard library.
    One exception: a task may ask for a function with the name of a built-in one, as in `assert sum(10, 15) == 6`. If
    the tests call a single built-in function and use no other undefined name, that function is the one under test.
    """

    def __init__(self, tests: str, tree: ast.Module):
        attribute_bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        plain_uses = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and id(node) not in attribute_bases
        }
        undefined = _undefined(symtable.symtable(tests, "<tests>", "exec"))
        # `math.pi` without an import is the module; `copy(x)` is a function of the solution.
        self.modules = undefined & set(PRELOADED) - plain_uses
        self.names = undefined - set(vars(builtins)) - self.modules
        if not self.names:
            functions = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
            called = {f.id for f in functions if isinstance(f, ast.Name)} & undefined & set(vars(builtins))
            if len(called) == 1:
                self.names |= called


def _undefined(tests: symtable.SymbolTable) -> set[str]:
    """Return the global names that the tests read but do not bind, at any level."""
    bound = {s.get_name() for s in tests.get_symbols() if s.is_assigned() or s.is_imported()}
    read = {s.get_name() for s in tests.get_symbols() if s.is_referenced()}
    tables = list(tests.get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        read |= {s.get_name() for s in table.get_symbols() if s.is_referenced() and s.is_global()}
        bound |= {s.get_name() for s in table.get_symbols() if s.is_assigned() and s.is_declared_global()}
    return read - bound


def _overwrite(argument: Any, content: Any) -> None:
    """Give a mutable argument the content that the solution left in its copy, in place."""
    if isinstance(argument, list) and isinstance(content, list):
        if len(argument) == len(content):
            for index, (old, new) in enumerate(zip(argument, content, strict=True)):
                if isinstance(old, list | dict | set) and type(old) is type(new):
                    _overwrite(old, new)  # in place, because the tests may have other references to it
                else:
                    argument[index] = new
        else:
            argument[:] = content
    elif isinstance(argument, dict | set) and isinstance(content, dict | set):
        argument.clear()
        argument.update(content)


def number_of(remote: "Remote | RemoteIterator") -> int:
    """Return the number of a remote object, without any lookup that could reach the solution."""
    return object.__getattribute__(remote, "_number")


class RemoteIterator:
    """An iterator of the solution. It is read in chunks of doubling size, so it may be infinite."""

    def __init__(self, judge: Judge, number: int):
        self._judge, self._number = judge, number
        self._items: list[Any] = []  # in reverse order
        self._chunk, self._ended = 1, False

    def __iter__(self) -> "RemoteIterator":
        return self

    def __next__(self) -> Any:
        if not self._items and not self._ended:
            items, self._ended = self._judge.request("take", self, self._chunk)
            self._items = list(items)[::-1]
            self._chunk = min(2 * self._chunk, CHUNK)
        if not self._items:
            raise StopIteration
        return self._items.pop()


class Remote:
    """An object of the solution: a function, a class, or an instance.

    Comparison and arithmetic work only between two objects of the solution, which executes them. With a plain value,
    they would tell the solution what is expected; a plain value never equals a remote object.
    """

    __slots__ = ("_judge", "_number")

    def __init__(self, judge: Judge, number: int):
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)  # copy, pickle and others look for optional methods
        return _judge(self).request("getattr", self, name)

    def __iter__(self) -> Any:
        return iter(_judge(self).request("iter", self))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and bool(_judge(self).request("isinstance", value, self))


def _judge(remote: Remote) -> Judge:
    return object.__getattribute__(remote, "_judge")


def _requests(operation: str) -> Callable[..., Any]:
    """Return a method of `Remote` that the solution executes."""

    def method(self: Remote, *args: Any, **kwargs: Any) -> Any:
        return _judge(self).request(operation, self, *args, **kwargs)

    return method


def _binary(operation: str) -> Callable[..., Any]:
    """Return a method of `Remote` for a binary operation between two objects of the solution."""

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
    setattr(Remote, f"__{_name}__", _binary(_name))
