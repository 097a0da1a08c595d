"""`deskside plan`: what can be trained in a budget on a card, or whether a given model can."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import tyro

from deskside.cli.parser import parse
from deskside.config.duration import HOURS
from deskside.plan import claims
from deskside.plan.planner import make_plan
from deskside.plan.request import Request, ask
from deskside.utils import strict_json
from deskside.utils.errors import UsageError

CONFIGURATION = re.compile(r"--(\w[\w-]*)\.")


@dataclass
class PlanOptions:
    """Plan before training: the best model for a budget, or the verdict on a model.

    What it answers:
      with a budget   three bands: safe, target, stretch
      with a model    yes, yes-if (what to change) or no (what is needed)
      --model.*, --batch.*, ...   options of deskside train are taken as well

    Examples:
      deskside plan --gpu rtx4090 --hours 24
      deskside plan --here --hours 8 --price-kwh 0.30
      deskside plan --gpu rtx5090 --preset 774m --sequence 4096
      deskside plan --gpu rtx4090 --params 3B --gpus 4 --optim.name adamw
      deskside plan --gpu rtx4090 --hours 24 --explain memory.activations
      deskside plan --gpu rtx5090 --depth 24 --claim-step-seconds 1
    """

    gpu: Annotated[
        str | None, tyro.conf.arg(metavar="NAME", help="a card of the table, such as rtx4090; list: all")
    ] = None
    here: Annotated[bool, tyro.conf.arg(help="this machine")] = False
    hours: Annotated[
        float | None,
        tyro.conf.arg(metavar="H", help="budget: hours in all, everything included, or 90m"),
        HOURS,
    ] = None
    tokens: Annotated[
        str | None, tyro.conf.arg(metavar="N", help="budget: tokens to train on, such as 3B")
    ] = None
    flops: Annotated[
        float | None, tyro.conf.arg(metavar="F", help="budget: training FLOPs, such as 4e19")
    ] = None
    loss: Annotated[float | None, tyro.conf.arg(metavar="L", help="budget: bits per byte to reach")] = None
    preset: Annotated[str | None, tyro.conf.arg(metavar="P", help="the model: a preset or a .toml file")] = (
        None
    )
    depth: Annotated[int | None, tyro.conf.arg(metavar="D", help="the model: from the depth dial")] = None
    params: Annotated[
        str | None, tyro.conf.arg(metavar="N", help="the model: nearest size of the depth dial, such as 3B")
    ] = None
    gpus: Annotated[int, tyro.conf.arg(metavar="N", help="cards of this kind in one machine")] = 1
    precision: Annotated[
        str | None,
        tyro.conf.arg(metavar="P", help="a recipe such as fp8; left out: bf16, on a CPU fp32"),
    ] = None
    sequence: Annotated[int | None, tyro.conf.arg(metavar="T", help="tokens per row")] = None
    unique_tokens: Annotated[
        str | None, tyro.conf.arg(metavar="N", help="tokens of the data; more than these are repeats")
    ] = None
    price_kwh: Annotated[float | None, tyro.conf.arg(metavar="X", help="dollars per kWh")] = None
    rent_per_hour: Annotated[
        float | None, tyro.conf.arg(metavar="Y", help="dollars per hour of renting such a card")
    ] = None
    probes: Annotated[str, tyro.conf.arg(metavar="DIR", help="what deskside probe measured")] = "probes"
    explain: Annotated[
        str | None, tyro.conf.arg(metavar="ITEM", help="formula, numbers and source of one item; list: which")
    ] = None
    claim_step_seconds: Annotated[str | None, tyro.conf.arg(metavar="S", help="check: seconds per step")] = (
        None
    )
    claim_memory_gib: Annotated[str | None, tyro.conf.arg(metavar="G", help="check: peak memory")] = None
    claim_vram_gib: Annotated[str | None, tyro.conf.arg(metavar="G", help="check: memory of the card")] = None
    claim_watts: Annotated[str | None, tyro.conf.arg(metavar="W", help="check: power of the card")] = None
    claim_tokens_per_second: Annotated[
        str | None, tyro.conf.arg(metavar="N", help="check: speed; 50-100 is a range")
    ] = None
    claim_steps: Annotated[str | None, tyro.conf.arg(metavar="N", help="check: so many steps ...")] = None
    claim_hours: Annotated[str | None, tyro.conf.arg(metavar="H", help="... in so many hours")] = None
    json: Annotated[bool, tyro.conf.arg(help="JSON on standard output")] = False


def run(argv: Sequence[str]) -> int:
    """The command. Returns the exit code; raises UsageError."""
    own, dotted = _split(argv)
    options = parse(PlanOptions, own, "deskside plan")
    if options.gpu == "list":
        return _list_cards(options.json)
    claimed = claims.parse({f.name: getattr(options, f"claim_{f.name}") for f in fields(claims.Claims)})
    request = _request(options, _configuration(dotted), claimed)
    if request is None:
        return _card_alone(options, claimed)
    plan = make_plan(request, claimed)
    if options.explain is not None:
        from deskside.plan import explain

        if options.explain == "list":
            described = explain.descriptions(plan)
            width = max(len(name) for name in described)
            listed = [f"{name:{width}}  {what}" for name, what in described.items()]
            print(strict_json.dumps(described, indent=1) if options.json else "\n".join(listed))
            return 0
        found = explain.explain(plan, options.explain)
        print(strict_json.dumps(found.to_json(), indent=1) if options.json else found.text())
        return 0
    if options.json:
        print(strict_json.dumps(plan.to_json(), indent=1))
    else:
        from deskside.plan import render  # a program that reads JSON need not wait for rich

        render.show(plan)
    return 0


def _list_cards(as_json: bool) -> int:
    """Print every card of the table: the name for --gpu, its memory, and what calibrates its speed."""
    from deskside.facts.gpus import gpus
    from deskside.plan.published import unknown

    rows = [
        {
            "name": gpu.name,
            "memory_gib": round(gpu.memory_bytes / 2**30, 1),
            "bf16_tflops": gpu.bf16_flops / 1e12,
            "bandwidth_gb_s": gpu.bandwidth / 1e9,
            "calibrated": not unknown(gpu),
        }
        for gpu in gpus()
    ]
    if as_json:
        print(strict_json.dumps(rows, indent=1))
        return 0
    print(f"{'--gpu':36}{'GiB':>6}{'BF16 TFLOP/s':>14}{'GB/s':>7}")
    for row in rows:
        mark = "" if row["calibrated"] else "  nothing calibrates its architecture"
        print(
            f"{row['name']:36}{row['memory_gib']:>6g}{row['bf16_tflops']:>14.0f}{row['bandwidth_gb_s']:>7.0f}{mark}"
        )
    return 0


def _request(options: PlanOptions, overrides: dict[str, Any], claimed: claims.Claims) -> Request | None:
    """What is asked; None when only claims about the card itself are to be checked."""
    budget = (options.hours, options.tokens, options.flops, options.loss)
    model = (options.preset, options.depth, options.params)
    if claimed and claimed.of_card_alone and all(value is None for value in (*budget, *model)):
        return None
    return ask(
        gpu=options.gpu,
        here=options.here,
        hours=options.hours,
        tokens=options.tokens,
        flops=options.flops,
        loss=options.loss,
        preset=options.preset,
        depth=options.depth,
        params=options.params,
        gpus_count=options.gpus,
        precision=options.precision,
        sequence=options.sequence,
        price_kwh=options.price_kwh,
        rent_per_hour=options.rent_per_hour,
        unique_tokens=options.unique_tokens,
        probes=options.probes,
        overrides=overrides,
    )


def _card_alone(options: PlanOptions, claimed: claims.Claims) -> int:
    """Claims about memory and power of a card need neither budget nor model."""
    from deskside.facts.gpus import find

    if options.gpu is None:
        raise UsageError("which card are the claims about? give --gpu, such as --gpu rtx5090")
    found = claims.of_card(find(options.gpu), claimed)
    if options.json:
        print(strict_json.dumps({"claims": [finding.to_json() for finding in found]}, indent=1))
    else:
        from deskside.plan import render

        render.show_claims(found)
    return 0


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the command's own arguments, those of the configuration). Only when there are any of the latter is the whole
    configuration made into options, which takes as long as the plan itself."""
    own: list[str] = []
    dotted: list[str] = []
    target = own
    for index, word in enumerate(argv):
        if word.startswith("--"):
            target = dotted if CONFIGURATION.match(word) else own
        elif index and target is dotted and not argv[index - 1].startswith("--"):
            target = own
        target.append(word)
    return own, dotted


def _configuration(dotted: list[str]) -> dict[str, Any]:
    if not dotted:
        return {}
    from deskside.cli import overrides

    return overrides.parse(_None, dotted, "deskside plan", "")[1]


@dataclass
class _None:
    """No options of its own."""
