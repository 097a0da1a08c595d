"""`--gpu list`: the known GPUs."""

from deskside.cli.output import print_json
from deskside.utils.printer import Printer


def list_cards(as_json: bool) -> int:
    """Print the name, memory and speed of every known GPU. Mark GPUs whose architecture no measurement calibrates."""
    from deskside.facts.gpus import gpus
    from deskside.plan.published import uncalibrated_reason

    rows = [
        {
            "name": gpu.name,
            "memory_gib": round(gpu.memory_bytes / 2**30, 1),
            "bf16_tflops": gpu.bf16_flops / 1e12,
            "bandwidth_gb_s": gpu.bandwidth / 1e9,
            "calibrated": not uncalibrated_reason(gpu),
        }
        for gpu in gpus()
    ]
    if as_json:
        print_json(rows, indent=1)
        return 0
    cells = [
        [
            str(row["name"]),
            f"{row['memory_gib']:g}",
            f"{row['bf16_tflops']:.0f}",
            f"{row['bandwidth_gb_s']:.0f}",
            "yes" if row["calibrated"] else "no",
        ]
        for row in rows
    ]
    printer = Printer()
    printer.table(["--gpu", "GiB", "BF16 TFLOP/s", "GB/s", "calibrated"], cells, "lrrrl")
    printer.text("\ncalibrated: plans use measured runs on a card of its architecture", "quiet")
    return 0
