"""`deskside plan`: find the best model for a budget on a GPU, or judge whether a given model can be trained."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from deskside.budget.loss import TYPICAL_TEXT
from deskside.cli import plan_cloud
from deskside.cli.card_list import list_cards
from deskside.cli.options import Command, option
from deskside.cli.output import print_json
from deskside.cli.shared_options import MODEL_HELP, JsonOption
from deskside.config import merge
from deskside.config.duration import HOURS
from deskside.config.model import ModelConfig
from deskside.config.vocabulary import vocabulary_layer
from deskside.data.reading.index_file import is_prepared
from deskside.facts.checkpoint_names import hub_name_hint
from deskside.plan import claim_check as claims
from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import PlanRequest, make_request, text_baselines
from deskside.utils import hub
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.parsing import read_json_object

# Sections of the help
_MACHINE, _BUDGET, _MODEL = "machine", "budget, for which the best model is found", "model, which is judged"
_TRAINING, _COST, _CLAIM = "training", "cost and rented GPUs", "claims to check"


@dataclass(kw_only=True)
class PlanOptions(PlanQuestion, JsonOption):
    """Plan before training: find the best model for a budget, or judge a given model.

    For a budget, the answer is up to three plans: safe, target and stretch, with a * at the recommended one.
    For a model, it is yes, yes-if (with what to change) or no (with what is needed). A no exits with 1.
    The configuration options of deskside train (--model.*, --batch.*, ...) are accepted too.

    Examples:
      deskside plan --gpu rtx4090 --hours 24
      deskside plan --here --hours 8 --price-kwh 0.30
      deskside plan --gpu rtx5090 --preset 710m --sequence 4096
      deskside plan --gpu rtx4090 --init Qwen/Qwen3-0.6B --tokens 1B
      deskside plan --gpu rtx4090 --params 3B --gpus 4 --optim.name adamw
      deskside plan --gpu rtx4090 --hours 1 --data.path data/corpus --own-corpus
      deskside plan --gpu rtx4090 --hours 24 --explain memory.activations
      deskside plan --gpu rtx4090 --hours 24 --data.path data/corpus --cloud task.yaml
      deskside plan --gpu rtx5090 --depth 24 --claim-step-seconds 1
    """

    gpu: str | None = option(
        "a GPU such as rtx4090; --gpu list shows the known GPUs", None, metavar="GPU", section=_MACHINE
    )
    here: bool = option("this machine", False, section=_MACHINE)
    gpus: int = option("number of GPUs of this kind in one machine", 1, metavar="N", section=_MACHINE)
    host_gib: float | None = option(
        "host memory that programs can use, in GiB; default: of this machine, or with --gpu as much as is needed",
        None,
        metavar="G",
        section=_MACHINE,
    )
    probes: str = option("directory of deskside probe's results", "probes", metavar="DIR", section=_MACHINE)
    hours: Annotated[float | None, HOURS] = option(
        "total wall-clock time, such as 24, 24h or 90m", None, metavar="H", section=_BUDGET
    )
    tokens: str | None = option("training tokens, such as 3B", None, metavar="N", section=_BUDGET)
    flops: float | None = option("training FLOPs, such as 4e19", None, metavar="F", section=_BUDGET)
    loss: float | None = option("bits per byte to reach", None, metavar="L", section=_BUDGET)
    preset: str | None = option("a preset or a .toml file", None, metavar="P", section=_MODEL)
    depth: int | None = option("a model of the depth series", None, metavar="D", section=_MODEL)
    init: str | None = option(f"the shape of {MODEL_HELP}", None, metavar="MODEL", section=_MODEL)
    params: str | None = option(
        "the nearest size of the depth series, such as 3B", None, metavar="N", section=_MODEL
    )
    precision: str | None = option(
        "recipe such as fp8; default: bf16, on a CPU fp32", None, metavar="P", section=_TRAINING
    )
    sequence: int | None = option("tokens per row", None, metavar="T", section=_TRAINING)
    unique_tokens: str | None = option(
        "tokens of the data, default: those of --data.path; training on more tokens repeats them",
        None,
        metavar="N",
        section=_TRAINING,
    )
    own_corpus: bool = option(
        "regularize for reading a small corpus many times: more weight decay, the best checkpoint kept",
        False,
        section=_TRAINING,
    )
    price_kwh: float | None = option("dollars per kWh", None, metavar="X", section=_COST)
    rent_per_hour: float | None = option(
        "dollars per hour of renting such a GPU", None, metavar="Y", section=_COST
    )
    cloud: str | None = option(
        "write a SkyPilot task that carries out the plan on a rented GPU",
        None,
        metavar="FILE",
        section=_COST,
    )
    cloud_runs: str | None = option(
        "bucket for its run, such as s3://mine; allows cheaper spot machines",
        None,
        metavar="URL",
        section=_COST,
    )
    cloud_wheel: str | None = option(
        "wheel of deskside to install there; default: from PyPI", None, metavar="WHL", section=_COST
    )
    details: bool = option("also memory, time and cost by item, and the source of each number", False)
    explain: str | None = option(
        "formula, numbers and source of one item; --explain list shows the items",
        None,
        metavar="ITEM",
    )
    claim_step_seconds: str | None = option("seconds per step", None, metavar="S", section=_CLAIM)
    claim_memory_gib: str | None = option("peak memory", None, metavar="G", section=_CLAIM)
    claim_vram_gib: str | None = option("memory of the GPU", None, metavar="G", section=_CLAIM)
    claim_watts: str | None = option("power of the GPU", None, metavar="W", section=_CLAIM)
    claim_tokens_per_second: str | None = option(
        "speed, such as 900 or 50-100", None, metavar="N", section=_CLAIM
    )
    claim_steps: str | None = option("this many steps ...", None, metavar="N", section=_CLAIM)
    claim_hours: str | None = option("... in this many hours", None, metavar="H", section=_CLAIM)


COMMAND = Command("plan", PlanOptions, configuration=True)


def run(argv: Sequence[str]) -> int:
    """Run `deskside plan` and return the exit code. Raises UsageError."""
    options, overrides = COMMAND.parse_config(argv)
    if options.gpu == "list":
        return list_cards(options.json)
    claim_names = [field.name for field in fields(claims.Claims)]
    claimed = claims.parse_claims({name: getattr(options, f"claim_{name}") for name in claim_names})
    request = _request(options, overrides, claimed)
    if options.cloud is not None and (request is None or options.explain is not None):
        raise UsageError(
            "--cloud: writes the task of a plan; leave out --explain, and give a budget or a model with claims"
        )
    if request is None:
        return _check_card_claims(options, claimed)
    plan = make_plan(request, claimed)
    if options.explain is not None:
        from deskside.plan import explain

        if options.explain == "list":
            descriptions = explain.descriptions(plan)
            if options.json:
                print_json(descriptions, indent=1)
            else:
                from deskside.utils.printer import Printer

                Printer().table(["item", "what it is"], list(descriptions.items()), "ll")
            return 0
        explanation = explain.explain(plan, options.explain)
        if options.json:
            print_json(explanation.to_json(), indent=1)
        else:
            from deskside.utils.printer import Printer

            Printer().text(explanation.text(), hanging=4)
        return 0
    rented = plan_cloud.write_task(plan, options.cloud, options.cloud_runs, options.cloud_wheel)
    if options.json:
        print_json({**plan.to_json(), **({"cloud": rented} if rented else {})}, indent=1)
    else:
        from deskside.plan import render  # imports rich, which takes time

        render.show(plan, options.details)
        if rented:
            plan_cloud.show(rented)
    # So that `deskside plan ... && deskside train ...` does not continue.
    return 1 if plan.verdict == "no" else 0


def _request(options: PlanOptions, overrides: dict[str, Any], claimed: claims.Claims) -> PlanRequest | None:
    """Return the plan request, or None if only claims about the GPU itself must be checked."""
    budget = (options.hours, options.tokens, options.flops, options.loss)
    model = (options.preset, options.depth, options.params, options.init)
    if claimed and claimed.of_card_alone and all(value is None for value in (*budget, *model)):
        return None
    data = overrides.get("data", {}).get("path")
    if data is not None:  # the overrides are not validated yet, but go into the plan's command
        data = os.path.expanduser(data)
        overrides = {**overrides, "data": {**overrides["data"], "path": data}}
    text = TYPICAL_TEXT
    if data is not None and is_prepared(data):
        from deskside.data.reading.index import read_index

        index = read_index(Path(data))
        splits = index.splits
        if options.init is None:  # else the model has its own
            preset = options.preset if options.depth is None else f"d{options.depth}"
            enough = vocabulary_layer(preset, overrides, index.tokenizer.vocab_size)
            overrides = merge.merge([overrides, enough])[0]
        options.unique_tokens = options.unique_tokens or str(splits["train"].tokens)
        text = text_baselines(splits.get("val"))
    elif data is not None and options.unique_tokens is None and "sources" not in overrides["data"]:
        say(
            f"warning: --data.path {data}: is not a prepared data set on this machine, so the plan does not know its "
            "tokens; prepare it first (deskside data prepare), or give --unique-tokens"
        )
    shape = None
    if options.init is not None:
        options.init, shape = _shape(options.init)
    return make_request(options, overrides, shape=shape, text=text)


def _shape(spec: str) -> tuple[str, ModelConfig]:
    """Return the source and the configuration of a run, a Hugging Face directory or a hub model. Reads no weights."""
    from deskside.run.directory import RunDirectory
    from deskside.weights.hf_config import from_hf_config

    found = hub.find(spec, "config")
    if not found.folder.is_dir():
        raise UsageError(f"--init {spec}: no such directory; {hub_name_hint(spec) or f'give {MODEL_HELP}'}")
    if (found.folder / "run.json").is_file():
        return found.source, RunDirectory.open(found.folder).config().model
    return found.source, from_hf_config(read_json_object(found.folder / "config.json"))


def _check_card_claims(options: PlanOptions, claimed: claims.Claims) -> int:
    """Check claims about the memory and power of a GPU, and return the exit code. No budget or model is needed."""
    from deskside.facts.gpus import find

    if options.gpu is None:
        raise UsageError("the claims are about a GPU; name it with --gpu, such as --gpu rtx5090")
    findings = claims.check_card_claims(find(options.gpu), claimed)
    if options.json:
        print_json({"claims": [asdict(finding) for finding in findings]}, indent=1)
    else:
        from deskside.plan import render

        render.show_claims(findings)
    return 0
