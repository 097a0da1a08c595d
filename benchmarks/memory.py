"""Memory and speed of optimizer states by format and location, and of frozen base weights.

    python -m benchmarks.memory [--preset 124m] [--arms adamw:8bit,adamw:8bit:offload,adamw:8bit:weights,muon:bfloat16]
        [--sequence N]
        [--tokens N] [--micro-tokens N] [--limit-gib 22.5] [--steps 20] [--warmup 5] [--json FILE] [--a.b value ...]
    python -m benchmarks.memory --frozen [--hidden 4096] [--intermediate 12288] [--rows 4096] [--json FILE]

Run it in the root of the repository. Every arm is a training step in its own process, as in `benchmarks/step.py`. An
arm is an optimizer and the format of its states, then `weights` for weights and gradients in bfloat16 or `24bit`,
`offload` for states in host memory, and `host` or `released` for gradients (with `released`, AdamW does not clip). The
table shows the peak of torch's allocator, the modelled peak, the modelled page-locked memory of the host, tokens/s, and
the milliseconds of clipping and updating after the backward. On a CPU the peak is the resident set of the process.
--limit-gib limits the allocator, so that a large GPU represents a small one. --frozen times one gated MLP of the given
sizes, forward and backward to the input, with frozen weights in bfloat16, INT8 and NF4.
"""

import argparse
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from benchmarks.step_config import configuration
from deskside.budget.host_memory import host_memory
from deskside.budget.memory import training_memory
from deskside.budget.step_spec import StateFormat
from deskside.utils import child_process
from deskside.utils.errors import UsageError

ARMS = (
    "adamw:float32,adamw:bfloat16,adamw:8bit,adamw:float32:offload,adamw:8bit:offload,"
    "muon:float32,muon:8bit,muon:float32:offload,muon:8bit:offload"
)
COLUMNS = (
    "arm",
    "peak GiB",
    "modelled",
    "host GiB, modelled",
    "tokens/s",
    "optimizer ms",
    "tokens per pass",
    "last loss",
)
TIMEOUT_SECONDS = 600.0
TIMED_CALLS = 20


def frozen_arms(hidden: int, intermediate: int, rows: int) -> list[dict[str, Any]]:
    """Measure a gated MLP with frozen weights in bfloat16, INT8 and NF4: stored MiB, further peak MiB, milliseconds."""
    import torch
    from torch import nn

    from deskside.ops.linear import Linear
    from deskside.precision.frozen import freeze, stored_bytes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = []
    for format in ("bfloat16", "int8", "nf4"):
        torch.manual_seed(0)
        up = Linear(hidden, [("gate", intermediate), ("up", intermediate)])
        layers = nn.ModuleList([up, Linear(intermediate, [("down", hidden)])]).to(device)
        for parameter in layers.parameters():
            nn.init.normal_(parameter, std=0.02)
        if format == "bfloat16":
            layers = layers.to(torch.bfloat16).requires_grad_(False)
        else:
            freeze(layers, format)  # type: ignore[arg-type]
        x = torch.randn(rows, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)

        def run(layers: nn.ModuleList = layers, x: torch.Tensor = x) -> None:
            gate, value = layers[0](x).chunk(2, dim=-1)
            y = layers[1](torch.nn.functional.silu(gate) * value)
            torch.autograd.grad(y.sum(), x)

        run()
        allocated_before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            allocated_before = torch.cuda.memory_allocated()
        milliseconds = _timed(run, device.type)
        peak = torch.cuda.max_memory_allocated() - allocated_before if device.type == "cuda" else None
        results.append(
            {
                "format": format,
                "stored_mib": stored_bytes(layers) / 2**20,
                "milliseconds": milliseconds,
                "peak_beside_mib": None if peak is None else peak / 2**20,
            }
        )
    return results


def _timed(run: Callable[[], None], device: str) -> float:
    """Return the median milliseconds of one call."""
    import torch

    times = []
    for _ in range(TIMED_CALLS):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def optim_of(arm: str) -> dict[str, Any]:
    """Parse an arm such as "adamw:8bit:weights:offload" as the configuration section `optim`. Raises UsageError."""
    name, states, *more = [*arm.split(":"), ""]
    more = [part for part in more if part]
    if (
        name not in ("adamw", "muon")
        or states not in get_args(StateFormat)
        or set(more) - {"weights", "24bit", "offload", "host", "released"}
        or {"host", "released"} <= set(more)
        or {"weights", "24bit"} <= set(more)
    ):
        raise UsageError(
            f"'{arm}' is not an arm, such as adamw:8bit:offload; use adamw or muon, and the formats "
            f"{', '.join(get_args(StateFormat))}, then weights (in bfloat16) or 24bit, offload, and host or "
            f"released for gradients"
        )
    optim = {
        "name": name,
        "states": states,
        "offload": "offload" in more,
        "weights": "bfloat16" if "weights" in more else "24bit" if "24bit" in more else "float32",
        "gradients": next((place for place in ("host", "released") if place in more), "device"),
    }
    return optim | ({"grad_clip": 0.0} if "released" in more else {})


def modelled_gib(spec: dict[str, Any], result: dict[str, Any]) -> tuple[float, float]:
    """Return the peak on the GPU and the memory on the host that `budget/` predicts for an arm's fitted micro-batch."""
    from deskside.train.prepare.step_planning import step_spec

    config = configuration(spec)
    work = step_spec(
        config, result["micro_tokens"], result["precision"], result["compile"], result["native_formats"]
    )
    on_host = sum(host_memory(config.model, work).values())
    return training_memory(config.model, work).allocated / 2**30, on_host / 2**30


def main(argv: Sequence[str]) -> int:
    options, keys = _arguments(argv)
    if options.frozen:
        sizes = {"hidden": options.hidden, "intermediate": options.intermediate, "rows": options.rows}
        outcome = child_process.run("benchmarks.memory:frozen_arms", sizes, TIMEOUT_SECONDS)
        if outcome.status != "ok":
            print(outcome.error, file=sys.stderr)
            return 1
        print(
            "| frozen weights | stored MiB | forward + input gradient, ms | peak beside them, MiB |\n|---|---|---|---|"
        )
        for result in outcome.value:
            peak = result["peak_beside_mib"]
            peak_text = "-" if peak is None else f"{peak:,.0f}"
            print(
                f"| {result['format']} | {result['stored_mib']:,.1f} | {result['milliseconds']:.2f} | {peak_text} |"
            )
        _write(options.json, {"frozen": outcome.value, "sizes": sizes})
        return 0
    for arm in options.arms.split(","):
        optim_of(arm)  # report impossible arms before anything runs
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows: list[dict[str, Any]] = []
    compute = dict(keys.get("compute", {}))
    if options.limit_gib is not None:
        compute["gpu_budget"] = options.limit_gib
    for arm in options.arms.split(","):
        spec = {
            "preset": options.preset,
            "tokens": options.tokens,
            "micro_tokens": options.micro_tokens,
            "sequence_length": options.sequence,
            "steps": options.steps,
            "warmup": options.warmup,
            "began": None,
            "config": {**keys, "optim": {**keys.get("optim", {}), **optim_of(arm)}, "compute": compute},
        }
        configuration(spec)
        spec["began"] = time.monotonic()
        outcome = child_process.run("benchmarks.step_measure:measure", {"spec": spec}, TIMEOUT_SECONDS)
        row: dict[str, Any] = {"arm": arm, "status": outcome.status, "error": outcome.error}
        if outcome.status == "ok":
            value = outcome.value
            modelled, on_host = modelled_gib(spec, value)
            row |= {"result": value, "modelled_gib": modelled, "modelled_host_gib": on_host}
            print(
                f"| {arm} | {value['peak_allocated_gib']:.2f} | {modelled:.2f} | {on_host:.2f} | "
                f"{value['phases']['short']['tokens_per_second']:,.0f} | {value['optimizer_ms']:.2f} | "
                f"{value['micro_tokens']:,} | {value['loss_last']:.3f} |",
                flush=True,
            )
        else:
            print(f"| {arm} | {outcome.status}: {outcome.error} | | | | | | |", flush=True)
        rows.append(row)
        _write(options.json, {"preset": options.preset, "limit_gib": options.limit_gib, "arms": rows})
    return 0 if all(row["status"] in ("ok", "oom") for row in rows) else 1


def _arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options, and further configuration keys as a nested dict. Raises UsageError."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--preset", default="124m")
    parser.add_argument("--arms", default=ARMS)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--micro-tokens", type=int)
    parser.add_argument("--sequence", type=int, help="tokens per row; default: the preset's")
    parser.add_argument("--limit-gib", type=float, help="limit of the allocator in GiB")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument(
        "--frozen", action="store_true", help="measure frozen base weights instead of training steps"
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=12288)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args(argv)
    keys: dict[str, Any] = {}
    if len(rest) % 2 or any(not key.startswith("--") or "." not in key for key in rest[::2]):
        raise UsageError(
            f"unexpected arguments: {' '.join(rest)}; configuration keys are written --part.key value"
        )
    for key, text in zip(rest[::2], rest[1::2], strict=True):
        part, _, name = key.removeprefix("--").partition(".")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        keys.setdefault(part, {})[name] = value
    return options, keys


def _write(path: Path | None, content: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"memory: {error}", file=sys.stderr)
        sys.exit(2)
