"""A SkyPilot task that carries out a plan on a rented GPU: `deskside plan ... --cloud FILE`.

SkyPilot (docs.skypilot.co) finds a machine with the GPU at one of the clouds of the user's accounts, copies the data
there, runs the task and deletes the machine. With a bucket for the runs, the task takes spot machines, which are
cheaper and may be taken away at any time: SkyPilot's managed job then runs the task again on another one, and the task
resumes from the newest checkpoint in the bucket.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from deskside import __version__
from deskside.data.reading.index_file import is_prepared
from deskside.facts.gpus import Gpu
from deskside.facts.power_and_prices import rental_prices
from deskside.plan.result import PLACEHOLDERS, Plan, PlannedBand
from deskside.utils.errors import UsageError
from deskside.utils.hub import hub_model

# Our name of a GPU -> SkyPilot's names (`sky gpus list`); the first one that a cloud offers is taken.
ACCELERATORS = {
    "RTX 3090": ("RTX3090",),
    "RTX 4090": ("RTX4090",),
    "RTX 5090": ("RTX5090",),
    "RTX A6000": ("RTXA6000",),
    "RTX 6000 Ada": ("RTX6000-Ada",),
    "RTX PRO 6000 Blackwell Workstation": ("RTXPRO6000-WK",),
    "RTX PRO 6000 Blackwell Server": ("RTXPRO6000",),
    "RTX PRO 6000 Blackwell Max-Q": ("RTXPRO6000-MaxQ",),
    "L4": ("L4",),
    "L40S": ("L40S",),
    "A100 40GB SXM": ("A100",),
    "A100 80GB SXM": ("A100-80GB-SXM", "A100-80GB"),
    "A100 80GB PCIe": ("A100-80GB",),
    "H100 PCIe": ("H100",),
    "H100 SXM": ("H100-SXM", "H100"),
    "H200 SXM": ("H200-SXM", "H200"),
    "B200": ("B200",),
}
BUCKETS = ("s3://", "gs://", "r2://", "nebius://", "oci://", "cos://")
STRING = "tag:yaml.org,2002:str"
DATA, RUNS = "~/data", "~/runs"  # on the rented machine


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks of lines (|), for people to read."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(STRING, text, style="|" if "\n" in text else None)
)


def task(plan: Plan, runs: str | None, wheel: str | None) -> dict[str, Any]:
    """Return the task of the recommended band as SkyPilot reads it.

    runs: URL of a bucket for the run directory; None keeps it on the rented machine, which is then not a spot machine.
    wheel: path of a wheel of deskside to install; None installs this version from PyPI. Raises UsageError if the plan's
    answer is no, SkyPilot has no name for its GPU, or its command needs files that are not known.
    """
    band = plan.best
    if band is None or plan.verdict == "no":
        raise UsageError("--cloud: there is nothing to carry out, because the plan's answer is no")
    if runs is not None and not (runs.startswith(BUCKETS) and runs.partition("://")[2].strip("/")):
        raise UsageError(
            f"--cloud-runs {runs}: is not a bucket URL, such as s3://BUCKET ({', '.join(BUCKETS)})"
        )
    if band.preset.endswith(".toml"):
        raise UsageError(
            f"--cloud: --preset {band.preset} is on this machine; give the name of a preset or --depth"
        )
    command, data = _command(band)
    mounts: dict[str, Any] = {DATA: str(data)}
    package = f"deskside=={__version__}"
    if wheel is not None:
        if not Path(wheel).is_file() or not wheel.endswith(".whl"):
            raise UsageError(f"--cloud-wheel {wheel}: is no wheel; build one with: python -m build")
        package = f"~/{shlex.quote(Path(wheel).name)}"
        mounts[f"~/{Path(wheel).name}"] = str(Path(wheel).resolve())
    if runs is not None:
        mounts[RUNS] = {"source": runs, "mode": "MOUNT_CACHED"}  # files are appended to and renamed there
    name = band.preset.replace("/", "-").replace("@", "-")
    return {
        "name": f"deskside-{name}".lower().replace(".", "-"),
        "resources": {
            "accelerators": dict.fromkeys(_accelerators(plan), plan.request.gpus),
            "use_spot": runs is not None,
        },
        "file_mounts": mounts,
        "setup": f"python3 -m venv ~/venv\n~/venv/bin/pip install {package}\n",
        "run": _script(command, name, plan.request.gpus),
    }


def write(task: Mapping[str, Any], path: Path) -> str:
    """Write a task to a YAML file. Return the command that starts it. Raises UsageError if it cannot be written."""
    spot = task["resources"]["use_spot"]
    if not str(path).isprintable():  # a line break would end the comment that it is in
        raise UsageError(f"--cloud {str(path)!r}: has control characters; give another name")
    start = f"sky {'jobs launch' if spot else 'launch --down'} {shlex.quote(str(path))}"
    note = (
        ""
        if spot
        else "# The run is lost with the machine: fetch it first, or plan with --cloud-runs BUCKET.\n"
    )
    text = yaml.dump(dict(task), Dumper=_Dumper, sort_keys=False, width=4096)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(f"# Start: {start}\n{note}{text}")
    except FileExistsError:
        raise UsageError(f"--cloud {path}: exists already; name a new file") from None
    except OSError as error:
        raise UsageError(f"--cloud {path}: cannot be written: {error.strerror}") from None
    return start


def offers(plan: Plan, spot: bool) -> list[dict[str, Any]]:
    """Return what the recommended band costs at every published price of its card, cheapest first, and owned.

    spot: whether spot machines can be used; they are left out if not.
    """
    band, gpu = plan.best, plan.request.card.gpu
    if band is None or gpu is None:
        return []
    hours = band.cost.hours[1]
    rows = [
        {
            "offer": price.offer,
            "usd_per_gpu_hour": price.usd,
            "usd": round(price.usd * plan.request.gpus * hours, 2),
            "source": price.label,
        }
        for price in rental_prices(gpu)
        if spot or not price.offer.endswith("spot")
    ]
    if own := band.cost.own:
        each = own.own_per_hour / plan.request.gpus
        words = f"{own.summary} ({band.cost.own_basis})"
        rows.append(
            {
                "offer": "owned",
                "usd_per_gpu_hour": round(each, 4),
                "usd": round(own.own_per_hour * hours, 2),
                "source": words,
            }
        )
    return sorted(rows, key=lambda row: float(str(row["usd"])))


def _accelerators(plan: Plan) -> tuple[str, ...]:
    """Return SkyPilot's names of the plan's GPU. Raises UsageError if it has none."""
    gpu: Gpu | None = plan.request.card.gpu
    if gpu is None or gpu.name not in ACCELERATORS:
        raise UsageError(
            f"--cloud: SkyPilot knows no cloud with {plan.request.card.name}; plan for one of "
            f"{', '.join(ACCELERATORS)} with --gpu"
        )
    return ACCELERATORS[gpu.name]


def _command(band: PlannedBand) -> tuple[list[str], Path]:
    """Return the arguments of the band's command on the rented machine, and the data here. Raises UsageError."""
    words = shlex.split(band.command)[1:]
    at = words.index("--data.path") + 1 if "--data.path" in words else None
    if at is not None and words[at] == "DIR":
        raise UsageError(
            "--cloud: the task takes the data along: add --data.path DIR, which deskside data prepare has written"
        )
    if at is None or PLACEHOLDERS.keys() & set(words):
        raise UsageError("--cloud: writes tasks of deskside train only; plan without options of fine-tuning")
    data = Path(words[at]).resolve()
    if not is_prepared(data):
        raise UsageError(f"--data.path {words[at]}: is no prepared data; make it with: deskside data prepare")
    if "--init" in words and hub_model(source := words[words.index("--init") + 1]) is None:
        raise UsageError(f"--cloud: --init {source} is on this machine; name a model of the hub: owner/name")
    return [*words[:at], "DATA", *words[at + 1 :]], data


def _script(command: list[str], name: str, gpus: int) -> str:
    """Return the shell script that starts the run, or resumes it where an earlier machine has left it."""
    on_all = f" --gpus {gpus}" if gpus > 1 else ""
    new = shlex.join([*command, "--name", name]).replace(" DATA ", f" {DATA} ")
    return f"""set -e
run={RUNS}/{name}
if [ -e $run/summary.json ]; then echo "$run is finished"
elif [ -e $run/run.json ]; then ~/venv/bin/deskside train --resume $run{on_all}
else ~/venv/bin/deskside {new} --runs {RUNS}
fi
"""
