"""Print the doctor's report: facts, a table of checks, what to use, what to fix, and whether training works."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from deskside.doctor.advice import cudnn_version
from deskside.utils.format import plural
from deskside.utils.printer import Printer, Row

GIB = 2**30
GROUPS = ("matmul", "precision", "memory", "attention", "training", "libraries")
STYLES = {
    "works": "good",
    "wrong numbers": "bad",
    "crashed": "bad",
    "timeout": "bad",
    "out of memory": "attention",
    "unsupported": "attention",
    "not installed": "quiet",
}
SEVERITIES = {
    "stops training": "bad",
    "wrong numbers": "bad",
    "may fail": "attention",
    "slow": "attention",
    "note": "quiet",
}
LEGEND = (
    "error: relative, against float64, the largest of output and gradients\n"
    "matmul: torch's products; precision: deskside's recipes, with their layers and gradients\n"
    "attention: forward and backward; with --quick, the error is against float32"
)
SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show(report: Mapping[str, Any], printer: Printer) -> None:
    """Print a report of `doctor.examine`."""
    if report["machine"]:
        printer.fields(_facts(report["machine"], report["checks"]))
        printer.text()
        _show_checks(report["checks"], printer)
        printer.text(LEGEND, "quiet")
        for line in _reasons(report["checks"]):
            printer.text(line, indent=1, hanging=2)
        _show_power(report["power"], printer)
    kept = report.get("kept_trials") or {"number": 0}
    if kept["number"]:
        results = plural(kept["number"], "result")
        note = f"{results} of trials kept in {kept['folder']}; see deskside doctor --trials"
        printer.text(note, "quiet")
    if report["use"]:
        printer.heading("Use on this machine")
        printer.fields([(choice["what"], _choice(choice)) for choice in report["use"]], indent=1)
    printer.heading("Fix, most important first" if report["fix"] else "Nothing to fix")
    for number, fix in enumerate(report["fix"], 1):
        severity = Text(f"{number}. ") + Text(f"{fix['severity']}: ", SEVERITIES[fix["severity"]])
        printer.text(severity + Text(fix["problem"]), indent=1, hanging=3)
        printer.text(fix["remedy"], "command", indent=4)
    _show_answer(report, printer)


def _show_answer(report: Mapping[str, Any], printer: Printer) -> None:
    """Print whether training works here, and what to do next."""
    printer.text()
    serious = sum(fix["severity"] != "note" for fix in report["fix"])
    if not report["trains"]:
        printer.text(
            "Training cannot work here: fix the problems above, then run deskside doctor again.", "bad"
        )
        return
    problems = f"; {plural(serious, 'problem')} above to fix" if serious else ""
    printer.text(f"Training works here{problems}.", "attention" if serious else "good")
    printer.text("next:")
    if report["quick"]:
        printer.command("deskside doctor")
        printer.text("checks all formats, backends and libraries", indent=4)
    printer.command("deskside probe")
    printer.text("measures speed and memory for the planner", indent=4)


def rate(speed: Mapping[str, Any] | None) -> str:
    """Format a rate: 790 TFLOP/s, 4.25 TB/s; empty for None."""
    if speed is None:
        return ""
    value = float(speed["value"])
    scale, letter = next(((s, name) for s, name in SCALES if value >= s), (1.0, ""))
    shown = value / scale
    digits = 0 if shown >= 100 else 1 if shown >= 10 else 2
    return f"{shown:.{digits}f} {letter}{speed['unit'].replace('tokens', 'tok')}"


def _facts(machine: Mapping[str, Any], checks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    details: dict[str, dict[str, Any]] = {c["id"]: c.get("details") or {} for c in checks}
    for gpu in machine["gpus"]:
        link: dict[str, Any] = details["copy"].get("link", {}) if gpu["index"] == 0 else {}
        lines += _gpu_lines(gpu, link)
        work = details["bf16"] if gpu["index"] == 0 else {}
        if work.get("watts") is not None:
            lines.append(("", f"under load {work['watts']:.0f} W, {work['celsius']} degrees (measured)"))
    if len(machine["gpus"]) > 1:
        lines.append(("", "checks ran on GPU 0"))
    if not machine["gpus"]:
        lines.append(("GPU", f"none that torch can use ({machine['cuda_error']})"))
    software = f"deskside {machine['deskside']}, Python {machine['python']}, torch {machine['torch']}"
    if machine["cuda"]:
        cudnn = machine["cudnn"]
        software += f", CUDA {machine['cuda']}" + ("" if cudnn is None else f", cuDNN {cudnn_version(cudnn)}")
    software += f", Triton {machine['triton'] or 'missing'}"
    lines.append(("software", software))
    if machine["driver"]:
        newest = f", for CUDA up to {machine['driver_cuda']}" if machine["driver_cuda"] else ""
        lines.append(("driver", machine["driver"] + newest))
    container_limit = machine["memory_limit_gib"]
    lines.append(("CPU", f"{machine['cpu']}, {machine['cpu_cores']} cores"))
    memory = f"{_gib(machine['memory_gib'])}, {_gib(machine['memory_available_gib'])} available"
    if container_limit is not None:
        memory += f", {_gib(container_limit)} allowed to this container"
    lines.append(("memory", memory))
    shm = machine["shm"]
    disk = f"{_gib(machine['disk_free_gib'])} free here, /dev/shm "
    lines.append(("disk", disk + ("missing" if shm is None else f"{_gib(shm['total_gib'])}")))
    compilers = (
        f"{machine['c_compiler'] or 'no C compiler'}, {machine['cxx_compiler'] or 'no C++ compiler'}, "
    )
    lines.append(("compilers", compilers + ("Python.h" if machine["python_headers"] else "no Python.h")))
    return lines


def _gpu_lines(gpu: Mapping[str, Any], link: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    free = gpu.get("free_bytes")
    memory = f"{gpu['usable_bytes'] / GIB:.1f} GiB" + ("" if free is None else f", {free / GIB:.1f} free")
    yield f"GPU {gpu['index']}", f"{gpu['name']}, {memory}"
    yield "", f"compute capability {gpu['compute_capability']}, {gpu['multiprocessors']} multiprocessors"
    power, parts = gpu["power"], []
    if power.get("limit_watts"):
        default, low, high = (power.get(f"{name}_watts") for name in ("default", "lowest", "highest"))
        range_text = f"default {default:.0f}" if default else "default unknown"
        range_text += f", {low:.0f} to {high:.0f} can be set" if low and high else ""
        parts.append(f"power limit {power['limit_watts']:.0f} W ({range_text})")
    state = link or gpu["pcie"]
    pcie = [state.get(key) for key in ("generation", "lanes", "highest_generation", "highest_lanes")]
    if None not in pcie:
        load = "under load" if link else "idle"
        parts.append(f"PCIe {pcie[0]} x{pcie[1]} {load}, of {pcie[2]} x{pcie[3]}")
    if link.get("host_to_device"):
        parts.append(f"{rate(link['host_to_device'])} from host (measured)")
    for part in parts:
        yield "", part
    sheet = gpu.get("data_sheet")
    if sheet:
        flops, bandwidth = sheet["bf16_flops"] / 1e12, sheet["bandwidth"] / 1e12
        yield "", f"data sheet: {flops:.0f} TFLOP/s BF16, {bandwidth:.2f} TB/s (published)"


def _show_checks(checks: Sequence[Mapping[str, Any]], printer: Printer) -> None:
    """Print the table of checks, except for combinations that a backend declares unsupported (see `_reasons`)."""
    rows: list[Row] = []
    for group in GROUPS:
        checked = [check for check in checks if check["group"] == group and not check.get("declared")]
        rows += [group] if checked else []
        for check in checked:
            ratio, errors = check.get("to_bf16"), (check.get("errors") or {}).values()
            worst = "not finite" if None in errors else f"{max(errors):.1e}" if errors else ""
            verdict = Text(check["verdict"], STYLES[check["verdict"]])
            relative = "" if ratio is None else f"{ratio:.2f}" if ratio >= 0.01 else "<0.01"
            rows.append([f"  {check['name']}", verdict, _measured(check), relative, worst])
    printer.table(["check", "verdict", "measured", "x BF16", "error"], rows, "llrrr")


def _measured(check: Mapping[str, Any]) -> str:
    details = check.get("details") or {}
    if "times_eager" in details:
        return f"{details['times_eager']:.2f} x eager"
    if "native" in details:
        return "native" if details["native"] else "emulated"
    return rate(check.get("speed"))


def _reasons(checks: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield lines below the table: why checks failed or are emulated, and what backends declare unsupported."""
    failed: dict[str, list[str]] = {}
    declared: dict[str, list[str]] = {}
    emulated: dict[str, list[str]] = {}
    for check in checks:
        if check.get("declared"):
            declared.setdefault(check["reason"], []).append(check["name"].removesuffix(", window"))
        elif check["verdict"] != "works":
            failed.setdefault(check["reason"], []).append(check["name"])
        elif why := (check.get("details") or {}).get("emulated_because"):
            emulated.setdefault(why, []).append(check["name"])
    for why, names in failed.items():
        yield Text.assemble((f"{', '.join(names)}: ", "strong"), why)
    for why, names in emulated.items():
        yield Text(f"emulated, {why}: {', '.join(names)}", "quiet")
    for reason, names in declared.items():
        yield Text(f"{', '.join(dict.fromkeys(names))}: {reason}", "quiet")


def _show_power(power: Mapping[str, Any] | None, printer: Printer) -> None:
    if power is None:
        return
    printer.heading("Power")
    if not power["lower_limits"]:
        printer.text(f" {power['reason']}")
        return
    rows = [
        [
            f"{point['limit_watts']:.0f} W",
            f"{point['speed_share'] - 1:+.0%}",
            f"{point['power_share'] - 1:+.0%}",
            f"{point['energy_share'] - 1:+.0%}",
            point["workload"],
        ]
        for point in power["lower_limits"]
    ]
    printer.table(["limit", "speed", "power", "energy per token", "published for"], rows, "rrrrl", indent=1)
    printer.text("doctor changes no limit; sudo nvidia-smi -pl WATTS does", "quiet", indent=1)


def _choice(choice: Mapping[str, str]) -> Text:
    text = Text(choice["value"], "strong")
    # `append` would continue the style of the value.
    text = Text().append_text(text).append(f": {choice['why']}" if choice["why"] else "")
    if choice["option"]:
        text.append(f" [{choice['option']}]", "quiet")
    return text


def _gib(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value < 1:
        return f"{value * 1024:.0f} MiB"
    return f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"
