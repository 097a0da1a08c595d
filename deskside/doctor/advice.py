"""Advice from facts and results: what to use on this machine, and what to fix, most important first.

Plain functions of plain data; nothing is run or asked here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from deskside.budget.running_costs import CapPoint, cap_table
from deskside.facts.gpus import Gpu, find_device

Facts = Mapping[str, Any]
Results = Sequence[Mapping[str, Any]]
Severity = Literal["stops training", "wrong numbers", "may fail", "slow", "note"]
ORDER: tuple[Severity, ...] = ("stops training", "wrong numbers", "may fail", "slow", "note")

GIB = 2**30
SHM_GIB = 1.0  # Docker gives 0.06; several processes on one machine exchange gradients through it
DISK_GIB = 20.0  # data, checkpoints and an export of a small run
TEMPORARY_GIB = 2.0  # compiled code
HOST_GIB = 8.0
FOREIGN_SHARE = 0.05  # of a card's memory in use before we came
HOT = 85  # degrees Celsius; cards slow down from 83 to 90
LOW_PRODUCTS = ("fp8_tensor", "fp8_row", "mxfp8", "nvfp4")  # of torch
# NVFP4 is for comparing until it is seen to be faster.
FASTEST_FIRST = ("fp8-delayed", "fp8-tensorwise", "fp8-rowwise")
SHEET_SHARE = 0.5  # data centre cards reach half of their sheet at worst, GeForce cards all of it


def by_id(results: Results) -> dict[str, Mapping[str, Any]]:
    return {result["id"]: result for result in results}


def works(results: Results, id: str) -> bool:
    found = by_id(results).get(id)
    return found is not None and found["verdict"] == "works"


def trains(results: Results) -> bool:
    """Return whether training works here: an FP32 or a BF16 step gives correct numbers."""
    return works(results, "step_fp32") or works(results, "step_bf16")


def add_ratios(results: Sequence[dict[str, Any]]) -> None:
    """Set "to_bf16", the ratio of each FLOP rate to that of the BF16 matmul, where both are known."""
    yardstick: dict[str, Any] | None = by_id(results).get("bf16", {}).get("speed")
    for result in results:
        rate: dict[str, Any] | None = result.get("speed")
        result["to_bf16"] = None
        if yardstick is not None and rate is not None and rate["unit"] == yardstick["unit"]:
            result["to_bf16"] = float(f"{rate['value'] / yardstick['value']:.3g}")


# What to use


def use(facts: Facts, results: Results, quick: bool) -> list[dict[str, str]]:
    """Return recommendations as {"what", "value", "why", "option"}; `option` is for `deskside train`, or empty."""
    if not trains(results):
        return []
    found = [_precision(facts, results), *_attention(results)]
    if not quick:
        found += [_execution(facts, results), *_low_precision(results), *_library(results)]
    return found


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
    return _choice("precision", name, why, f"--precision.name {name}")


def _attention(results: Results) -> list[dict[str, str]]:
    found = []
    known = by_id(results)
    if "attention" in known and works(results, "attention"):  # the quick doctor has already chosen
        details = known["attention"]["details"]
        why = f"the fastest that is right here: {_milliseconds(details['milliseconds'])}"
        return [_choice("attention", details["chosen"], why, "--compute.attention auto")]
    for what in ("attention", "attention, window"):
        # The reference is slow by design, and the presets need grouped heads.
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
            found.append(_choice(what, best, why, "--compute.attention auto"))
    return found


def _milliseconds(times: Mapping[str, float]) -> str:
    ordered = sorted(times.items(), key=lambda item: item[1])[:3]
    return ", ".join(f"{name} {value:.3g} ms" for name, value in ordered) + " (measured)"


def _execution(facts: Facts, results: Results) -> dict[str, str]:
    """Recommend how to run the step: on a GPU the fused kernels are the default, on a CPU it is eager."""
    fused, block = (by_id(results)[id] for id in ("fused", "compile"))
    times, why = [], []
    for name, found in (("hand-written", fused), ("torch.compile", block)):
        if found["verdict"] == "works":
            first = f"first step {found['details']['compile_seconds']:.0f} s"
            times.append(f"{name} {found['details']['times_eager']:.2f} ({first})")
        else:
            why.append(f"{name}: {found['verdict']}" + (f", {found['reason']}" if found["reason"] else ""))
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
    return _choice("step", value, "; ".join(why), f"--compute.compile {option}")


def _low_precision(results: Results) -> list[dict[str, str]]:
    """Recommend recipes that train correctly here, native ones first, with the speed of torch's own matmuls."""
    good = [r for r in results if r["group"] == "precision" and r["verdict"] == "works"]
    right = [r for r in good if r["id"] != "head_fp8"]
    if not right:
        return []
    native = [r["name"] for r in right if r["details"]["native"]]
    emulated = [r["name"] for r in right if not r["details"]["native"]]
    words = []
    if native:
        words.append("forward and both gradients are right with deskside's own kernels")
        if any(r["id"] == "head_fp8" and r["details"]["native"] for r in good):
            words.append("the head's too, with --precision.head fp8")
    rates = [
        f"{r['name']} {r['to_bf16']:.2f} x BF16"
        for r in sorted(results, key=lambda result: -(result.get("to_bf16") or 0))
        if r["group"] == "matmul" and r["id"] in LOW_PRODUCTS and r["verdict"] == "works" and r.get("to_bf16")
    ]
    if native and rates:
        words.append(f"products alone, converting excluded (measured): {', '.join(rates)}")
    if emulated:
        words.append(f"emulated, right numbers and no faster than BF16: {', '.join(emulated)}")
    value = ", ".join(native) or "none native"
    best = next((name for name in FASTEST_FIRST if name in native), None)
    return [
        _choice("low precision", value, "; ".join(words), "" if best is None else f"--precision.name {best}")
    ]


def _library(results: Results) -> list[dict[str, str]]:
    right = [r["name"] for r in results if r["group"] == "libraries" and r["verdict"] == "works"]
    return [_choice("libraries", ", ".join(right), "installed and right here", "")] if right else []


def _choice(what: str, value: str, why: str, option: str) -> dict[str, str]:
    return {"what": what, "value": value, "why": why, "option": option}


# What to fix


def fix(facts: Facts, results: Results, quick: bool) -> list[dict[str, str]]:
    """Return problems as {"severity", "problem", "remedy"}, most important first."""
    found = [*_training(facts, results), *_numbers(results), *_driver(facts), *_compiling(facts, results)]
    found += [*_space(facts), *_cards(facts, results), *_timed_out(results)]
    return sorted(found, key=lambda item: ORDER.index(item["severity"]))


def _mend(severity: Severity, problem: str, remedy: str) -> dict[str, Any]:
    return {"severity": severity, "problem": problem, "remedy": remedy}


def _training(facts: Facts, results: Results) -> Iterator[dict[str, Any]]:
    if not trains(results):
        reasons = [
            f"{r['name']}: {r['verdict']}" + (f" ({r['reason']})" if r["reason"] else "")
            for r in results
            if r["id"] in ("step_fp32", "step_bf16")
        ]
        problem = "neither an FP32 nor a BF16 training step gives right numbers"
        remedy = f"install a torch that supports this device (now {facts['torch']}), then run doctor again"
        if any(r["verdict"] == "out of memory" for r in results if r["group"] == "training"):
            remedy = "free memory: other programs hold what a small step needs"
        yield _mend("stops training", f"{problem}: {'; '.join(reasons) or 'none was run'}", remedy)


def _numbers(results: Results) -> Iterator[dict[str, Any]]:
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
            yield _mend("wrong numbers", f"{result['name']}: {result['reason']}", remedy)


def _driver(facts: Facts) -> Iterator[dict[str, Any]]:
    """Return problems of GPUs that are present but cannot be used."""
    wanted, offered = facts.get("cuda"), facts.get("driver_cuda")
    if facts["device"] == "cpu" and facts.get("cards"):
        if wanted is None:
            remedy = "install a torch with CUDA: pip install --force-reinstall torch"
            yield _mend("slow", f"{facts['cards']} GPU(s) idle: this torch is built for CPUs", remedy)
        else:
            problem = f"{facts['cards']} GPU(s) idle, torch says: {facts['cuda_error']}"
            remedy = "check CUDA_VISIBLE_DEVICES, and that the driver matches its kernel module (reboot)"
            if offered and _version(offered) < _version(wanted):
                remedy = f"update the driver: {facts['driver']} runs CUDA {offered}, torch needs {wanted}"
            yield _mend("slow", problem, remedy)
    for gpu in facts["gpus"]:
        known = facts["architectures"]
        if known and not any(_runs_on(built, _version(gpu["compute_capability"])) for built in known):
            problem = (
                f"{gpu['name']} has compute capability {gpu['compute_capability']}, and this torch is built for "
                f"{', '.join(known)}"
            )
            yield _mend("stops training", problem, "install a torch that is built for this card")
    seen = len(facts["gpus"])
    if facts["device"] == "cuda" and facts.get("cards", 0) > seen:
        problem = (
            f"torch sees {seen} of {facts['cards']} GPUs (CUDA_VISIBLE_DEVICES={facts['visible_devices']})"
        )
        yield _mend("note", problem, "unset CUDA_VISIBLE_DEVICES to use all")
    built, loaded = facts.get("cudnn_package"), facts.get("cudnn")
    if built and loaded and _version(built)[:2] != _version(cudnn_version(loaded))[:2]:
        problem = f"cuDNN {cudnn_version(loaded)} is loaded instead of the {built} that came with torch"
        remedy = "take the other cuDNN out of LD_LIBRARY_PATH: attention may be half as fast with it"
        yield _mend("slow", problem, remedy)


def _compiling(facts: Facts, results: Results) -> Iterator[dict[str, Any]]:
    cuda = facts["device"] == "cuda"
    # On a card nothing trains without what Triton needs, unless an earlier run has left it in a cache. On a CPU
    # deskside trains without torch.compile, so that nothing is lost there by default.
    severity: Severity = "may fail" if cuda else "note"
    if cuda and facts["triton"] is None:
        problem = "Triton is missing: training's kernels are written in it"
        yield _mend("stops training", problem, f"pip install triton for {facts['torch']}")
    if cuda and facts["c_compiler"] is None:
        problem = "no C compiler: Triton needs one, for training's kernels too"
        yield _mend(severity, problem, "install gcc (apt install build-essential), or set CC")
    if not cuda and facts["cxx_compiler"] is None:
        problem = "no C++ compiler: torch.compile needs one"
        yield _mend(severity, problem, "install g++ (apt install build-essential), or set CXX")
    if not facts["python_headers"]:
        problem = "Python.h is missing: torch.compile builds code against it"
        remedy = "install Python's headers (apt install python3-dev), or a Python that has them"
        yield _mend(severity, problem, remedy)
    found = by_id(results).get("compile")
    if found is not None and found["verdict"] not in ("works", "unsupported", "timeout"):
        problem = f"torch.compile: {found['verdict']}: {found['reason']}"
        yield _mend("wrong numbers", problem, "do not train with --compute.compile block; update torch")
    found = by_id(results).get("fused")
    if found is not None and found["verdict"] not in ("works", "out of memory", "timeout"):
        problem = f"training's hand-written kernels: {found['verdict']}: {found['reason']}"
        instead = "block" if works(results, "compile") else "off"
        remedy = f"train with --compute.compile {instead}, and update torch and Triton"
        yield _mend("wrong numbers", problem, remedy)


def _space(facts: Facts) -> Iterator[dict[str, Any]]:
    shm = facts["shm"]
    if shm is None or shm["total_gib"] < SHM_GIB:
        size = "missing" if shm is None else f"{shm['total_gib'] * 1024:.0f} MiB in all"
        problem = f"/dev/shm is {size}: training on several GPUs may fail with bus errors"
        remedy = "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"
        yield _mend("may fail" if len(facts["gpus"]) > 1 else "note", problem, remedy)
    if facts["disk_free_gib"] < DISK_GIB:
        problem = f"{facts['disk_free_gib']:.1f} GiB of disk are free here: checkpoints and data need more"
        yield _mend("may fail", problem, "free some, or give --out and --data.path on another disk")
    temporary = facts["temporary"]
    if temporary is not None and temporary["free_gib"] < TEMPORARY_GIB:
        problem = f"{temporary['path']} has {temporary['free_gib']:.1f} GiB free: compiled code goes there"
        yield _mend("may fail", problem, "free some, or set TMPDIR and TORCHINDUCTOR_CACHE_DIR")
    limits = [facts[name] for name in ("memory_available_gib", "memory_limit_gib") if facts[name] is not None]
    if limits and min(limits) < HOST_GIB:
        problem = f"{min(limits):.1f} GiB of host memory can be used: preparing data and exporting need some"
        yield _mend("may fail", problem, "close other programs, or raise the container's limit")


def _cards(facts: Facts, results: Results) -> Iterator[dict[str, Any]]:
    known = by_id(results)
    link = known.get("copy", {}).get("details", {}).get("link", {})
    for gpu in facts["gpus"]:
        label = f"GPU {gpu['index']}"
        used, total = gpu.get("used_bytes"), gpu.get("total_bytes")
        if used and total and used > FOREIGN_SHARE * total + GIB / 2:
            names = ", ".join(f"{p['name'] or 'process'} ({p['pid']})" for p in gpu["processes"][:3])
            problem = f"{label}: {used / GIB:.1f} of {total / GIB:.1f} GiB are taken by others"
            remedy = f"end {names}" if names else "end what uses the card (nvidia-smi shows it), or restart"
            yield _mend("may fail", problem, remedy)
        power = gpu["power"]
        limit, default = power.get("limit_watts"), power.get("default_watts")
        if limit and default and limit < default - 1:
            problem = f"{label}: the power limit is {limit:.0f} W, its default {default:.0f} W"
            remedy = f"sudo nvidia-smi -i {gpu['index']} -pl {default:.0f}, unless that is meant (see Power)"
            yield _mend("slow", problem, remedy)
        celsius = known.get("bf16", {}).get("details", {}).get("celsius")
        if celsius is not None and celsius >= HOT and gpu["index"] == 0:
            problem = f"{label}: {celsius} degrees after a second of work (measured): it will slow down"
            yield _mend("slow", problem, "clean its fans, give it air, or lower its power limit (see Power)")
        # An idle card lowers its link: only what was asked about under load counts.
        state = link if gpu["index"] == 0 else {}
        generation, lanes = state.get("generation"), state.get("lanes")
        most, widest = state.get("highest_generation"), state.get("highest_lanes")
        if (generation and most and generation < most) or (lanes and widest and lanes < widest):
            problem = f"{label}: PCIe {generation} x{lanes} under load, of {most} x{widest}"
            remedy = "seat the card again, use the slot next to the CPU, check risers and the BIOS"
            yield _mend("slow" if len(facts["gpus"]) > 1 else "note", problem, remedy)
        sheet, rate = gpu.get("data_sheet"), known.get("bf16", {}).get("speed")
        if sheet and rate and gpu["index"] == 0 and rate["value"] < SHEET_SHARE * sheet["bf16_flops"]:
            problem = (
                f"{label}: BF16 matmul reaches {rate['value'] / 1e12:.0f} TFLOP/s (measured) of the data sheet's "
                f"{sheet['bf16_flops'] / 1e12:.0f} (published)"
            )
            yield _mend("slow", problem, "check its temperature, its power cables and what else runs on it")


def _timed_out(results: Results) -> Iterator[dict[str, Any]]:
    for result in results:
        if result["verdict"] in ("timeout", "crashed"):
            remedy = "do not use it here; --json has the end of what it printed"
            yield _mend("note", f"{result['name']}: {result['verdict']}: {result['reason']}", remedy)


# Power


def power(facts: Facts) -> dict[str, Any] | None:
    """Return the power limits of the first GPU, and published costs and savings of lower ones."""
    if not facts["gpus"]:
        return None
    gpu = facts["gpus"][0]
    sheet: Gpu | None = find_device(gpu["name"], gpu["usable_bytes"])
    points = [] if sheet is None else [_cap(point) for point in cap_table(sheet)]
    limits = ("limit_watts", "default_watts", "lowest_watts", "highest_watts")
    return {
        **{key: gpu["power"].get(key) for key in limits},
        "lower_limits": points,
        "reason": "" if points else f"nobody published what a lower limit does to the {gpu['name']}",
    }


def _cap(point: CapPoint) -> dict[str, Any]:
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
    """Code for sm_86 runs on 8.6 and 8.9; compute_90 is compiled for anything from 9.0 when it is loaded."""
    kind, _, number = architecture.partition("_")
    built = divmod(int("".join(c for c in number if c.isdigit()) or 0), 10)
    if kind == "compute":
        return built <= capability
    return built[0] == capability[0] and built[1] <= capability[1]


def cudnn_version(number: int) -> str:
    """Return cuDNN's version as text: 91900 is 9.19.0."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
