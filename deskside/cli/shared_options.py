"""Options and checks of options that several commands share."""

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BeforeValidator

from deskside.cli.options import option
from deskside.config import merge
from deskside.config.duration import Duration, parse_hours
from deskside.config.merge import LENGTH_ALIASES
from deskside.utils.errors import UsageError
from deskside.utils.hub import with_revision


def _validate_minutes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        pass
    try:
        return parse_hours(value) * 60
    except ValueError:
        raise ValueError("input should be a number of minutes, or a time such as 90m or 1h30m") from None


MODEL_HELP = (
    "a run, a Hugging Face directory, PEFT adapters, or a name on the hub: owner/name or owner/name@revision"
)
REVISION_HELP = "branch, tag or commit of a model of the hub"
MINUTES = BeforeValidator(_validate_minutes)  # for options in minutes that also accept a time with units


@dataclass(kw_only=True)
class JsonOption:
    """Option of every command that can print its result as JSON."""

    json: bool = option("print the result as JSON on standard output", False)


@dataclass(kw_only=True)
class ModelOption:
    """Argument of the commands that use a trained model."""

    model: str = option(MODEL_HELP, metavar="MODEL", positional=True)
    revision: str | None = option(REVISION_HELP, None, metavar="REV")
    base: str | None = option(
        "base model of PEFT adapters; default: the one that they name", None, metavar="MODEL"
    )
    weights: Literal["raw", "averaged"] | None = option(
        "weights of a run: raw: of its last step; averaged: over steps (--average.name), the default if it has them",
        None,
    )

    @property
    def source(self) -> str:
        """The model with its revision. Raises UsageError."""
        return with_revision(self.model, self.revision)


Quantize = Literal["none", "int8", "fp8", "nf4"]
QUANTIZE_HELP = (
    "number format of the blocks' weights: int8 and fp8 (GPUs from 8.9 on) halve the bytes that a token reads; nf4 "
    "needs bitsandbytes and saves most memory, but is slower than none"
)
GPUS_HELP = "GPUs that train together: a number, or auto for all; default: one"


@dataclass(kw_only=True)
class RunOptions(JsonOption):
    """Options of `deskside train` and of the fine-tuning commands."""

    name: str | None = option(
        "run directory under --runs; default: from the model's name", None, metavar="NAME"
    )
    hours: str | None = option("length in time: 2, 2h or 90m", None, metavar="H")
    steps: str | None = option("length in optimizer steps", None, metavar="N")
    tokens: str | None = option("length in tokens, such as 10M", None, metavar="N")
    resume: str | None = option("continue a stopped run where it stopped", None, metavar="RUN")
    track: str | None = option(
        "log to trackers too: wandb, trackio or tensorboard; --track.wandb names a project",
        None,
        metavar="NAME,...",
    )
    runs: str = option("directory of all runs", "runs", metavar="DIR")
    gpus: str | None = option(GPUS_HELP, None, metavar="N|auto")


def process_count(gpus: str | None, layers: Sequence[Mapping[str, Any]]) -> int:
    """Return how many processes train: those of --gpus, or of torchrun. Raises UsageError.

    layers: of the configuration, which has the device.
    """
    from deskside.train import launch

    return launch.process_count(gpus, configured_device(layers))


def configured_device(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return `compute.device` of layers that are not validated yet."""
    compute = merge.merge(layers)[0].get("compute")
    return str(compute.get("device", "auto")) if isinstance(compute, Mapping) else "auto"


def must_launch(processes: int) -> bool:
    """Return True if this process has to start the processes that train, and is not one of them."""
    return processes > 1 and "WORLD_SIZE" not in os.environ


def launch(command: str, argv: Sequence[str], processes: int) -> int:
    """Run the same command in several processes, and return the exit code."""
    from deskside.train.launch import launch

    debug = ["--debug"] if sys.argv[1:2] == ["--debug"] else []
    return launch([*debug, *command.split(), *argv], processes)


TRACKERS = ("wandb", "trackio", "tensorboard")


def set_trackers(given: dict[str, Any], track: str | None, layers: Sequence[Mapping[str, Any]] = ()) -> None:
    """Switch the trackers of --track on in `given`, unless `layers`, of the preset, name their project already.

    Raises UsageError for an unknown one.
    """
    below = merge.merge(layers)[0].get("track")
    named = below if isinstance(below, dict) else {}
    for name in [] if track is None else [part.strip() for part in track.split(",")]:
        if name not in TRACKERS:
            raise UsageError(f"--track {track}: {name!r} is not one of {', '.join(TRACKERS)}")
        if not named.get(name):
            given["track"] = {name: "true", **given.get("track", {})}


def set_length(given: dict[str, Any], options: RunOptions, default: str | None = None) -> None:
    """Set the length in `given`, the nested dict of configuration keys, to that of the command's own options.

    The length is --epochs, --hours, --steps or --tokens, or `default` if none is given. Raises UsageError if there is
    more than one length.
    """
    schedule = given.get("schedule", {})
    own_lengths = {name: getattr(options, name, None) for name in ("epochs", *LENGTH_ALIASES)}
    own_lengths = {name: str(value) for name, value in own_lengths.items() if value is not None}
    flags = [f"--schedule.{name}" for name in ("length", *LENGTH_ALIASES) if name in schedule]
    flags += [f"--{name}" for name in own_lengths]
    if len(flags) > 1:
        raise UsageError(f"{' and '.join(flags)}: the run can have one length only; give one of them")
    for name, value in own_lengths.items():
        check_length(name, str(value))
        length = {"length": f"{value} epochs"} if name == "epochs" else {name: value}
        given["schedule"] = {**schedule, **length}
    if not flags and default is not None:
        given["schedule"] = {**schedule, "length": default}


def check_length(name: str, value: str) -> None:
    """Raise UsageError for a wrong value of --epochs or of an option that is an alias of schedule.length."""
    try:
        Duration.parse(f"{value} epochs" if name == "epochs" else merge.length_of_alias(name, value))
    except (ValueError, UsageError):
        examples = {"epochs": "3", "steps": "2000", "tokens": "10M", "hours": "2, 2h or 90m"}
        raise UsageError(
            f"--{name} {value}: must be a length above zero, such as --{name} {examples[name]}"
        ) from None


def name_of_preset(preset: str) -> str:
    """Return the name of a run directory for a preset or .toml file."""
    return Path(preset).stem if preset.endswith(".toml") else preset


def addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return the results of `socket.getaddrinfo` for an address to listen on. Raises UsageError."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"--host: {host} is not an address: {error}; leave it out to serve this machine only"
        ) from None


def check_directory(path: Path, remedy: str) -> None:
    """Raise UsageError, which ends with the remedy, if a path is not a directory."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "no such directory"
        raise UsageError(f"{path}: {problem}; {remedy}")


def is_loopback(host: str) -> bool:
    """Return True if an address to listen on can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
