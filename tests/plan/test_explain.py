"""Every explanation is arithmetic whose result is the number that the plan shows."""

import re
from functools import cache
from typing import Any

import pytest

from deskside.plan.explain import descriptions, explain
from deskside.plan.planner import make_plan
from deskside.plan.request import PlanRequest
from deskside.plan.result import Plan
from deskside.utils.errors import UsageError
from tests.plan import made
from tests.plan.made import ask

MOE = {
    "model": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "vocab_size": 50304},
    "batch": {"tokens": 2**18},
}
WINDOW = {"model": {"sliding_window": 512, "window_pattern": "SSSL"}, "batch": {"tokens": 2**18}}


def requests() -> dict[str, PlanRequest]:
    """Return requests whose plans together take every branch of the memory and speed models."""
    sharded = {
        "parallel": {"mode": "shard"},
        "compute": {"activation_checkpointing": "block", "loss_chunk_tokens": 2048},
    }
    small_passes = {"batch": {"micro_tokens": 2048, "sequence_length": 512, "tokens": 32768}}
    found: dict[str, PlanRequest] = {
        "replayed": ask(gpu="h200", preset="124m", tokens="1B", overrides=small_passes),
        "open": made.request(value=24.0, price_kwh=0.3),
        "open, four GPUs": made.request(value=24.0, gpus=4),
        "repeated": made.request(value=24.0, unique_tokens=10**8),
        "flops": made.request("flops", 1e19),
        "tokens": made.request("tokens", 1e9),
        "loss": made.request("loss", 0.95),
        "one pass": made.request(
            "tokens",
            1e9,
            memory_gib=80.0,
            given=made.given("d12", batch={"tokens": 16384}),
        ),
        "sharded": made.request("tokens", 1e9, gpus=4, given=made.given("d38")),
        "sharded, recomputed": made.request(
            "tokens",
            1e9,
            memory_gib=16.0,
            gpus=4,
            given=made.given("d26", **sharded),
            overrides=sharded,
        ),
        "tied": made.request("tokens", 1e9, given=made.given("gpt2")),
        "whole": made.request(None, given=made.given("124m")),
        "does not fit": made.request("tokens", 1e9, memory_gib=8.0, given=made.given("d30")),
        "cpu precision": made.request("tokens", 1e9, given=made.given("d12"), precision="fp32"),
        "fp8": made.request("tokens", 1e9, given=made.given("d12"), precision="fp8"),
        "fp8 head": made.request(
            "tokens",
            1e9,
            given=made.given("d12", precision={"name": "fp8", "head": "fp8", "keep_last": 0.25}),
            precision="fp8",
        ),
        "fp8, projections kept": made.request(
            "tokens",
            1e9,
            given=made.given("d12", precision={"name": "fp8", "keep": ["o_proj"], "keep_last": 0.25}),
            precision="fp8",
        ),
        "fp8, recomputed": made.request(
            "tokens", 1e9, memory_gib=10.0, given=made.given("d16"), precision="fp8-rowwise"
        ),
        "nvfp4": made.request("tokens", 1e9, given=made.given("d12"), precision="nvfp4-eden"),
        "nvfp4, recomputed": made.request(
            "tokens", 1e9, memory_gib=10.0, given=made.given("d16"), precision="fp8-nvfp4"
        ),
        "eager": made.request("tokens", 1e9, given=made.given("d12", compute={"compile": "off"})),
        "small batch": made.request("tokens", 1e9, given=made.given("d24", batch={"tokens": 2048})),
    }
    for name, layer in (("moe", MOE), ("window", WINDOW)):
        found[name] = made.request("tokens", 1e9, given=made.given("124m", **layer))
    for rung in ("attention", "mlp", "block"):
        for optimizer in ("muon", "adamw"):
            layer = {
                "compute": {"activation_checkpointing": rung},
                "optim": {"name": optimizer},
                "batch": {"tokens": 2**17},
            }
            found[f"{rung} {optimizer}"] = made.request("tokens", 1e9, given=made.given("d16", **layer))
    for states, offload in (("bfloat16", False), ("8bit", False), ("8bit", True), ("float32", True)):
        for optimizer in ("muon", "adamw"):
            layer = {"optim": {"name": optimizer, "states": states, "offload": offload}}
            found[f"{states} {offload} {optimizer}"] = made.request(
                "tokens", 1e9, given=made.given("d12", **layer), overrides=layer
            )
    low_memory: tuple[tuple[str, dict[str, Any]], ...] = (
        ("bf16", {"optim": {"name": "muon", "weights": "bfloat16"}}),
        ("bf16", {"optim": {"name": "adamw", "weights": "24bit", "states": "8bit"}}),
        ("bf16", {"optim": {"name": "adamw", "weights": "bfloat16"}, "model": MOE["model"]}),
        (
            "fp8",
            {
                "optim": {"name": "adamw", "weights": "bfloat16"},
                "precision": {"name": "fp8", "keep_last": 0.25},
            },
        ),
        ("bf16", {"compute": {"activation_checkpointing": "block", "activation_offloading": True}}),
        (
            "bf16",
            {
                "optim": {"name": "muon", "gradients": "host", "offload": True},
                "batch": {"sequence_length": 512, "micro_tokens": 512, "tokens": 4096},
                "compute": {"activation_checkpointing": "block", "loss_chunk_tokens": 512},
            },
        ),
        ("fp8", {"model": MOE["model"], "precision": {"name": "fp8"}}),
    )
    for number, (precision, layer) in enumerate(low_memory):
        found[f"low memory {number}"] = made.request(
            "tokens", 1e9, given=made.given("d12", **layer), overrides=layer, precision=precision
        )
    for base, rung in (("bf16", "none"), ("int8", "mlp"), ("nf4", "block")):
        layer = {
            "optim": {"name": "adamw"},
            "adapter": {"rank": 16, "base": base},
            "compute": {"activation_checkpointing": rung},
        }
        found[f"adapters {base}"] = made.request(
            "tokens", 1e8, gpus=2, given=made.given("d16", **layer), overrides=layer
        )
    # With few tokens, the peak is after the backward.
    for mode in ("auto", "shard"):
        for passes in (1, 2):
            layer = {
                "optim": {"name": "adamw"},
                "parallel": {"mode": mode},
                "batch": {"sequence_length": 128, "tokens": passes * 512, "micro_tokens": 128},
                "compute": {"loss_chunk_tokens": 128, "activation_checkpointing": "block"},
            }
            model = made.given("d16", **layer)
            found[f"{mode}, {passes}"] = made.request("tokens", 1e6, gpus=4, given=model, overrides=layer)
    # Passes so small that the device waits for the host.
    layer = {
        "compute": {"activation_checkpointing": "attention", "compile": "block"},
        "batch": {"sequence_length": 512, "tokens": 2**16, "micro_tokens": 2048},
    }
    found["host"] = made.request("tokens", 1e9, given=made.given("d12", **layer))
    return found


REQUESTS = requests()


@cache
def planned(name: str) -> Plan:
    """Return the plan. It is not made when tests are collected, which all of pytest-xdist's processes do."""
    return make_plan(REQUESTS[name])


def plans() -> list[Plan]:
    return [planned(name) for name in REQUESTS]


def computed(filled: str) -> float:
    """Return the result of the arithmetic with its numbers filled in."""
    text = filled.replace(",", "").replace(" x ", " * ").replace("^", "**")
    assert re.fullmatch(r"[\d.e+\-*/() ]+", text), filled
    return float(eval(text, {"__builtins__": {}}))


@pytest.mark.parametrize("name", REQUESTS)
def test_every_line_comes_to_its_value(name: str) -> None:
    plan = planned(name)
    for item in descriptions(plan):
        for line in explain(plan, item).lines:
            assert computed(line.filled) == pytest.approx(line.value, rel=2e-4, abs=1e-9), (item, line.what)
            if item == "memory.gradients":
                assert not re.search(r"\d,\d{3},\d{3}", line.formula), (
                    f"number without a name: {line.formula}"
                )


@pytest.mark.parametrize("name", REQUESTS)
def test_the_last_line_is_what_the_plan_shows(name: str) -> None:
    plan = planned(name)
    shown = plan.shown
    assert shown is not None
    wanted: dict[str, Any] = {f"memory.{key}": value for key, value in shown.memory.items.items()}
    wanted |= {f"speed.{key}": value for key, value in shown.step.items()}
    wanted["speed.flops_per_token"] = shown.setting.flops_per_token
    for item, value in wanted.items():
        assert explain(plan, item).lines[-1].value == pytest.approx(value, rel=1e-9), item
    by_what = {line.what: line.value for line in explain(plan, "memory.needed").lines}
    assert (by_what["low"], by_what["needed"], by_what["high"]) == shown.memory_bytes
    rates = {line.what: line.value for line in explain(plan, "speed.tokens_per_second").lines}
    assert (rates["low"], rates["tokens/s"], rates["high"]) == shown.tokens_per_second
    best = plan.best
    if best is not None:
        assert explain(plan, "tokens").lines[-1].value == best.candidate.tokens[1]
        if plan.request.pretrains:
            assert {line.value for line in explain(plan, "loss").lines} >= set(best.loss)


def test_all_instants_and_parts_were_explained() -> None:
    """The plans above only test the explanations if they cover every phase of the memory model."""
    instants = {plan.shown.memory.instant for plan in plans() if plan.shown is not None}
    assert instants >= {"loss", "gradients", "update"} or instants >= {"loss", "backward"}
    both = {
        (plan.shown.setting.sharded, plan.shown.memory.instant)
        for plan in plans()
        if plan.shown is not None and plan.shown.setting.gpus > 1
    }
    assert both >= {(True, "loss"), (True, "backward"), (True, "gradients"), (False, "backward")}
    steps = [plan.shown.step for plan in plans() if plan.shown is not None]
    for item in steps[0]:
        assert any(step[item] > 0 for step in steps), item


def test_money_is_explained_with_the_source_of_its_price() -> None:
    plan = planned("open")
    assert plan.best is not None and plan.best.cost.electricity is not None
    found = explain(plan, "cost.electricity")
    assert found.lines[-1].value == pytest.approx(plan.best.cost.electricity.amount[1])
    assert "given" in found.source
    assert "published" in explain(plan, "cost.rent").source


def test_text_and_json_say_the_same() -> None:
    found = explain(planned("open"), "activations")
    assert found.item == "memory.activations"
    text, data = found.text(), found.to_json()
    for line in data["lines"]:
        assert line["formula"] in text and line["filled"] in text
    assert data["source"] in text and "modelled" in data["source"]


def test_an_unknown_item_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"memory\.weights") as error:
        explain(planned("open"), "colour")
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError):
        explain(planned("open"), "loss.speed")


def test_of_a_real_card(tmp_path: Any) -> None:
    plan = make_plan(ask(gpu="rtx3090", hours=24, probes=str(tmp_path)))
    for item in descriptions(plan):
        assert explain(plan, item).source
