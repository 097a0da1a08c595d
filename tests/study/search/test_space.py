"""The search space, the proxy and the division of the hours."""

import pytest

from deskside.budget.shape import num_params
from deskside.config import merge, presets
from deskside.study.search import space
from deskside.study.search.proxy import choose_proxy, resized
from deskside.study.search.search_budget import divide
from deskside.utils.errors import UsageError

CONFIG = merge.build(presets.layers("124m"))


def test_ranges_follow_from_the_default_and_contain_it() -> None:
    found = {one.key: one for one in space.dimensions(None, CONFIG)}
    assert tuple(found) == space.DEFAULT_KEYS
    assert (found["optim.lr"].low, found["optim.lr"].high) == (0.005, 0.32)
    assert (found["batch.tokens"].low, found["batch.tokens"].high) == (-3, 3)
    assert (found[space.DEPTH].low, found[space.DEPTH].high) == (6, 24)
    for one in found.values():  # the default's parameters give the default configuration
        assert merge.build([*presets.layers("124m"), one.layer(one.default_parameter, CONFIG)]) == CONFIG


@pytest.mark.parametrize("key", ["optim.lr", "optim.momentum", "schedule.decay"])
def test_a_default_of_many_digits_is_not_rounded(key: str) -> None:
    part, name = key.split(".")
    layers = [*presets.layers("124m"), {part: {name: 0.8765432}}]
    config = merge.build(layers)
    (one,) = space.dimensions(key, config)
    assert merge.build([*layers, one.layer(one.default_parameter, config)]) == config
    assert one.layer(0.1234567, config)[part][name] in (0.1235, 0.8765)


def test_a_key_without_effect_is_not_searched() -> None:
    """Covers the rate of an embedding that is also the head. gpt2's positions are an embedding too."""
    tied = merge.build([*presets.layers("124m"), {"model": {"tie_word_embeddings": True}}])
    keys = {one.key for one in space.dimensions(None, tied)}
    assert set(space.DEFAULT_KEYS) - keys == {"optim.embedding_lr"}
    gpt2 = merge.build(presets.layers("gpt2"))
    assert "optim.embedding_lr" in {one.key for one in space.dimensions(None, gpt2)}


def test_types_decide_what_can_be_searched() -> None:
    known = space.searchable(CONFIG)
    assert {
        "optim.nesterov",
        "optim.normalize",
        "optim.ns_steps",
        "schedule.decay_shape",
        "optim.momentum",
    } <= known.keys()
    assert not known.keys() & {
        "optim.name",
        "optim.scale",
        "model.vocab_size",
        "optim.betas",
        "seed",
        "schedule.length",
    }
    (choice,) = space.dimensions("optim.normalize", CONFIG)
    assert choice.choices == ("none", "neuron")
    (switch,) = space.dimensions("optim.nesterov", CONFIG)
    assert switch.choices == (False, True)
    (given,) = space.dimensions("optim.lr=0.01:0.2", CONFIG)
    assert (given.kind, given.low, given.high) == ("log", 0.01, 0.2)
    (momentum,) = space.dimensions("optim.momentum", CONFIG)
    assert momentum.layer(0.1, CONFIG) == {"optim": {"momentum": 0.9}}


@pytest.mark.parametrize(
    "over",
    ["optim.rate", "seed", "optim.lr,optim.lr", "optim.lr=1", "optim.lr=2:1", "optim.lr=0.1:0.2", "optim.grad_clip",
     "optim.nesterov=0:1", "model.depth,model.num_hidden_layers", "batch.tokens=3000:100000", "",
     "batch.tokens=0:1048576", "batch.tokens=16:524288", "optim.momentum=0.5:1", "optim.momentum=0.5:2",
     "model.depth=0:24", "model.depth=0.5:24", "model.num_hidden_layers=0:24", "model.num_hidden_layers=1.5:24",
     "schedule.decay=0:5", "schedule.warmup=0:1", "schedule.batch_growth=1:100"],
)  # fmt: skip
def test_what_cannot_be_searched_is_refused(over: str) -> None:
    with pytest.raises(UsageError) as error:
        space.dimensions(over, CONFIG)
    assert "\n" not in str(error.value) and str(error.value).startswith("--over")


@pytest.mark.parametrize("preset", ["124m", "demo", "small", "indicmoe-60m"])
@pytest.mark.parametrize("layers", [2, 3, 5, 7, 24])
def test_a_resized_model_is_valid_and_keeps_its_proportions(preset: str, layers: int) -> None:
    base = merge.build(presets.layers(preset))
    model = merge.build([*presets.layers(preset), {"model": resized(base.model, layers)}]).model
    assert model.num_hidden_layers == layers and model.head_dim == base.model.head_dim
    assert model.num_attention_heads % model.num_key_value_heads == 0
    aspect = base.model.hidden_size / base.model.num_hidden_layers
    assert model.hidden_size / layers == pytest.approx(aspect, rel=0.5)


def test_a_short_trial_trains_a_model_with_as_many_tokens_per_weight() -> None:
    proxy = choose_proxy(CONFIG, 3600, 900)
    small = merge.build([*presets.layers("124m"), proxy.layer])
    share = num_params(small.model) / num_params(CONFIG.model)
    assert share == pytest.approx(0.5, abs=0.1)  # sqrt of a quarter of the time
    # CompleteP: the product of multiplier and layers equals the target's.
    assert small.model.residual_multiplier * small.model.num_hidden_layers == pytest.approx(12)
    assert small.batch.tokens <= CONFIG.batch.tokens
    (depth,) = space.dimensions("model.depth", small)
    assert depth.layer(small.model.num_hidden_layers * 2, CONFIG)["model"]["num_hidden_layers"] == 24
    assert choose_proxy(CONFIG, 900, 900).layer == choose_proxy(CONFIG, 3600, 900, shrink=False).layer == {}


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("target", [None, 300.0, 3600.0, 36000.0])
@pytest.mark.parametrize("hours", [1.0, 10.0])
def test_the_division_keeps_the_hours(hours: float, target: float | None, devices: int) -> None:
    found = divide(3600 * hours, devices, 30.0, 3, target)
    assert found.trial_seconds <= found.target_seconds
    used = found.whole_trials * (found.trial_seconds + 30) / devices + found.confirm_seconds
    assert used == pytest.approx(3600 * hours) and found.whole_trials >= 23.9
    if target is not None and 6 * (target + 30) / devices > 0.5 * 3600 * hours:
        assert not found.confirm_at_target or target == found.trial_seconds


def test_too_few_hours_are_refused() -> None:
    for more in ({}, {"trial": 60.0}):
        with pytest.raises(UsageError, match="--hours"):
            divide(120.0, 1, 30.0, 3, **more)
