"""Measurements of a trial, compared with the run's own files, with arithmetic
by hand, and with a model under a recipe.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.config import merge, presets
from deskside.config.recipes import RECIPES
from deskside.config.run import RunConfig
from deskside.model.transformer import Transformer
from deskside.precision.convert import convert
from deskside.precision.fused_moe import FusedMoE
from deskside.study.execute.measure import CURVE_POINTS, Measured, measure, quantized_parameters
from deskside.study.metrics import BY_KEY
from tests.precision.small import plans_of
from tests.train import tiny_run

ELSEWHERE = {"val_bpb_equal_tokens", "total_seconds"}  # of the comparison and of the journal
GPU_ONLY = {"peak_reserved_gib", "watts", "joules_per_token", "mfu", "gpu_shared"}


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig]:
    config = tiny_run.config(data, schedule={"length": "40 steps"}, evaluate={"every": "15 steps"})
    return tiny_run.train(tmp_path_factory.mktemp("run"), config).run.path, config


def test_a_real_run_has_every_number_that_a_cpu_can_measure(run: tuple[Path, RunConfig]) -> None:
    path, config = run
    found = measure(path, config)
    assert found.metrics.keys() == BY_KEY.keys() - ELSEWHERE - GPU_ONLY
    summary, rows = json.loads((path / "summary.json").read_text()), tiny_run.rows(path)
    for key in (
        "val_bpb",
        "val_loss",
        "tokens",
        "steps",
        "tokens_per_second",
        "peak_memory_gib",
        "parameters",
    ):
        assert found.metrics[key] == summary[key]
    assert found.metrics["perplexity"] == pytest.approx(2 ** (summary["val_loss"] / math.log(2)))
    assert found.metrics["train_loss"] == pytest.approx((rows[-1]["loss"] + rows[-2]["loss"]) / 2)
    # Only training: the time of the steps, without set-up, evaluation and checkpoints, which the wall clock includes.
    assert found.metrics["seconds"] == pytest.approx(summary["tokens"] / summary["tokens_per_second"])
    assert found.metrics["seconds"] < summary["seconds"]
    assert found.metrics["micro_tokens"] == tiny_run.plan(path)["fit"][0]["micro_rows"] * 32
    assert found.emulated is False and found.machine["device"] == "cpu"
    assert [point["tokens"] for point in found.curve] == [256 * n for n in range(1, 41)]
    evaluated = {point["tokens"]: point["val_bpb"] for point in found.curve if point["val_bpb"] is not None}
    assert evaluated == {256 * n: rows[n - 1]["val_bpb"] for n in (15, 30)}  # on less text than at the end


def write(run: Path, rows: list[dict[str, Any]], summary: dict[str, Any] | None = None) -> Path:
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (run / "summary.json").write_text(json.dumps(summary))
    return run


def rows_of(
    steps: int, tokens: int = 1000, speed: float = 500.0, watts: float | None = None
) -> list[dict[str, Any]]:
    return [
        {
            "step": n,
            "tokens": n * tokens,
            "loss": 5.0,
            "val_bpb": None,
            "tokens_per_second": speed,
            "watts": watts,
            "seconds": 1e6 + n,  # the wall clock, which must not be used
        }
        for n in range(1, steps + 1)
    ]


CONFIG = merge.build(presets.layers("124m"))


def test_power_is_weighted_by_time_once_it_has_settled(tmp_path: Path) -> None:
    """A step takes 2 s, and the run 200 s, so the first 10 s are ignored."""
    rows = rows_of(100)
    for row in rows:
        row["watts"] = 50.0 if row["step"] <= 5 else 300.0
    rows[50] |= {"watts": 600.0, "tokens_per_second": 100.0}  # a step of 10 s
    rows[60]["watts"] = None
    found = measure(write(tmp_path, rows, {"tokens_per_second": 400.0, "tokens": 100_000}), CONFIG).metrics
    expected = (93 * 2 * 300 + 10 * 600) / (93 * 2 + 10)
    assert found["watts"] == pytest.approx(expected)
    assert found["joules_per_token"] == pytest.approx(expected / 400)
    assert found["seconds"] == pytest.approx(99 * 2 + 10)


def test_a_short_run_settles_in_a_fifth_of_its_time(tmp_path: Path) -> None:
    rows = rows_of(10)
    for row in rows:
        row["watts"] = 1000.0 if row["step"] <= 2 else 100.0
    assert measure(write(tmp_path, rows), CONFIG).metrics["watts"] == pytest.approx(100)


def test_speed_of_a_run_that_was_resumed_at_its_end(tmp_path: Path) -> None:
    """Its last process took no step, so it recorded no speed."""
    summary = {"tokens_per_second": None, "tokens": 10_000, "val_loss": 3.0}
    assert measure(write(tmp_path, rows_of(10), summary), CONFIG).metrics[
        "tokens_per_second"
    ] == pytest.approx(500)


def test_stages_with_other_batches_take_the_time_that_they_took(tmp_path: Path) -> None:
    rows = rows_of(4)
    for row, tokens in zip(rows, (100, 200, 400, 600), strict=True):
        row["tokens"] = tokens
        row["tokens_per_second"] = 100.0
    assert [point["seconds"] for point in measure(write(tmp_path, rows), CONFIG).curve] == [1, 2, 4, 6]


def test_a_run_without_an_end_has_only_what_it_logged(tmp_path: Path) -> None:
    found = measure(write(tmp_path, rows_of(10)), CONFIG).metrics
    assert found.keys() == {"parameters", "parameters_quantized", "tokens", "steps", "seconds"}
    assert (found["tokens"], found["steps"]) == (10_000, 10)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"metrics.jsonl": "", "summary.json": "", "plan.json": ""},
        {
            "metrics.jsonl": '{"step": 1}\n{"step": 2, "tokens": null}\n',
            "summary.json": "[]",
            "plan.json": '{"fit": 3}',
        },
        {"metrics.jsonl": "nonsense\n", "summary.json": '{"val_bpb": "low", "val_loss": 1e400, "mfu": true}'},
        {"plan.json": '{"fit": [], "precision": null}', "environment.json": "7"},
        {
            "summary.json": '{"val_bpb": null, "val_loss": NaN}',
            "plan.json": '{"fit": [{"micro_rows": "two"}]}',
        },
    ],
)
def test_damage_is_not_measured(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert measure(tmp_path, CONFIG).metrics.keys() == {"parameters", "parameters_quantized"}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2000), st.sets(st.integers(1, 2000), max_size=250), st.booleans())
def test_a_thinned_curve_keeps_what_matters(
    tmp_path_factory: pytest.TempPathFactory, steps: int, evaluated: set[int], finished: bool
) -> None:
    rows = rows_of(steps)
    for row in rows:
        if row["step"] in evaluated:
            row["val_bpb"] = 2.0
    summary = {"val_bpb": 1.0, "val_tokens": 500_000} if finished else None
    curve = measure(write(tmp_path_factory.mktemp("run"), rows, summary), CONFIG).curve
    places = [point["tokens"] for point in curve]
    assert len(curve) == min(steps, CURVE_POINTS) and places == sorted(set(places))
    if steps:
        assert places[-1] == steps * 1000
        kept = sum(point["val_bpb"] is not None for point in curve)
        there = len({n for n in evaluated if n <= steps} | ({steps} if finished else set()))
        assert kept >= min(there, CURVE_POINTS - 1)
        assert (curve[-1]["val_bpb"] == 1.0) == finished


def test_the_end_stands_on_the_curve_only_where_all_its_points_are_of_one_text(tmp_path: Path) -> None:
    rows = rows_of(10)
    rows[4]["val_bpb"] = 2.0
    # evaluations during the run take 1,000,000 tokens of it
    summary = {"val_bpb": 1.0, "val_tokens": 5_000_000}
    curve = measure(write(tmp_path, rows, summary), CONFIG).curve
    assert [point["val_bpb"] for point in curve if point["val_bpb"] is not None] == [2.0]


# Quantized parameters, compared with the layers that a recipe is applied to


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def config_with(recipe: str, **parts: dict[str, Any]) -> RunConfig:
    """Return a model whose sizes every recipe accepts."""
    shape = {
        "vocab_size": 256,
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 384,
        "max_position_embeddings": 256,
    }
    if "num_experts" in parts.get("model", {}):
        del shape["intermediate_size"]  # experts have another one
    layers: list[dict[str, Any]] = [
        {"model": shape, "batch": {"sequence_length": 256, "tokens": 1024}},
        {"precision": {"name": recipe}},
        parts,
    ]
    return merge.build(layers)


def counted(config: RunConfig) -> int:
    """Return the number of weights of the linear layers that have a quantized plan."""
    with torch.device("meta"):
        model = Transformer(config.model)
    model.to_empty(device="cpu")
    asked = config.precision
    applied = convert(model, asked.recipe(), asked, fused=True, native=False)
    total = sum(plan.linear.weight.numel() for plan in plans_of(applied) if not plan.plain)
    experts = [plan for _, plan, _ in applied._sublayers if isinstance(plan, FusedMoE)]
    weights = [linear for plan in experts for linear in (plan.gate_up, plan.down)]
    total += sum(linear.parameter.numel() for linear in weights if not linear.plain)
    return total + (model.num_params()["head"] if applied._head is not None else 0)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if RECIPES[name].quantized])
def test_quantized_parameters_are_those_of_the_recipe(recipe: str) -> None:
    config = config_with(recipe)
    assert quantized_parameters(config) == counted(config) > 0


@pytest.mark.parametrize(
    "parts",
    [
        {"precision": {"keep": ["down_proj"]}},
        {"precision": {"keep": ["q_proj"]}},
        {"precision": {"keep": ["gate_proj", "o_proj"]}},
        {"precision": {"keep": ["k_proj"]}, "model": {"fused_qkv": False}},
        {"precision": {"keep": ["up_proj"]}, "model": {"fused_gate_up": False}},
        {"precision": {"keep_first": 0.5, "keep_last": 0.0}},
        {"model": {"hidden_act": "gelu", "gated_mlp": False}},
        {"precision": {"head": "fp8"}},
        {"model": {"num_key_value_heads": 4, "norm": "layernorm"}},
        {"model": EXPERTS},
        {"model": EXPERTS, "precision": {"keep": ["up_proj"]}},
        {"model": EXPERTS, "precision": {"keep": ["down_proj", "q_proj"]}},
    ],
)
def test_what_stays_in_bf16_is_not_counted(parts: dict[str, Any]) -> None:
    config = config_with("nvfp4", **parts)
    assert quantized_parameters(config) == counted(config) > 0


def test_plain_recipes_quantise_nothing() -> None:
    assert all(quantized_parameters(config_with(name)) == 0 for name in ("bf16", "fp32", "auto"))


@pytest.mark.parametrize(
    ("precision", "emulated"),
    [
        ('{"native": false, "chosen": "nvfp4"}', True),
        ('{"native": true, "experts": {"native": false}}', True),
        ('{"native": true, "experts": {"native": true}}', False),
        ("{}", None),
    ],
)
def test_an_emulated_run_says_so(precision: str, emulated: bool | None, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(f'{{"precision": {precision}}}')
    found: Measured = measure(tmp_path, CONFIG)
    assert found.emulated is emulated
