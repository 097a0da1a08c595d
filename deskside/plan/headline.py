"""The plan in one sentence."""

import re

from deskside.budget.shape import num_params
from deskside.plan.candidates import takes_all_hours
from deskside.plan.request import PlanRequest
from deskside.plan.result import Plan, PlannedBand
from deskside.utils.format import GIB, bits_per_byte, count, dollars, duration, gib, number

# First letters of abbreviations whose names begin with a vowel sound: an RTX, an H100, but a GTX, a T4.
VOWEL_LETTERS = "AEFHILMNORSX"


def headline(plan: Plan) -> str:
    """Return what is trained where, in which time, to which loss, and what it uses; or why nothing can be."""
    request, best = plan.request, plan.best
    if best is None:
        return f"No: {_not_possible(plan)}"
    what = f"{_indefinite(count(best.candidate.params))} model"
    tokens = f"{count(_two_digits(best.candidate.tokens[1]))} tokens"
    if takes_all_hours(request, best.candidate):
        hours = request.budget.value
        train = ("train" if request.pretrains else "fine-tune") + ("s" if hours == 1 else "")
        text = f"{_hours(hours)} {train} {what} on {tokens}"
    else:
        trains = "trains" if request.pretrains else "is fine-tuned"
        text = f"{what} {trains} on {tokens} in {duration(best.candidate.seconds[1])}"
    if request.pretrains:
        text += f" to about {bits_per_byte(best.loss[1])} bits per byte"
    text = f"{_on(request)}, {text}, using {_uses(best, request.gpus)}"
    if plan.verdict == "yes":
        return text
    return f"{'No' if plan.verdict == 'no' else _reservation(plan, best)}: {text[0].lower()}{text[1:]}"


def _reservation(plan: Plan, best: PlannedBand) -> str:
    """Return the answer of a plan that is neither a plain yes nor a no."""
    asked = plan.requested
    if asked is not None and asked.setting != best.estimate.setting:
        return "Yes, if changed as below"
    if asked is not None and asked.fits == "fits":
        return "Yes, but a smaller model is expected to end lower"
    return "Yes, with the reservations below"


def _not_possible(plan: Plan) -> str:
    request, asked = plan.request, plan.requested
    if request.given is None or asked is None:
        return f"{_on(request)[0].lower()}{_on(request)[1:]}, nothing can be trained in this budget"
    model = _indefinite(count(num_params(request.given.config.model)))
    where = _on(request)[0].lower() + _on(request)[1:]
    if asked.fits == "no":
        needed = gib(asked.memory_bytes[1])
        return f"{where}, {model} model needs {needed} as requested, but only {gib(asked.capacity)} are available"
    return f"{where}, {model} model cannot be trained in this budget"


def _on(request: PlanRequest) -> str:
    name = request.card.name
    if request.card.machine is not None:
        return f"On this machine ({name})" if request.gpus == 1 else f"On {request.gpus} of its {name}"
    return f"On {_indefinite(name)}" if request.gpus == 1 else f"On {request.gpus} x {name}"


def _uses(band: PlannedBand, gpus: int) -> str:
    needed, there = band.estimate.memory_bytes[1], band.estimate.capacity
    amount = gib(needed) if needed < GIB else f"{needed / GIB:.{0 if needed >= 10 * GIB else 1}f}"
    text, money = f"{amount} of {gib(there)}{' on each' if gpus > 1 else ''}", band.cost.electricity
    if money is None:
        return text
    cost = dollars(money.amount[1]) if money.amount[1] >= 0.01 else "less than a cent"
    return f"{text} and {cost} of electricity"


def _hours(hours: float) -> str:
    if hours < 2 and hours != 1:
        return duration(hours * 3600).replace(" min", " minutes")
    return f"{number(hours)} hour{'' if hours == 1 else 's'}"


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _indefinite(noun: str) -> str:
    """Return a number or a name with "a" or "an" before it, as it is spoken."""
    first = noun.split()[0]
    if first[0].isdigit():
        return f"{'an' if re.match(r'8|1[18](?![0-9])', first) else 'a'} {noun}"
    vowels = VOWEL_LETTERS if first.isupper() else "AEIOUaeiou"
    return f"{'an' if first[0] in vowels else 'a'} {noun}"
