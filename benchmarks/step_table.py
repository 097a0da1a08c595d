"""Results of the step benchmark as text of at most 80 columns."""

from collections.abc import Sequence
from typing import Any

from benchmarks.step_kinds import KINDS

WIDTH = 80


def summary(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a line per arm and phase. Each result has "arm", "status", "error" and "value"."""
    lines = [
        f"{'precision':<18}{'phase':<7}{'ms':>8}{'p10':>8}{'p90':>8}{'tokens/s':>11}{'MFU':>7}{'GiB':>7}{'W':>6}",
    ]
    for result in results:
        if result["status"] != "ok":
            lines.append(_fit(f"{result['arm']:<18}{result['status']}: {result['error']}"))
            continue
        value, arm = result["value"], result["arm"]
        if len(arm) > 17:
            lines.append(_fit(arm))
            arm = ""
        for phase, numbers in value["phases"].items():
            ms = numbers["step_ms"]
            lines.append(
                f"{arm:<18}{phase:<7}{ms['median']:>8.2f}{ms['p10']:>8.2f}{ms['p90']:>8.2f}"
                f"{numbers['tokens_per_second']:>11,.0f}{numbers['mfu']:>7.1%}"
                f"{_number(value['peak_allocated_gib'], '7.1f')}{_number(numbers['watts'], '6.0f')}"
            )
    return "\n".join(lines)


def details(result: dict[str, Any]) -> str:
    """Return the description and the other measurements of one arm."""
    value = result["value"]
    short = value["phases"]["short"]
    marks = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in value["cold_start"].items())
    share = value["optimizer_ms"] / short["step_ms"]["median"]
    card = value["card"]
    lines = [
        f"{result['arm']}: {value['preset']}, {value['params'] / 1e6:.1f} M parameters, {value['precision']}"
        f"{'' if value['native'] else ' (EMULATED)'}, "
        f"{value['tokens']:,} tokens per step "
        f"({value['accumulation']} x {value['micro_tokens']:,}), sequence {value['sequence_length']}",
        f"  attention {value['attention']['full']['name']}, compile {value['compile']}, {value['data']} tokens, "
        f"torch {value['torch']}",
        f"  {value['optimizer']}, clipping included, alone: {value['optimizer_ms']:.2f} ms, {share:.1%} of a step",
        f"  MFU of {value['matmul_peak_tflops']:,.1f} TFLOP/s, measured here; loss {value['loss_first']:.3f} -> "
        f"{value['loss_last']:.3f}{'' if value['finite'] else ', NOT ALL FINITE'}",
        f"  since the command: {marks}",
    ]
    if value["peak_reserved_gib"] is not None:
        lines.append(f"  peak memory reserved: {value['peak_reserved_gib']:.1f} GiB")
    if card:
        clock = f"{card.get('sm_mhz')} of {card.get('highest_sm_mhz')} MHz"
        limit = f"power limit {card.get('limit_watts')} W"
        lines.append(f"  {card['name']}: {clock}, {limit}, throttled: {short['throttled']}")
    lines += [f"  note: {note}" for note in value["notes"]]
    return "\n".join(_wrap(line) for line in lines)


def split(result: dict[str, Any]) -> str:
    """Return the time of an arm's step by kind, with the floor of each."""
    profile = result["value"]["profile"]
    floors = profile["floor"]["kinds"]
    lines = [
        f"{result['arm']}: time of a step by kind of work",
        f"{'kind':<26}{'ms':>9}{'share':>8}{'floor ms':>10}{'floor/ms':>10}{'kernels':>9}",
    ]
    step = profile["step_ms"]
    for kind, label in KINDS.items():
        measured = profile["kinds"].get(kind)
        floor = floors.get(kind)
        if measured is None and not floor:
            continue
        ms = measured["ms"] if measured else 0.0
        lines.append(_row(label, ms, step, floor, measured["kernels"] if measured else 0.0))
    lines.append(_row("idle between kernels", profile["idle_ms"], step, None, None))
    known = [f for f in floors.values() if f is not None]
    lines.append(_row("step", step, step, sum(known) if len(known) == len(floors) else None, None))
    lines.append(
        _wrap(
            f"  {profile['busy_ms']:.2f} ms busy; the profiled step took {profile['traced_step_ms']:.2f} ms with "
            f"{profile['traced_idle_ms']:.2f} ms of gaps; copy {profile['floor']['copy_bandwidth'] / 1e12:.3f} TB/s"
        )
    )
    unknown = profile["kinds"].get("unclassified")
    for name, ms in (unknown["names"] if unknown else {}).items():
        lines.append(_fit(f"  unclassified {ms:.3f} ms: {name}"))
    lines += [_wrap(f"  note: {note}") for note in profile["floor"]["notes"]]
    return "\n".join(lines)


def products(result: dict[str, Any]) -> str:
    """Return a table of the matmuls timed alone, each as output + input gradient + weight gradient."""
    lines = [f"{'products alone, ms':<20}{'times':>7}{'BF16 (plain)':>26}{'FP8':>26}"]
    for row in result["value"]["profile"]["floor"]["gemms"]:
        plain = " + ".join(f"{ms:.3f}" for ms in row["plain_ms"])
        fp8 = " + ".join(f"{ms:.3f}" for ms in row.get("quantized_ms", []))
        lines.append(f"{row['name']:<20}{row['times']:>7}{plain:>26}{fp8:>26}")
    return "\n".join(lines)


def _row(label: str, ms: float, step: float, floor: float | None, kernels: float | None) -> str:
    floor_ms = _number(floor, "10.2f")
    ratio = f"{floor / ms:>10.0%}" if floor and ms > 0 else f"{'-':>10}"
    return f"{label:<26}{ms:>9.2f}{ms / step:>8.1%}{floor_ms}{ratio}{_number(kernels, '9.0f')}"


def _number(value: float | None, form: str) -> str:
    width = int(form.split(".")[0])
    return f"{'-':>{width}}" if value is None else f"{value:>{form}}"


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _wrap(line: str) -> str:
    import textwrap

    indent = "    " if line.startswith("  ") else "  "
    return "\n".join(textwrap.wrap(line, WIDTH, subsequent_indent=indent, drop_whitespace=True)) or line
