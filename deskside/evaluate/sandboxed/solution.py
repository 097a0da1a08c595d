"""The process that runs the model's code. It has neither the tests nor the expected values, and reports no verdict."""

import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from deskside.evaluate.sandboxed.channel import (
    CHUNK,
    Channel,
    ProtocolError,
    decode,
    described,
    encode,
    error_message,
    exception_from,
)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "ge": operator.ge,
    "add": operator.add, "sub": operator.sub, "mul": operator.mul,
    "len": len, "iter": iter, "bool": bool, "hash": hash, "str": str, "repr": repr, "isinstance": isinstance,
}  # fmt: skip


class Solution:
    """Runs the code, and answers the judge's requests for its objects."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._module = types.ModuleType("__solution__")
        self._objects: list[Any] = []
        self._numbers: dict[
            int, int
        ] = {}  # id() of an object -> its index in `_objects`, which keeps it alive
        self._raised: dict[int, BaseException] = {}  # id() of an iterator -> the exception that ended it

    def serve(self, source: str) -> None:
        """Run the code, then answer requests until the judge ends."""
        sys.modules[self._module.__name__] = self._module
        try:
            exec(compile(source, "<solution>", "exec"), self._module.__dict__)
            names = [name for name in list(vars(self._module)) if not name.startswith("__")]
            self._channel.send({"names": names})
        except BaseException as error:  # noqa: BLE001 - whatever the code raises
            self._channel.send({"failed": described(error)})
            return
        while True:
            try:
                request = self._channel.receive()
            except ProtocolError:
                return
            self._answer(request)

    def _answer(self, request: dict[str, Any]) -> None:
        try:
            if "global" in request:
                reply = {"value": self._encoded(vars(self._module)[request["global"]])}
            else:
                args = [self._decoded(v) for v in request["args"]]
                kwargs = {k: self._decoded(v) for k, v in request["kwargs"].items()}
                operation = self._take if request["op"] == "take" else OPERATIONS[request["op"]]
                reply = {
                    "value": self._encoded(operation(*args, **kwargs)),
                    "changed": self._changed(request["args"], args),
                }
            self._channel.send(reply)
        except BaseException as error:  # noqa: BLE001 - whatever the code raises
            self._channel.send(error_message(error))

    def _take(self, items: Iterator[Any], count: int) -> tuple[list[Any], bool]:
        """Return the next items, and whether the iterator ended. An exception is raised after the items before it."""
        if id(items) in self._raised:
            raise self._raised.pop(id(items))
        taken: list[Any] = []
        try:
            while len(taken) < min(count, CHUNK):
                taken.append(next(items))
        except StopIteration:
            return taken, True
        except BaseException as error:  # whatever the code raises
            if not taken:
                raise
            self._raised[id(items)] = error
        return taken, False

    def _changed(self, sent: list[Any], args: list[Any]) -> list[list[Any]]:
        """Return [index, new content] of the arguments that were changed in place."""
        changed = []
        for index, (before, value) in enumerate(zip(sent, args, strict=True)):
            if isinstance(value, list | dict | set):
                after = self._encoded(value)
                if after != before:
                    changed.append([index, after])
        return changed

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._refer)

    def _decoded(self, value: Any) -> Any:
        return decode(value, self._resolve)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"exception": [kind.__name__ for kind in value.__mro__]}
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"stream" if isinstance(value, Iterator) else "object": number}

    def _resolve(self, tag: str, inner: Any) -> Any:
        if tag == "object":
            return self._objects[inner]
        assert tag == "callback", tag

        def call(*args: Any, **kwargs: Any) -> Any:
            message = {
                "callback": inner,
                "args": [self._encoded(v) for v in args],
                "kwargs": {k: self._encoded(v) for k, v in kwargs.items()},
            }
            self._channel.send(message)
            while "value" not in (reply := self._channel.receive()):
                if "error" in reply:
                    raise exception_from(reply, {})
                self._answer(reply)  # a request of the tests' function
            return self._decoded(reply["value"])

        return call
