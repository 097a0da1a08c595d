"""`deskside models`: list the supported families of Hugging Face models, and what fine-tuning them needs on a card."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deskside.cli.card_list import list_cards
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import JsonOption
from deskside.plan.finetuning import METHODS, RANK, ROW_TOKENS, FinetuningNeed, finetuning_need
from deskside.plan.question import PlanQuestion
from deskside.plan.request import PlanRequest, make_request
from deskside.utils.errors import UsageError
from deskside.utils.format import count
from deskside.utils.printer import Printer, Row
from deskside.weights.hf_families import FAMILIES
from deskside.weights.published import PublishedCheckpoint, published_checkpoints

_MEMORY = "memory that fine-tuning needs"  # section of the help
_COLUMNS = {"full": "full", "lora": "LoRA", "qlora": "4-bit LoRA"}


@dataclass(kw_only=True)
class ModelsOptions(JsonOption):
    """List the families of Hugging Face models that load, train and export, with published checkpoints.

    With --gpu or --here, also list the GPU memory that fine-tuning needs: all weights with AdamW, adapters, and
    adapters of a base in 4 bits.

    Examples:
      deskside models
      deskside models llama --gpu rtx4090
      deskside models --here --json
    """

    name: str | None = option(
        "list only families and checkpoints whose name contains this", None, metavar="NAME", positional=True
    )
    gpu: str | None = option(
        "on this GPU, such as rtx4090; --gpu list shows the known GPUs", None, metavar="GPU", section=_MEMORY
    )
    here: bool = option("on the GPU of this machine", False, section=_MEMORY)
    probes: str = option("directory of deskside probe's results", "probes", metavar="DIR", section=_MEMORY)


COMMAND = Command("models", ModelsOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside models` and return the exit code. Raises UsageError."""
    options = COMMAND.parse(argv)
    if options.gpu == "list":
        return list_cards(options.json)
    wanted = (options.name or "").lower()
    chosen = [c for c in published_checkpoints() if wanted in c.name.lower() or wanted in c.family.model_type]
    families = [
        name for name in FAMILIES if wanted in name or any(c.family.model_type == name for c in chosen)
    ]
    if not families:
        raise UsageError(
            f"{options.name}: no family and no checkpoint has this in its name; see deskside models"
        )
    request = None
    if options.gpu is not None or options.here:
        # The model of the question is replaced by each checkpoint's.
        request = make_request(
            PlanQuestion(gpu=options.gpu, here=options.here, probes=options.probes, preset="demo")
        )
    # The table shows no reasons, so remedies are not searched.
    rows = [_row(checkpoint, request, with_remedies=options.json) for checkpoint in chosen]
    if options.json:
        print_json({"families": _families(families), "checkpoints": rows}, indent=1)
    else:
        _show(families, rows, request)
    return 0


def _families(names: Sequence[str]) -> list[dict[str, str]]:
    return [{"model_type": name, "architecture": FAMILIES[name].architecture} for name in names]


def _row(checkpoint: PublishedCheckpoint, request: PlanRequest | None, with_remedies: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": checkpoint.name,
        "model_type": checkpoint.family.model_type,
        "parameters": checkpoint.parameters,
    }
    if request is not None:
        row["needs"] = {
            method: asdict(
                finetuning_need(request, checkpoint.name, checkpoint.model, adapter, with_remedies)
            )
            for method, adapter in METHODS.items()
        }
    return row


def _show(families: Sequence[str], rows: Sequence[dict[str, Any]], request: PlanRequest | None) -> None:
    """Print the families with their checkpoints."""
    printer = Printer()
    if request is not None:
        printer.text(
            f"{request.card.name}: {request.card.memory_bytes / 2**30:.1f} GiB for programs\n", "strong"
        )
    methods = () if request is None else tuple(_COLUMNS.values())
    cells: list[Row] = []
    for name in families:
        cells.append(f"{name} ({FAMILIES[name].architecture})")
        for row in (row for row in rows if row["model_type"] == name):
            needs = (_cell(FinetuningNeed(**need)) for need in row.get("needs", {}).values())
            cells.append([f"  {row['name']}", count(row["parameters"]), *needs])
    printer.table(["", "size", *methods], cells, "lr" + "r" * len(methods))
    printer.text()
    if request is None:
        printer.text("What fine-tuning needs on your card: deskside models --here, or --gpu rtx4090.")
        return
    printer.text(
        f"GiB of GPU memory with AdamW, one row of {ROW_TOKENS:,} tokens per pass; LoRA of rank {RANK}.",
        "quiet",
    )
    printer.text("*: with options that save memory, named by --json. no: the least it needs.", "quiet")
    printer.text("-: not supported.", "quiet")


def _cell(need: FinetuningNeed) -> str:
    if need.memory_bytes is None:
        return "-"
    gib = f"{need.memory_bytes / 2**30:.1f}"
    return {"yes": gib, "yes-if": f"{gib} *", "no": f"no ({gib})"}[need.answer]
