"""Benchmark of deskside's training step: its time, the breakdown by kind of kernel, and the floors of the device.

    python -m benchmarks.step [--preset 124m] [--precision bf16,fp8-delayed,fp8-delayed:head=fp8] [--tokens 65536]
        [--micro-tokens auto|N] [--sequence 2048] [--attention auto|cudnn|...] [--optimizer adamw|muon]
        [--data zipf|PATH] [--steps 50] [--warmup 10] [--hot-seconds 20] [--profile] [--cold-start] [--json FILE]

Run it in the root of the repository. Every precision is an arm in its own process. An arm is the name of a recipe,
followed by options of `precision` separated by colons; an option with a dot is any other configuration key, as in
`bf16,bf16:compute.cuda_graph=on`. A key that all arms share can be given as an option, such as
`--model.window_pattern SSSL`.

Times are measured between the ends of steps on the device (CUDA events), so host time counts only if the device waits
for it. `short` is --steps steps after --warmup steps. `hot` then continues for --hot-seconds, until the power limit
takes effect. --cold-start runs every arm twice more for one step: with empty compile caches, then with warm ones.
"""

import argparse
import json
import sys
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import step_table
from benchmarks.step_config import configuration
from deskside.utils import child_process
from deskside.utils.errors import UsageError

TARGET = "benchmarks.step_start:measure"
SETUP_SECONDS = 600.0  # time limit of an arm in addition to its steps, for compilation and floors


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options, and further configuration keys as a nested dict. Raises UsageError."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--precision", default="auto", help="arms, separated by commas")
    parser.add_argument("--tokens", type=int, help="per optimizer step; default: the preset's")
    parser.add_argument(
        "--micro-tokens", default="auto", help="per pass; auto: the largest that fits in memory"
    )
    parser.add_argument("--sequence", type=int, help="default: the preset's")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", default="auto", help="how the step is executed; see compute.compile")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--data", default="zipf", help="zipf for random tokens, or the path of a prepared dataset"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--hot-seconds", type=float, default=0.0)
    parser.add_argument(
        "--profile", action="store_true", help="print the time by kind of kernel, and the floors"
    )
    parser.add_argument(
        "--cold-start",
        action="store_true",
        help="also time the first step, with empty and warm compile caches",
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options, rest = parser.parse_known_args(argv)
    if options.steps < 1 or options.warmup < 0:
        raise UsageError("--steps must be at least 1 and --warmup at least 0")
    if options.micro_tokens != "auto" and not options.micro_tokens.isdigit():
        raise UsageError(f"--micro-tokens: {options.micro_tokens} is neither auto nor a number")
    return options, configuration_keys(rest)


def arms(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse "bf16,fp8-delayed:head=fp8" as [(arm, {"name": recipe, option: value})]. Raises UsageError.

    An option with a dot is a key of the whole configuration, not of `precision`.
    """
    parsed = []
    for arm in filter(None, (part.strip() for part in text.split(","))):
        name, *settings = arm.split(":")
        precision: dict[str, Any] = {"name": name}
        for setting in settings:
            key, equals, value = setting.partition("=")
            if not equals:
                raise UsageError(f"--precision {arm}: '{setting}' must be key=value, such as head=fp8")
            precision[key] = _value(value)
        parsed.append((arm, precision))
    if not parsed:
        raise UsageError("--precision: give at least one recipe, such as bf16")
    return parsed


def specification(
    options: argparse.Namespace, precision: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """Return the argument of `step_measure.measure` for one arm."""
    micro = options.micro_tokens
    for key in [key for key in precision if "." in key]:
        config = _with_key(config, key.split("."), precision[key])
    precision = {key: value for key, value in precision.items() if "." not in key}
    return {
        "preset": options.preset,
        "precision": precision["name"],
        "tokens": options.tokens,
        "micro_tokens": micro if micro == "auto" else int(micro),
        "sequence_length": options.sequence,
        "attention": options.attention,
        "compile": options.compile,
        "optimizer": options.optimizer,
        "device": options.device,
        "data": None if options.data == "zipf" else options.data,
        "steps": options.steps,
        "warmup": options.warmup,
        "hot_seconds": options.hot_seconds,
        "profile": options.profile,
        "config": {**config, "precision": {**config.get("precision", {}), **precision}},
    }


def run(spec: dict[str, Any], caches: Path | None = None) -> dict[str, Any]:
    """Measure an arm in a child process.

    Returns {"status", "error", "stderr", "value"}. `caches`: folder of the compile caches.
    """
    environment = {}
    if caches is not None:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            "CUDA_CACHE_PATH": str(caches / "cuda"),
            "DESKSIDE_CACHE": str(caches / "deskside"),  # kept trials, and FlashAttention-4's kernels
        }
    limit = SETUP_SECONDS + float(spec["hot_seconds"]) + 5.0 * (spec["steps"] + spec["warmup"])
    outcome = child_process.run(TARGET, {"spec": {**spec, "began": time.monotonic()}}, limit, environment)
    return {
        "status": outcome.status,
        "error": outcome.error,
        "stderr": "" if outcome.status == "ok" else outcome.output,
        "value": outcome.value,
    }


def starts(spec: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run an arm for one step in `number` processes, the first with empty caches, and return the results of `run`.

    The last result may be an error.
    """
    single_step = {**spec, "steps": 1, "warmup": 1, "hot_seconds": 0.0, "profile": False}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="deskside-") as folder:
        while len(results) < number and all(result["status"] == "ok" for result in results):
            results.append(run(single_step, Path(folder)))
    return results


def cold_start(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds from the command to the end of each start-up part, with empty ("fresh") and "warm" caches."""
    marks: dict[str, Any] = {}
    for state, result in zip(("fresh", "warm"), starts(spec, 2), strict=False):
        if result["status"] != "ok":
            return {**marks, "error": f"{state}: {result['error']}"}
        marks[state] = result["value"]["cold_start"]
    return marks


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[tuple[str, dict[str, Any]]]]:
    """Return the options and each arm's name and `specification`. Raises UsageError, also for a wrong configuration."""
    options, config = arguments(sys.argv[1:] if argv is None else argv)
    specs = [(arm, specification(options, precision, config)) for arm, precision in arms(options.precision)]
    for _, spec in specs:
        configuration(spec)
    return options, specs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every arm was measured, 1 if one was not, 2 for wrong usage."""
    try:
        options, specs = parse(argv)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = []
    for arm, spec in specs:
        result = {"arm": arm, **run(spec)}
        if result["status"] == "ok" and options.cold_start:
            result["cold_starts"] = cold_start(spec)
        results.append(result)
        report(result, options.profile)
        if options.json:  # after every arm, so that a killed benchmark keeps the finished ones
            options.json.write_text(json.dumps({"benchmark": "step", "results": results}, indent=1), "utf-8")
    print(step_table.summary(results))
    return int(any(result["status"] != "ok" for result in results))


def report(result: dict[str, Any], profile: bool) -> None:
    """Print the result of one arm as soon as it is available."""
    if result["status"] != "ok":
        print(f"{result['arm']}: {result['status']}: {result['error']}")
        print(result["stderr"][-1500:] if should_show_stderr(result) else "", file=sys.stderr)
        return
    print(step_table.details(result))
    for state, marks in result.get("cold_starts", {}).items():
        text = marks if isinstance(marks, str) else ", ".join(f"{k} {v:.1f} s" for k, v in marks.items())
        print(textwrap.fill(f"  {state} caches: {text}", 80, subsequent_indent="    "))
    if profile:
        print("\n" + step_table.split(result))
        print("\n" + step_table.products(result))
    print(flush=True)


def should_show_stderr(result: dict[str, Any]) -> bool:
    """Return True unless the error is a UsageError, whose one line already says what to do."""
    return not str(result["error"]).startswith("UsageError: ")


def configuration_keys(rest: Sequence[str]) -> dict[str, Any]:
    """Return --a.b value or --a.b=value ... as {"a": {"b": value}}.

    Unknown keys are rejected when the configuration is built.
    """
    keys: dict[str, Any] = {}
    words = list(rest)
    while words:
        key, equals, value = words.pop(0).partition("=")
        if not key.startswith("--") or "." not in key:
            raise UsageError(f"unexpected argument {key}; configuration keys are written --part.key value")
        if not equals and not words:
            raise UsageError(f"{key}: needs a value")
        node = keys
        *parts, last = key[2:].split(".")
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = _value(value if equals else words.pop(0))
    return keys


def _with_key(config: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of a nested dict with one value set."""
    first, *rest = path
    return {**config, first: _with_key(config.get(first, {}), rest, value) if rest else value}


def _value(text: str) -> Any:
    """Parse a TOML value, or return the text itself."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


if __name__ == "__main__":
    raise SystemExit(main())
