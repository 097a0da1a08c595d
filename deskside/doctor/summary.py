"""Print the doctor's report in 80 columns: facts, a table of checks, what to use, what to fix."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deskside.doctor.advice import cudnn_version

GIB = 2**30
GROUPS = ("matmul", "precision", "memory", "attention", "training", "libraries")
STYLES = {
    "works": "green",
    "wrong numbers": "bold red",
    "crashed": "red",
    "timeout": "red",
    "out of memory": "yellow",
    "unsupported": "yellow",
    "not installed": "dim",
}
SEVERITIES = {
    "stops training": "bold red",
    "wrong numbers": "red",
    "may fail": "yellow",
    "slow": "yellow",
    "note": "dim",
}
LEGEND = (
    "error: relative, against float64, the largest of output and gradients\n"
    "matmul: torch's products; precision: deskside's recipes, with their layers and gradients\n"
    "attention: forward and backward; with --quick, the error is against float32"
)
SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print a report of `doctor.examine`."""
    if report["machine"]:
        console.print(_facts(report["machine"], report["checks"]))
        console.print()
        console.print(_checks(report["checks"]))
        console.print(Text(LEGEND, "dim"))
        for line in _reasons(report["checks"]):
            console.print(Padding(line, (0, 0, 0, 1)))
        _power(report["power"], console)
    kept = report.get("kept_trials") or {"number": 0}
    if kept["number"]:
        note = (
            f"{kept['number']} results of trials are kept in {kept['folder']}; see deskside doctor --trials"
        )
        console.print(Text(note, "dim"))
    if report["use"]:
        _heading("Use on this machine", console)
        console.print(_use(report["use"]))
    _heading("Fix, most important first", console)
    if report["fix"]:
        console.print(_fixes(report["fix"]))
    else:
        console.print(" nothing")
    if not report["trains"]:
        console.print(Text("Training cannot work here.", "bold red"))
    if report["quick"] and report["machine"]:
        console.print(
            Text("A quick look; deskside doctor checks all formats, backends and libraries.", "dim")
        )


def rate(speed: Mapping[str, Any] | None) -> str:
    """Format a rate: 790 TFLOP/s, 4.25 TB/s; empty for None."""
    if speed is None:
        return ""
    value = float(speed["value"])
    scale, letter = next(((s, name) for s, name in SCALES if value >= s), (1.0, ""))
    shown = value / scale
    digits = 0 if shown >= 100 else 1 if shown >= 10 else 2
    return f"{shown:.{digits}f} {letter}{speed['unit'].replace('tokens', 'tok')}"


def _label_table(indent: int) -> Table:
    """Return an empty table with two columns, labels and texts."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, indent))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _heading(title: str, console: Console) -> None:
    console.print()
    console.print(Text(title, "bold"))


def _facts(machine: Mapping[str, Any], checks: Sequence[Mapping[str, Any]]) -> Table:
    table = _label_table(0)
    table.columns[0].style = "bold"
    details: dict[str, dict[str, Any]] = {c["id"]: c.get("details") or {} for c in checks}
    for gpu in machine["gpus"]:
        link: dict[str, Any] = details["copy"].get("link", {}) if gpu["index"] == 0 else {}
        for name, line in _gpu_lines(gpu, link):
            table.add_row(name, escape(line))
        work = details["bf16"] if gpu["index"] == 0 else {}
        if work.get("watts") is not None:
            table.add_row("", f"under load {work['watts']:.0f} W, {work['celsius']} degrees (measured)")
    if len(machine["gpus"]) > 1:
        table.add_row("", "checks ran on GPU 0")
    if not machine["gpus"]:
        table.add_row("GPU", escape(f"none that torch can use ({machine['cuda_error']})"))
    software = f"deskside {machine['deskside']}, Python {machine['python']}, torch {machine['torch']}"
    if machine["cuda"]:
        cudnn = machine["cudnn"]
        software += f", CUDA {machine['cuda']}" + ("" if cudnn is None else f", cuDNN {cudnn_version(cudnn)}")
    software += f", Triton {machine['triton'] or 'missing'}"
    table.add_row("software", escape(software))
    if machine["driver"]:
        newest = f", for CUDA up to {machine['driver_cuda']}" if machine["driver_cuda"] else ""
        table.add_row("driver", escape(machine["driver"] + newest))
    container_limit = machine["memory_limit_gib"]
    table.add_row("CPU", escape(f"{machine['cpu']}, {machine['cpu_cores']} cores"))
    memory = f"{_gib(machine['memory_gib'])}, {_gib(machine['memory_available_gib'])} available"
    table.add_row(
        "memory",
        memory + ("" if container_limit is None else f", {_gib(container_limit)} allowed to this container"),
    )
    shm = machine["shm"]
    disk = f"{_gib(machine['disk_free_gib'])} free here, /dev/shm "
    table.add_row("disk", disk + ("missing" if shm is None else f"{_gib(shm['total_gib'])}"))
    compilers = (
        f"{machine['c_compiler'] or 'no C compiler'}, {machine['cxx_compiler'] or 'no C++ compiler'}, "
    )
    table.add_row("compilers", compilers + ("Python.h" if machine["python_headers"] else "no Python.h"))
    return table


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


def _checks(checks: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of checks, except for combinations that a backend declares unsupported (see `_reasons`)."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("check", "verdict", "measured", "x BF16", "error"):
        table.add_column(name, justify="left" if name in ("check", "verdict") else "right", no_wrap=True)
    for group in GROUPS:
        rows = [check for check in checks if check["group"] == group and not check.get("declared")]
        if rows:
            table.add_row(Text(group, "bold"))
        for check in rows:
            ratio, errors = check.get("to_bf16"), (check.get("errors") or {}).values()
            worst = "not finite" if None in errors else f"{max(errors):.1e}" if errors else ""
            table.add_row(
                Text(f"  {check['name']}"),
                Text(check["verdict"], STYLES[check["verdict"]]),
                _measured(check),
                "" if ratio is None else f"{ratio:.2f}" if ratio >= 0.01 else "<0.01",
                worst,
            )
    return table


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
        yield Text.assemble((f"{', '.join(names)}: ", "bold"), why)
    for why, names in emulated.items():
        yield Text(f"emulated, {why}: {', '.join(names)}", "dim")
    for reason, names in declared.items():
        yield Text(f"attention, {reason}: {', '.join(dict.fromkeys(names))}", "dim")


def _power(power: Mapping[str, Any] | None, console: Console) -> None:
    if power is None:
        return
    _heading("Power", console)
    if not power["lower_limits"]:
        console.print(f" {power['reason']}", highlight=False)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 1))
    for column in ("limit", "speed", "power", "energy per token"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("published for", overflow="fold")
    for point in power["lower_limits"]:
        table.add_row(
            f"{point['limit_watts']:.0f} W",
            f"{point['speed_share'] - 1:+.0%}",
            f"{point['power_share'] - 1:+.0%}",
            f"{point['energy_share'] - 1:+.0%}",
            Text(point["workload"]),
        )
    console.print(table)
    console.print(" doctor changes no limit; sudo nvidia-smi -pl WATTS does", style="dim", highlight=False)


def _use(choices: Sequence[Mapping[str, str]]) -> Table:
    table = _label_table(1)
    for choice in choices:
        text = Text.assemble((choice["value"], "bold green"), f": {choice['why']}" if choice["why"] else "")
        if choice["option"]:
            text.append(f" [{choice['option']}]", "dim")
        table.add_row(choice["what"], text)
    return table


def _fixes(fixes: Sequence[Mapping[str, str]]) -> Table:
    table = _label_table(1)
    table.columns[0].justify = "right"
    for number, fix in enumerate(fixes, 1):
        text = Text.assemble((f"{fix['severity']}: ", SEVERITIES[fix["severity"]]), fix["problem"])
        text.append(f"\n{fix['remedy']}", "cyan")
        table.add_row(f"{number}.", text)
    return table


def _gib(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value < 1:
        return f"{value * 1024:.0f} MiB"
    return f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"
