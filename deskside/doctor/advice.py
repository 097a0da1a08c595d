"""Derive advice from facts and check results: what to use on this machine, and what to fix.

Pure functions of plain data.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from deskside.budget.running_costs import CapPoint, cap_table
from deskside.facts.gpus import Gpu, find_device

Facts = Mapping[str, Any]
Results = Sequence[Mapping[str, Any]]
Severity = Literal["stops training", "wrong numbers", "may fail", "slow", "note"]
MOST_SEVERE_FIRST: tuple[Severity, ...] = ("stops training", "wrong numbers", "may fail", "slow", "note")

GIB = 2**30
SHM_GIB = 1.0  # Docker gives 0.06; several processes on one machine exchange gradients through it
DISK_GIB = 20.0  # enough for the data, checkpoints and an export of a small run
TEMPORARY_GIB = 2.0  # for compiled code
HOST_MEMORY_GIB = 8.0  # for preparing data and exporting
FOREIGN_SHARE = 0.05  # of a GPU's memory, in use by other processes
HOT_CELSIUS = 85  # GPUs slow down at 83 to 90
LOW_PRECISION_MATMULS = ("fp8_tensor", "fp8_row", "mxfp8", "nvfp4")  # torch's own
# Recipes to recommend. NVFP4 is missing because it has not been faster so far.
FASTEST_FIRST = ("fp8-delayed", "fp8-tensorwise", "fp8-rowwise")
# Healthy data centre GPUs reach at least half of their data sheet, GeForce GPUs nine tenths or more.
LOW_SHARE_OF_SHEET = 0.5


def by_id(results: Results) -> dict[str, Mapping[str, Any]]:
    return {result["id"]: result for result in results}


def works(results: Results, id: str) -> bool:
    result = by_id(results).get(id)
    return result is not None and result["verdict"] == "works"


def can_train(results: Results) -> bool:
    """Return True if training works here: an FP32 or a BF16 step gives correct numbers."""
    return works(results, "step_fp32") or works(results, "step_bf16")


def add_bf16_ratios(results: Sequence[dict[str, Any]]) -> None:
    """Set "to_bf16", the ratio of each FLOP rate to that of the BF16 matmul, None unless both are known."""
    bf16_rate: dict[str, Any] | None = by_id(results).get("bf16", {}).get("speed")
    for result in results:
        rate: dict[str, Any] | None = result.get("speed")
        result["to_bf16"] = None
        if bf16_rate is not None and rate is not None and rate["unit"] == bf16_rate["unit"]:
            result["to_bf16"] = float(f"{rate['value'] / bf16_rate['value']:.3g}")


# What to use


def recommend(facts: Facts, results: Results, quick: bool) -> list[dict[str, str]]:
    """Return recommendations as {"what", "value", "why", "option"}; `option` is for `deskside train`, or empty."""
    if not can_train(results):
        return []
    choices = [_precision(facts, results), *_attention(results)]
    if not quick:
        choices += [_step_execution(facts, results), *_low_precision(results), *_libraries(results)]
    return choices


def _precision(facts: Facts, results: Results) -> dict[str, str]:
    known = by_id(results)
    bf16 = works(results, "step_bf16") and (facts["device"] == "cuda" or not works(results, "step_fp32"))
    name, other = ("bf16", "fp32") if bf16 else ("fp32", "bf16")
    why = "its training step gives right numbers"
    if not works(results, f"step_{other}"):
        why += f"; {other}: {known.get(f'step_{other}', {}).get('verdict', 'not checked')}"
    elif bf16 and known.get("fp32", {}).get("to_bf16"):
        why += f", and its matmul is {1 / known['fp32']['to_bf16']:.1f} times as fast as FP32's (measured)"
    elif not bf16:
        why += "; deskside trains in FP32 on a CPU unless told otherwise"
    return _recommendation("precision", name, why, f"--precision.name {name}")


def _attention(results: Results) -> list[dict[str, str]]:
    choices = []
    quick = by_id(results).get("attention")
    if quick is not None and quick["verdict"] == "works":  # the quick check has already chosen a backend
        details = quick["details"]
        why = f"the fastest that is right here: {_milliseconds(details['milliseconds'])}"
        return [_recommendation("attention", details["chosen"], why, "--compute.attention auto")]
    for what in ("attention", "attention, window"):
        # Not the reference, which is slow by design, nor backends without grouped heads, which the presets need.
        times = {
            result["name"].removesuffix(", window"): result["details"]["milliseconds"]
            for result in results
            if result["group"] == "attention"
            and result["name"].endswith(", window") == (what != "attention")
            and result["verdict"] == "works"
            and result["details"].get("milliseconds")
            and result["details"]["heads"] != result["details"]["kv_heads"]
            and not result["name"].startswith("reference")
        }
        if times:
            best = min(times, key=lambda name: times[name])
            why = f"the fastest that is right here: {_milliseconds(times)}"
            choices.append(_recommendation(what, best, why, "--compute.attention auto"))
    return choices


def _milliseconds(times: Mapping[str, float]) -> str:
    ordered = sorted(times.items(), key=lambda item: item[1])[:3]
    return ", ".join(f"{name} {value:.3g} ms" for name, value in ordered) + " (measured)"


def _step_execution(facts: Facts, results: Results) -> dict[str, str]:
    """Recommend the execution mode of the step. The default is the hand-written kernels on a GPU and eager on a CPU."""
    fused, block = (by_id(results)[id] for id in ("fused", "compile"))
    times, why = [], []
    for name, result in (("hand-written", fused), ("torch.compile", block)):
        if result["verdict"] == "works":
            first = f"first step {result['details']['compile_seconds']:.0f} s"
            times.append(f"{name} {result['details']['times_eager']:.2f} ({first})")
        else:
            why.append(f"{name}: {result['verdict']}" + (f", {result['reason']}" if result["reason"] else ""))
    if times:
        why.insert(0, f"times eager's speed on a small step (measured): {', '.join(times)}")
    if facts["device"] == "cpu":
        why.insert(0, "training does not compile on a CPU unless told to")
        value, option = "eager", "auto"
    elif fused["verdict"] == "works":
        value, option = "hand-written kernels", "auto"
    elif block["verdict"] == "works" and block["details"]["times_eager"] > 1:
        value, option = "torch.compile", "block"
    else:
        value, option = "eager", "off"
    return _recommendation("step", value, "; ".join(why), f"--compute.compile {option}")


def _low_precision(results: Results) -> list[dict[str, str]]:
    """Recommend the native recipes whose layers are right here, with the speed of torch's own matmuls as a hint."""
    working = [r for r in results if r["group"] == "precision" and r["verdict"] == "works"]
    recipes = [r for r in working if r["id"] not in ("head_fp8", "experts_fp8")]
    if not recipes:
        return []
    native = [r["name"] for r in recipes if r["details"]["native"]]
    emulated = [r["name"] for r in recipes if not r["details"]["native"]]
    why = []
    if native:
        why.append("forward and both gradients are right with deskside's own kernels")
        if any(r["id"] == "head_fp8" and r["details"]["native"] for r in working):
            why.append("the head's too, with --precision.head fp8")
        if any(r["id"] == "experts_fp8" and r["details"]["native"] for r in working):
            why.append("so are the grouped products of experts")
    rates = [
        f"{r['name']} {r['to_bf16']:.2f} x BF16"
        for r in sorted(results, key=lambda result: -(result.get("to_bf16") or 0))
        if r["group"] == "matmul"
        and r["id"] in LOW_PRECISION_MATMULS
        and r["verdict"] == "works"
        and r.get("to_bf16")
    ]
    if native and rates:
        why.append(f"products alone, without the conversion (measured): {', '.join(rates)}")
    if emulated:
        why.append(f"emulated, right numbers and no faster than BF16: {', '.join(emulated)}")
    value = ", ".join(native) or "none native"
    best = next((name for name in FASTEST_FIRST if name in native), None)
    return [
        _recommendation(
            "low precision", value, "; ".join(why), "" if best is None else f"--precision.name {best}"
        )
    ]


def _libraries(results: Results) -> list[dict[str, str]]:
    working = [r["name"] for r in results if r["group"] == "libraries" and r["verdict"] == "works"]
    return (
        [_recommendation("libraries", ", ".join(working), "installed and right here", "")] if working else []
    )


def _recommendation(what: str, value: str, why: str, option: str) -> dict[str, str]:
    return {"what": what, "value": value, "why": why, "option": option}


# What to fix


def find_problems(facts: Facts, results: Results) -> list[dict[str, str]]:
    """Return problems as {"severity", "problem", "remedy"}, most important first."""
    problems = [
        *_training_problems(facts, results),
        *_wrong_numbers(results),
        *_driver_problems(facts),
        *_compiler_problems(facts, results),
        *_space_problems(facts),
        *_gpu_problems(facts, results),
        *_timed_out(results),
    ]
    return sorted(problems, key=lambda item: MOST_SEVERE_FIRST.index(item["severity"]))


def _problem(severity: Severity, problem: str, remedy: str) -> dict[str, Any]:
    return {"severity": severity, "problem": problem, "remedy": remedy}


def _training_problems(facts: Facts, results: Results) -> Iterator[dict[str, Any]]:
    if not can_train(results):
        reasons = [
            f"{r['name']}: {r['verdict']}" + (f" ({r['reason']})" if r["reason"] else "")
            for r in results
            if r["id"] in ("step_fp32", "step_bf16")
        ]
        problem = "neither an FP32 nor a BF16 training step gives right numbers"
        remedy = f"install a torch that supports this device (now {facts['torch']}), then run doctor again"
        if any(r["verdict"] == "out of memory" for r in results if r["group"] == "training"):
            remedy = "free memory: other programs hold what a small step needs"
        yield _problem("stops training", f"{problem}: {'; '.join(reasons) or 'none was run'}", remedy)


def _wrong_numbers(results: Results) -> Iterator[dict[str, Any]]:
    for result in results:
        if result["verdict"] == "wrong numbers" and result["group"] != "training":
            remedy = "do not use it here; update torch or the driver and run doctor again"
            if result["group"] == "libraries":
                remedy = "do not train with it here; update the library and run doctor again"
            elif result["group"] == "precision":
                remedy = "do not train in it here; update torch and Triton, and run doctor again"
            elif result["id"] in ("bf16", "fp32"):
                remedy += (
                    "; if NVIDIA_TF32_OVERRIDE or TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is set, unset it first"
                )
            yield _problem("wrong numbers", f"{result['name']}: {result['reason']}", remedy)


def _driver_problems(facts: Facts) -> Iterator[dict[str, Any]]:
    """Yield problems of the driver, torch and cuDNN, such as GPUs that torch cannot use."""
    wanted, offered = facts.get("cuda"), facts.get("driver_cuda")
    if facts["device"] == "cpu" and facts.get("cards"):
        if wanted is None:
            remedy = "install a torch with CUDA: pip install --force-reinstall torch"
            yield _problem("slow", f"{facts['cards']} GPU(s) idle: this torch is built for CPUs", remedy)
        else:
            problem = f"{facts['cards']} GPU(s) idle, torch says: {facts['cuda_error']}"
            remedy = "check CUDA_VISIBLE_DEVICES, and that the driver matches its kernel module (reboot)"
            if offered and _version(offered) < _version(wanted):
                remedy = f"update the driver: {facts['driver']} runs CUDA {offered}, torch needs {wanted}"
            yield _problem("slow", problem, remedy)
    for gpu in facts["gpus"]:
        known = facts["architectures"]
        if known and not any(_runs_on(built, _version(gpu["compute_capability"])) for built in known):
            problem = (
                f"{gpu['name']} has compute capability {gpu['compute_capability']}, and this torch is built for "
                f"{', '.join(known)}"
            )
            yield _problem("stops training", problem, "install a torch that is built for this card")
    seen = len(facts["gpus"])
    if facts["device"] == "cuda" and facts.get("cards", 0) > seen:
        problem = (
            f"torch sees {seen} of {facts['cards']} GPUs (CUDA_VISIBLE_DEVICES={facts['visible_devices']})"
        )
        yield _problem("note", problem, "unset CUDA_VISIBLE_DEVICES to use all")
    built, loaded = facts.get("cudnn_package"), facts.get("cudnn")
    if built and loaded and _version(built)[:2] != _version(cudnn_version(loaded))[:2]:
        problem = f"cuDNN {cudnn_version(loaded)} is loaded instead of the {built} that came with torch"
        remedy = "take the other cuDNN out of LD_LIBRARY_PATH: attention may be half as fast with it"
        yield _problem("slow", problem, remedy)


def _compiler_problems(facts: Facts, results: Results) -> Iterator[dict[str, Any]]:
    cuda = facts["device"] == "cuda"
    # On a GPU, training needs Triton, which needs a C compiler unless the kernels are cached from an earlier run. On a
    # CPU, training does not use torch.compile by default, so a missing compiler is only noted.
    severity: Severity = "may fail" if cuda else "note"
    if cuda and facts["triton"] is None:
        problem = "Triton is missing: training's kernels are written in it"
        yield _problem("stops training", problem, f"pip install triton for {facts['torch']}")
    if cuda and facts["c_compiler"] is None:
        problem = "no C compiler: Triton needs one, for training's kernels too"
        yield _problem(severity, problem, "install gcc (apt install build-essential), or set CC")
    if not cuda and facts["cxx_compiler"] is None:
        problem = "no C++ compiler: torch.compile needs one"
        yield _problem(severity, problem, "install g++ (apt install build-essential), or set CXX")
    if not facts["python_headers"]:
        problem = "Python.h is missing: torch.compile builds code against it"
        remedy = "install Python's headers (apt install python3-dev), or a Python that has them"
        yield _problem(severity, problem, remedy)
    block = by_id(results).get("compile")
    if block is not None and block["verdict"] not in ("works", "unsupported", "timeout"):
        problem = f"torch.compile: {block['verdict']}: {block['reason']}"
        yield _problem("wrong numbers", problem, "do not train with --compute.compile block; update torch")
    fused = by_id(results).get("fused")
    if fused is not None and fused["verdict"] not in ("works", "out of memory", "timeout"):
        problem = f"training's hand-written kernels: {fused['verdict']}: {fused['reason']}"
        instead = "block" if works(results, "compile") else "off"
        remedy = f"train with --compute.compile {instead}, and update torch and Triton"
        yield _problem("wrong numbers", problem, remedy)


def _space_problems(facts: Facts) -> Iterator[dict[str, Any]]:
    shm = facts["shm"]
    if shm is None or shm["total_gib"] < SHM_GIB:
        size = "missing" if shm is None else f"{shm['total_gib'] * 1024:.0f} MiB in all"
        problem = f"/dev/shm is {size}: training on several GPUs may fail with bus errors"
        remedy = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"
        yield _problem("may fail" if len(facts["gpus"]) > 1 else "note", problem, remedy)
    if facts["disk_free_gib"] < DISK_GIB:
        problem = f"{facts['disk_free_gib']:.1f} GiB of disk are free here: checkpoints and data need more"
        yield _problem("may fail", problem, "free some, or give --out and --data.path on another disk")
    temporary = facts["temporary"]
    if temporary is not None and temporary["free_gib"] < TEMPORARY_GIB:
        problem = f"{temporary['path']} has {temporary['free_gib']:.1f} GiB free: compiled code goes there"
        yield _problem("may fail", problem, "free some, or set TMPDIR and TORCHINDUCTOR_CACHE_DIR")
    limits = [facts[name] for name in ("memory_available_gib", "memory_limit_gib") if facts[name] is not None]
    if limits and min(limits) < HOST_MEMORY_GIB:
        problem = f"{min(limits):.1f} GiB of host memory can be used: preparing data and exporting need some"
        yield _problem("may fail", problem, "close other programs, or raise the container's limit")


def _gpu_problems(facts: Facts, results: Results) -> Iterator[dict[str, Any]]:
    known = by_id(results)
    link = known.get("copy", {}).get("details", {}).get("link", {})
    for gpu in facts["gpus"]:
        label = f"GPU {gpu['index']}"
        used, total = gpu.get("used_bytes"), gpu.get("total_bytes")
        if used and total and used > FOREIGN_SHARE * total + GIB / 2:
            names = ", ".join(f"{p['name'] or 'process'} ({p['pid']})" for p in gpu["processes"][:3])
            problem = f"{label}: {used / GIB:.1f} of {total / GIB:.1f} GiB are taken by others"
            remedy = f"end {names}" if names else "end what uses the card (nvidia-smi shows it), or restart"
            yield _problem("may fail", problem, remedy)
        power = gpu["power"]
        limit, default = power.get("limit_watts"), power.get("default_watts")
        if limit and default and limit < default - 1:
            problem = f"{label}: the power limit is {limit:.0f} W, its default {default:.0f} W"
            remedy = f"sudo nvidia-smi -i {gpu['index']} -pl {default:.0f}, unless that is meant (see Power)"
            yield _problem("slow", problem, remedy)
        celsius = known.get("bf16", {}).get("details", {}).get("celsius")
        if celsius is not None and celsius >= HOT_CELSIUS and gpu["index"] == 0:
            problem = f"{label}: {celsius} degrees after a second of work (measured): it will slow down"
            yield _problem(
                "slow", problem, "clean its fans, give it air, or lower its power limit (see Power)"
            )
        # An idle GPU lowers its link, so only its state under load counts, which is measured on GPU 0.
        state = link if gpu["index"] == 0 else {}
        pcie: list[Any] = [
            state.get(key) for key in ("generation", "lanes", "highest_generation", "highest_lanes")
        ]
        generation, lanes, max_generation, max_lanes = pcie
        if None not in pcie and (generation < max_generation or lanes < max_lanes):
            problem = f"{label}: PCIe {generation} x{lanes} under load, of {max_generation} x{max_lanes}"
            remedy = "seat the card again, use the slot next to the CPU, check risers and the BIOS"
            yield _problem("slow" if len(facts["gpus"]) > 1 else "note", problem, remedy)
        sheet, rate = gpu.get("data_sheet"), known.get("bf16", {}).get("speed")
        if sheet and rate and gpu["index"] == 0 and rate["value"] < LOW_SHARE_OF_SHEET * sheet["bf16_flops"]:
            problem = (
                f"{label}: BF16 matmul reaches {rate['value'] / 1e12:.0f} TFLOP/s (measured) of the data sheet's "
                f"{sheet['bf16_flops'] / 1e12:.0f} (published)"
            )
            yield _problem(
                "slow", problem, "check its temperature, its power cables and what else runs on it"
            )


def _timed_out(results: Results) -> Iterator[dict[str, Any]]:
    for result in results:
        if result["verdict"] in ("timeout", "crashed"):
            remedy = "do not use it here; --json has the end of what it printed"
            yield _problem("note", f"{result['name']}: {result['verdict']}: {result['reason']}", remedy)


# Power


def power(facts: Facts) -> dict[str, Any] | None:
    """Return the power limits of the first GPU in watts and the published effects of lower ones, None without a GPU."""
    if not facts["gpus"]:
        return None
    gpu = facts["gpus"][0]
    sheet: Gpu | None = find_device(gpu["name"], gpu["usable_bytes"])
    points = [] if sheet is None else [_cap_as_json(point) for point in cap_table(sheet)]
    limits = ("limit_watts", "default_watts", "lowest_watts", "highest_watts")
    return {
        **{key: gpu["power"].get(key) for key in limits},
        "lower_limits": points,
        "reason": "" if points else f"no measurements of the {gpu['name']} at lower limits are known",
    }


def _cap_as_json(point: CapPoint) -> dict[str, Any]:
    return {
        "limit_watts": point.limit_watts,
        "speed_share": point.speed_share,
        "power_share": point.power_share,
        "energy_share": point.energy_share,
        "training": point.training,
        "workload": point.workload,
        "publication": point.source,
        "source": "published",
    }


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def _runs_on(architecture: str, capability: tuple[int, ...]) -> bool:
    """Return True if code for an architecture runs on a GPU of this compute capability.

    sm_86 is binary code for 8.6 and later 8.x; compute_90 is PTX, compiled on loading for any capability from 9.0.
    """
    kind, _, number = architecture.partition("_")
    built = divmod(int("".join(c for c in number if c.isdigit()) or 0), 10)
    if kind == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def cudnn_version(number: int) -> str:
    """Return cuDNN's version as text: 91900 is 9.19.0."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
