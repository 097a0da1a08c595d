"""Options that several commands share, and the lengths of a run."""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BeforeValidator

from deskside.cli.options import option
from deskside.config.duration import parse_hours
from deskside.config.merge import LENGTH_ALIASES
from deskside.utils.errors import UsageError


def _minutes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return parse_hours(value) * 60
    except ValueError:
        raise ValueError(
            "input should be a valid number of minutes, or a time such as 90m or 1h30m"
        ) from None


MINUTES = BeforeValidator(_minutes)  # marks an option in minutes, which may also be a time with units


@dataclass(kw_only=True)
class JsonOption:
    """The option of every command whose result programs read."""

    json: bool = option("print one JSON object on standard output", False)


@dataclass(kw_only=True)
class ModelOption:
    """The argument of every command that loads a model."""

    model: str = option("a run, or a Hugging Face model directory", metavar="RUN|HF_DIR", positional=True)


@dataclass(kw_only=True)
class RunOptions(JsonOption):
    """Options of every command that trains a model in a run directory."""

    name: str | None = option(
        "run directory under --runs; default: from the model's name", None, metavar="NAME"
    )
    hours: str | None = option("length in time: 2, 2h or 90m", None, metavar="H")
    steps: str | None = option("length in optimizer steps", None, metavar="N")
    tokens: str | None = option("length in tokens, such as 10M", None, metavar="N")
    resume: str | None = option("continue a stopped run exactly where it stopped", None, metavar="RUN")
    runs: str = option("directory of all runs", "runs", metavar="DIR")


def set_length(given: dict[str, Any], options: RunOptions, default: str | None = None) -> None:
    """Write --epochs, --hours, --steps or --tokens into the given schedule, or `default` if no length was given.

    Raises UsageError for more than one length.
    """
    schedule = given.get("schedule", {})
    short = {name: getattr(options, name, None) for name in ("epochs", *LENGTH_ALIASES)}
    short = {name: value for name, value in short.items() if value is not None}
    lengths = [f"--schedule.{name}" for name in ("length", *LENGTH_ALIASES) if name in schedule]
    lengths += [f"--{name}" for name in short]
    if len(lengths) > 1:
        raise UsageError(f"{' and '.join(lengths)}: the run can have one length only; give one of them")
    for name, value in short.items():
        length = {"length": f"{value} epochs"} if name == "epochs" else {name: value}
        given["schedule"] = {**schedule, **length}
    if not lengths and default is not None:
        given["schedule"] = {**schedule, "length": default}


def name_of_preset(preset: str) -> str:
    """Return the name of a preset, or of its .toml file, for a run directory."""
    return Path(preset).stem if preset.endswith(".toml") else preset


def addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return what `socket.getaddrinfo` finds for an address to listen on. Raises UsageError."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"--host: {host} is not an address: {error}; leave it out to serve this machine only"
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
