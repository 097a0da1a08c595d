"""The list of checks, each run in a child process with a time limit, one child at a time.

Checks of one kind can share a child, because importing torch takes seconds. If such a child fails or hangs, each of its
checks runs again in a separate child, so that the failure is attributed to the right check. This module does not
import torch: the parent holds no CUDA context and survives a torch that does not start.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

from deskside.config.recipes import ALIASES, RECIPES, default_precision
from deskside.utils import child_process
from deskside.utils.format import elapsed
from deskside.utils.machine import package_version

Say = Callable[[str], None]
MINUTE = 60.0


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        id: Name in the JSON report.
        group: matmul, precision, memory, attention, training or libraries.
        name: Name in the table.
        target: "module:function", called with `arguments` in a child process.
        arguments: Keyword arguments of the target.
        child: Checks with the same value share a child process; an empty one shares with none.
        timeout: Time limit in seconds.
        precomputed_result: The result, if it is known without running anything.
    """

    id: str
    group: str
    name: str
    target: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    child: str = ""
    timeout: float = MINUTE
    precomputed_result: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Library:
    """An optional library: module, package, command to install it, and checks as (id, name, function, arguments)."""

    module: str
    package: str
    pip: str
    checks: tuple[tuple[str, str, str, dict[str, Any]], ...]


LIBRARIES = (
    Library(
        "bitsandbytes",
        "bitsandbytes",
        "pip install bitsandbytes",
        (
            ("bitsandbytes_adamw", "bitsandbytes 8-bit AdamW", "bitsandbytes_adamw", {}),
            ("bitsandbytes_nf4", "bitsandbytes NF4 layer", "bitsandbytes_nf4", {}),
        ),
    ),
    Library(
        "torchao",
        "torchao",
        "pip install torchao",
        (
            ("torchao_tensorwise", "torchao FP8 tensorwise", "torchao", {"recipe": "tensorwise"}),
            ("torchao_rowwise", "torchao FP8 rowwise", "torchao", {"recipe": "rowwise"}),
        ),
    ),
    Library(
        "transformer_engine",
        "transformer-engine",
        "pip install --no-build-isolation 'transformer-engine[pytorch]'",
        (
            ("te_fp8", "transformer-engine FP8", "transformer_engine", {"recipe": "Float8CurrentScaling"}),
            ("te_mxfp8", "transformer-engine MXFP8", "transformer_engine", {"recipe": "MXFP8BlockScaling"}),
            ("te_nvfp4", "transformer-engine NVFP4", "transformer_engine", {"recipe": "NVFP4BlockScaling"}),
        ),
    ),
    Library(
        "flash_attn.cute",
        "flash-attn-4",
        "pip install --pre flash-attn-4",
        (
            ("flash_attn_4", "flash-attn-4", "flash_attention_4", {"window": False}),
            ("flash_attn_4_window", "flash-attn-4, window", "flash_attention_4", {"window": True}),
        ),
    ),
    Library(
        "quack",
        "quack-kernels",
        "pip install 'deskside[quack]'",
        (
            ("quack_linear", "quack-kernels linear layer", "quack_linear", {}),
            ("quack_gate", "quack-kernels gated MLP", "quack_gate", {}),
        ),
    ),
)
GEMM, ATTENTION = "deskside.doctor.check_gemm", "deskside.doctor.check_attention"
TRAINING, LIBRARY = "deskside.doctor.check_training", "deskside.doctor.check_libraries"
NO_COMPILER = "no C++ compiler: torch.compile builds its CPU code with one; install g++, or set CXX"
# A run on a CPU trains in FP32 and depends on these. The BF16 and FP16 matmuls took a third of a quick examination.
ESSENTIAL_ON_CPU = ("fp32", "attention", "step_fp32")
# A quick examination of a GPU takes about 12 s. FP8 starts another process and compiles kernels, which was not timed.
SECONDS_WITH_FP8 = 40.0


def essential_checks(facts: Mapping[str, Any], seconds: float) -> list[Check]:
    """Return the quick checks that a run depends on: `ESSENTIAL_ON_CPU` on a CPU; on a GPU all of them, but that of FP8
    only if there is time for it.
    """
    checks = all_checks(facts, quick=True)
    if facts["device"] == "cuda":
        return [check for check in checks if check.group != "precision" or seconds >= SECONDS_WITH_FP8]
    return [check for check in checks if check.id in ESSENTIAL_ON_CPU]


def _has_fp8(gpu: Mapping[str, Any]) -> bool:
    """Return True if the tensor cores of an NVIDIA GPU compute in FP8: compute capability 8.9 and newer."""
    return tuple(map(int, gpu["compute_capability"].split("."))) >= (8, 9)


def all_checks(facts: Mapping[str, Any], quick: bool) -> list[Check]:
    """Return the checks for this machine.

    quick: only plain matmuls, memory, attention and eager steps, and on a GPU with FP8 the recipe of `deskside go`.
    """
    cuda = facts["device"] == "cuda"
    device = "cuda:0" if cuda else "cpu"  # with an index, which some torch functions require
    checks: list[Check] = []

    def add(
        id: str,
        group: str,
        name: str,
        target: str,
        arguments: Mapping[str, Any],
        child: str,
        minutes: float = 1,
        precomputed: Mapping[str, Any] | None = None,
    ) -> None:
        arguments = {**arguments, "device": device}
        checks.append(Check(id, group, name, target, arguments, child, minutes * MINUTE, precomputed))

    cheap = "quick" if quick else "plain"  # the child that the cheap checks share
    for dtype in ("bf16", "fp16", "fp32"):
        add(dtype, "matmul", dtype.upper(), f"{GEMM}:plain", {"dtype": dtype}, cheap)
    if not quick:
        add("experts_bf16", "matmul", "BF16, experts", f"{GEMM}:grouped", {}, cheap, 2)
        for id, name, child in (
            ("fp8_tensor", "torch FP8 tensor", "fp8"),
            ("fp8_row", "torch FP8 row", "fp8"),
            ("mxfp8", "torch MXFP8", "mxfp8"),
            ("nvfp4", "torch NVFP4", "nvfp4"),
        ):
            add(id, "matmul", name, f"{GEMM}:scaled", {"format_name": id}, child, 2)
        for name, recipe in RECIPES.items():
            if recipe.quantized:  # recipes of one format share kernels, and so a child
                child = "recipes nvfp4" if "nvfp4" in recipe.formats else "recipes fp8"
                add(f"recipe_{name}", "precision", name, f"{GEMM}:recipe", {"name": name}, child, 5)
        add("head_fp8", "precision", "FP8 head", f"{GEMM}:head", {}, "recipes fp8", 5)
        add("experts_fp8", "precision", "FP8 experts", f"{GEMM}:experts", {}, "recipes fp8", 5)
    add("copy", "memory", "device copy", f"{GEMM}:copy", {}, cheap)
    if quick:
        add("attention", "attention", "fastest, full", f"{ATTENTION}:quick_choice", {}, cheap)
    else:
        for backend in facts["attention_backends"]:
            name = backend["name"]
            for kind, id, label in (
                ("full", f"attention_{name}", name),
                ("window", f"attention_{name}_window", f"{name}, window"),
            ):
                precomputed = None
                if (reason := backend[kind]) is not None:
                    precomputed = {"verdict": "unsupported", "reason": reason, "declared": True}
                arguments = {"backend": name, "window": kind == "window"}
                add(
                    id,
                    "attention",
                    label,
                    f"{ATTENTION}:check",
                    arguments,
                    f"attention {name}",
                    5,
                    precomputed,
                )
    for name in ("fp32", "bf16"):
        child = "quick" if quick else "step"
        add(
            f"step_{name}", "training", f"{name.upper()} step", f"{TRAINING}:step", {"precision": name}, child
        )
    if quick:
        if cuda and _has_fp8(facts["gpus"][0]):
            name = ALIASES["fp8"]
            # In a process of its own: a CUDA error there would also end the checks that a run depends on.
            add(f"recipe_{name}", "precision", name, f"{GEMM}:recipe", {"name": name}, "recipes fp8")
        return checks
    # The execution modes that are faster than eager.
    precision = default_precision(not cuda)
    for id, label, mode in (("fused", "hand-written", "fused"), ("compile", "torch.compile", "block")):
        precomputed = None
        if id == "compile" and not cuda and facts["cxx_compiler"] is None:
            precomputed = {"verdict": "unsupported", "reason": NO_COMPILER}
        arguments = {"mode": mode, "precision": precision}
        add(
            id,
            "training",
            f"{label}, {precision.upper()}",
            f"{TRAINING}:compiled_step",
            arguments,
            id,
            5,
            precomputed,
        )
    for library in LIBRARIES:
        if not is_installed(library.module):
            precomputed = {"verdict": "not installed", "reason": library.pip}
            checks.append(
                Check(library.package, "libraries", library.package, precomputed_result=precomputed)
            )
            continue
        for id, name, function, arguments in library.checks:
            add(id, "libraries", name, f"{LIBRARY}:{function}", arguments, id, 4)
    return checks


def is_installed(module: str) -> bool:
    """Return True if a module can be found. It is not imported, because that might start CUDA in this process."""
    package, *rest = module.split(".")
    spec = util.find_spec(package)
    if spec is None or not rest:
        return spec is not None
    paths = [Path(folder).joinpath(*rest) for folder in spec.submodule_search_locations or ()]
    return any(path.is_dir() or path.with_suffix(".py").exists() for path in paths)


def library_versions() -> dict[str, str | None]:
    """Return the version of each optional library, None if it is not installed."""
    return {library.package: package_version(library.package) for library in LIBRARIES}


# Groups of checks -> what they check.
NOUNS = {
    "matmul": "matrix products",
    "precision": "precision recipes",
    "memory": "memory",
    "attention": "attention",
    "training": "a training step",
    "libraries": "libraries",
}


def run_all(checks: Sequence[Check], say: Say, deadline: float = math.inf) -> list[dict[str, Any]]:
    """Run the checks and return their results in the same order: {"id", "group", "name", "verdict", "reason", ...}.

    Raises TimeoutError at the deadline, in seconds of `time.monotonic`.
    """
    results: dict[str, dict[str, Any]] = {}
    finished, began = 0, time.monotonic()
    for check in checks:
        if check.id in results:
            continue
        if check.precomputed_result is not None:
            results[check.id] = dict(check.precomputed_result)
            finished += 1
            continue
        batch = [check]
        if check.child:
            batch = [c for c in checks if c.child == check.child and c.precomputed_result is None]
        *most, last = dict.fromkeys(NOUNS[c.group] for c in batch)
        kinds = f"{', '.join(most)} and {last}" if most else last
        text = f"{finished + 1} of {len(checks)}: checking {kinds}"
        if len({c.group for c in batch}) == 1:
            text += f" ({', '.join(c.name for c in batch)})"
        if finished:
            left = (time.monotonic() - began) / finished * (len(checks) - finished)
            text += f"; about {elapsed(round(left))} left"
        say(text)
        results |= _run(batch, say, deadline)
        finished += len(batch)
    return [{"id": c.id, "group": c.group, "name": c.name, "reason": ""} | results[c.id] for c in checks]


def _run(checks: Sequence[Check], say: Say, deadline: float) -> dict[str, dict[str, Any]]:
    """Run checks in one child process; if it fails, run each check in a separate child."""
    calls = [{"target": c.target, "arguments": dict(c.arguments)} for c in checks]
    limit = min(max(c.timeout for c in checks), max(0.0, deadline - time.monotonic()))
    outcome = child_process.run("deskside.doctor.check_tools:run_checks", {"calls": calls}, limit)
    if outcome.status == "timeout" and time.monotonic() >= deadline:
        raise TimeoutError("the doctor was not done by its deadline")
    if outcome.status == "ok":
        return {check.id: result for check, result in zip(checks, outcome.value, strict=True)}
    if len(checks) > 1:
        say(f"{outcome.error}: running each of these checks again, alone")
        return {id: result for check in checks for id, result in _run([check], say, deadline).items()}
    return {checks[0].id: failure(outcome)}


def failure(outcome: child_process.ProcessOutcome) -> dict[str, Any]:
    """Return the result of a check whose child process failed.

    If it raised an exception, the verdict is unsupported, or crashed where the process or its CUDA context died.
    """
    verdict = {"timeout": "timeout", "oom": "out of memory", "failed": "unsupported"}[outcome.status]
    # An exception that names a CUDA error leaves the process without a usable device.
    if outcome.status == "failed" and (outcome.died or "CUDA error" in outcome.error):
        verdict = "crashed"
    return {
        "verdict": verdict,
        "reason": outcome.error,
        "seconds": round(outcome.seconds, 2),
        "stderr": outcome.output[-1000:],
    }
