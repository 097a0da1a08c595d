"""`deskside train` accepts every command that a plan prints, and runs what was planned."""

import shlex
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deskside.cli.train import COMMAND
from deskside.config import merge
from deskside.config.gpu_batch import build_on_gpus
from deskside.plan.candidates import models, setting_on_card
from deskside.plan.combinations import minimum_over_changes
from deskside.plan.fastest_fit import fastest_that_fits
from deskside.plan.planner import make_plan
from deskside.plan.question import PlanQuestion
from deskside.plan.request import make_request
from deskside.plan.result import Plan
from deskside.plan.setting import setting_from_config
from deskside.probe.point import RandomRows
from deskside.train.loop.stage_work import StageWork
from deskside.train.prepare.step_planning import first_plan
from deskside.utils.errors import UsageError
from tests.cli.test_config_options import NEEDS, another
from tests.plan.test_bands import layers_of

# The budget sets the length. Fine-tuning starts from weights, which these requests lack.
KEYS = sorted(
    ".".join(path)
    for path, _ in merge.config_fields()
    if path[0] not in ("adapter", "model") and path != ("schedule", "length")
)
FIELDS = {".".join(path): field for path, field in merge.config_fields()}
STAGES = "[{until = 0.5, sequence_length = 256}, {until = 1.0, sequence_length = 1024}]"


def options(keys: list[str]) -> dict[str, Any]:
    """Return the configuration of a command line with a value for each key, and
    the keys that it needs to have an effect.
    """
    words = []
    for key in keys:
        words += [f"--{key}", STAGES if key == "schedule.stages" else another(key, FIELDS[key])]
    needed = merge.merge([NEEDS.get(key, {}) for key in keys])[0]
    needed.get("schedule", {}).pop("length", None)
    return merge.merge([needed, COMMAND.parse_config(words)[1]])[0]


QUESTIONS = st.fixed_dictionaries(
    {"gpu": st.sampled_from(["RTX 3060 12GB", "rtx4090", "H100 SXM"]), "gpus": st.sampled_from([1, 1, 2])},
    optional={
        "sequence": st.sampled_from([512, 1024, 4096]),
        "precision": st.sampled_from(["bf16", "fp8"]),
        "unique_tokens": st.sampled_from([10**7, 10**9]),
    },
).flatmap(lambda q: st.sampled_from([q, {**q, "own_corpus": "unique_tokens" in q}]))
MODELS = st.sampled_from([{"depth": 4}, {"depth": 12}, {"preset": "124m"}, {"preset": "demo"}])
BUDGETS = st.sampled_from([{}, {"hours": 1.0}, {"hours": 24.0}, {"tokens": "300M"}, {"flops": 1e18}])
OPTIONS = st.lists(st.sampled_from(KEYS), max_size=4, unique=True)


def check_commands(question: dict[str, Any], keys: list[str]) -> None:
    try:
        request = make_request(PlanQuestion(**question), options(keys))
    except UsageError:
        return  # options that contradict each other
    try:
        plan = make_plan(request)
    except UsageError as error:
        # `--own-corpus` beside an option that excludes it
        if not (request.own_corpus and "--own-corpus: sets" in str(error)):
            assert request.given is not None, error
            with pytest.raises(UsageError):  # the run is refused, too
                build_on_gpus(request.given.layers, question["gpus"])
        return
    check_plan(question, plan, keys)


def check_plan(question: dict[str, Any], plan: Plan, keys: list[str]) -> None:
    for band in plan.bands:
        words = shlex.split(band.command)
        gpus = int(words[words.index("--gpus") + 1]) if "--gpus" in words else 1
        run = build_on_gpus(layers_of(band.command), gpus).model_dump()
        # The command names the data, which the plan leaves open. A preset's own text belongs to the preset's path.
        data, named = {"path": run["data"]["path"]}, band.config.get("data", {})
        if "path" not in named or "sources" in options(keys).get("data", {}):
            data = {**named, **data}
        planned = merge.build([band.config, {"data": data}]).model_dump()
        assert gpus == question["gpus"] and run == planned
        setting = band.candidate.setting
        from_config = setting_from_config(
            merge.build([band.config]), gpus, setting.precision, native=plan.request.card.native
        )
        # Of these, the configuration has other forms: rounded shares, "auto", graphs that a step rules out.
        same = {name: getattr(setting, name) for name in ("stages", "micro_tokens", "graphs")}
        assert replace(from_config, **same) == setting


FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@FEW
@example(
    {"gpu": "rtx4090", "gpus": 1},
    {"depth": 4},
    {"hours": 1.0},
    ["schedule.batch_growth_until", "schedule.stages"],
)
@example({"gpu": "RTX 3060 12GB", "gpus": 1}, {"depth": 4}, {}, ["data.sources"])
@example({"gpu": "RTX 3060 12GB", "gpus": 1}, {"preset": "demo"}, {}, ["data.sources"])
@given(QUESTIONS, MODELS, BUDGETS, OPTIONS)
def test_every_command_is_accepted(question: Any, model: Any, budget: Any, keys: list[str]) -> None:
    check_commands({**question, **model, **budget}, keys)


@pytest.mark.full
@settings(FEW, max_examples=500)
@given(QUESTIONS, MODELS, BUDGETS, OPTIONS)
def test_every_command_of_many_is_accepted(question: Any, model: Any, budget: Any, keys: list[str]) -> None:
    check_commands({**question, **model, **budget}, keys)


@pytest.mark.full
@pytest.mark.parametrize("key", KEYS)
def test_a_command_with_any_option_is_accepted(key: str) -> None:
    check_commands({"gpu": "rtx4090", "gpus": 1, "depth": 4, "hours": 1.0}, [key])


@pytest.mark.parametrize(
    ("question", "overrides"),
    [
        (
            {"gpu": "rtx4090", "gpus": 2, "depth": 34},
            {"optim": {"name": "adamw"}, "parallel": {"mode": "shard"}},
        ),
        ({"gpu": "RTX 3060 12GB", "depth": 22}, {"compute": {"loss_chunk_tokens": 16384}}),
        (
            {"gpu": "rtx5070", "depth": 24},
            {"compute": {"activation_checkpointing": "mlp", "mlp_chunk_tokens": 2048}},
        ),
        (
            {"gpu": "RTX 3060 12GB", "depth": 30},
            {"compute": {"activation_checkpointing": "block", "activation_offloading": True}},
        ),
    ],
)
def test_what_is_changed_back_to_a_default_is_in_the_command(
    question: dict[str, Any], overrides: dict[str, Any]
) -> None:
    question = {"gpus": 1, "tokens": "100M", **question}
    plan = make_plan(make_request(PlanQuestion(**question), overrides))
    assert plan.verdict == "yes-if"
    check_plan(question, plan, [])


@pytest.mark.parametrize("options", [{}, {"schedule": {"batch_growth": 2}}])
def test_a_plan_has_the_steps_of_its_run(options: dict[str, Any]) -> None:
    question = PlanQuestion(gpu="rtx4090", tokens="100M", preset="124m")
    plan = make_plan(make_request(question, {"batch": {"tokens": 2**19}, **options}))
    (band,) = plan.to_json()["bands"]
    config = merge.build([band["config"]])
    dataset = RandomRows(config.batch.sequence_length, config.model.vocab_size)
    stages = [
        StageWork(
            stage.until, stage.sequence_length, stage.window, config.stage_tokens(stage), cast(Any, dataset)
        )
        for stage in config.stages()
    ]
    length = config.schedule.length
    assert length is not None
    assert band["steps"] == first_plan(length, stages, 0.0, 0.0, [1.0]).revisions[0].remaining
    assert band["tokens_per_param"] == 1e8 / band["model"]["params"]


@pytest.mark.parametrize(
    ("question", "overrides", "length"),
    [
        ({"gpu": "H200 SXM", "gpus": 8, "hours": 8.0}, {"parallel": {"context": 8}}, 100_000),
        (
            {"gpu": "rtx5090", "gpus": 2, "preset": "710m"},
            {"parallel": {"context": 2}, "compute": {"gpu_budget": 4.0}},
            32_776,
        ),
        (
            {"gpu": "rtx5090", "preset": "340m", "precision": "fp8-rowwise"},
            {"precision": {"weight_cache": False}, "compute": {"gpu_budget": 2.5}},
            16_400,
        ),
    ],
)
def test_a_plan_has_only_rows_that_a_run_can_have(
    question: dict[str, Any], overrides: dict[str, Any], length: int
) -> None:
    """A quarter or half of these rows cannot be shared by the GPUs, or multiplied in FP8."""
    question = {"gpus": 1, "sequence": length, **question}
    check_plan(question, make_plan(make_request(PlanQuestion(**question), overrides)), [])


@pytest.mark.parametrize(
    ("question", "overrides"),
    [
        ({"depth": 28}, {"schedule": {"tied_until": 0.5}}),  # no states on the host
        ({"depth": 36}, {"optim": {"ema_nesterov": 0.5}}),  # no weights in 16 bits
        (  # no recomputation
            {"depth": 28, "sequence": 16384},
            {"optim": {"name": "adamw"}, "adapter": {"rank": 8, "dropout": 0.1}},
        ),
    ],
)
def test_a_plan_changes_nothing_that_other_options_exclude(
    question: dict[str, Any], overrides: dict[str, Any]
) -> None:
    question = {"gpu": "rtx4090", "gpus": 1, "tokens": "1B", **question}
    check_plan(question, make_plan(make_request(PlanQuestion(**question), overrides)), [])


def test_what_options_exclude_does_not_count_as_a_change_that_saves_memory() -> None:
    """Weights in 16 bits or states on the host would fit, and cannot be beside `schedule.tied_until`."""
    question = PlanQuestion(gpu="RTX 3060 12GB", tokens="1B", params="1.5B")
    request = make_request(question, {"schedule": {"tied_until": 0.5}})
    assert request.given is not None and make_plan(request).verdict == "no"
    start = setting_on_card(request, request.given.config)
    assert minimum_over_changes(request, start).memory_bytes[1] > request.card.memory_bytes


def test_the_search_shards_nothing_that_options_exclude() -> None:
    best = {"checkpoint": {"keep_best": True}, "evaluate": {"every": "10m"}}
    for overrides, sharded in ((best, False), ({}, True)):
        request = make_request(PlanQuestion(gpu="rtx4090", gpus=8, hours=1.0), overrides)
        model = next(model for model in models(request) if model.preset == "d36")
        assert fastest_that_fits(request, setting_on_card(request, model.config)).setting.sharded is sharded
