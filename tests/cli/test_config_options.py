"""Every configuration key can be set on the command line and gets the given value."""

import json
import re
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from deskside.cli import dpo, grpo, kto, sft
from deskside.cli.config_options import takes_list
from deskside.cli.finetune import FinetuneRun
from deskside.cli.finetune_defaults import default_batch
from deskside.cli.options import Command, option
from deskside.config.align import SftConfig
from deskside.config.duration import Duration
from deskside.config.merge import LENGTH_ALIASES, build, config_fields, option_keys
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError


@dataclass
class Own:
    """The options of an invented command."""

    what: str | None = option("", None, metavar="WHAT", positional=True)
    loud: bool = option("", False)
    times: int = option("", 1)


def parse(*argv: str) -> tuple[Own, dict[str, Any]]:
    return Command("made-up", Own, configuration=True).parse_config(argv)


# Other keys that a key needs to have an effect
MOE = {"model": {"num_experts": 16}}
YARN = {"model": {"rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 2048}}}
LLAMA3 = {"model": {"rope_scaling": {**YARN["model"]["rope_scaling"], "rope_type": "llama3"}}}
LONGROPE = {
    "model": {
        "rope_scaling": {
            **YARN["model"]["rope_scaling"],
            "rope_type": "longrope",
            "short_factor": [1.0] * 32,
            "long_factor": [2.0] * 32,
        }
    }
}
FP8 = {"precision": {"name": "fp8-tensorwise"}}
NEEDS: dict[str, dict[str, Any]] = {
    "model.norm_bias": {"model": {"norm": "layernorm"}},
    "model.num_experts_per_tok": MOE,
    "model.moe_intermediate_size": MOE,
    "model.norm_topk_prob": MOE,
    "model.router_aux_loss_coef": MOE,
    "model.router_z_loss_coef": MOE,
    "model.scoring_func": MOE,
    "model.router_bias_update_rate": {"model": {"num_experts": 16, "scoring_func": "sigmoid"}},
    "model.shared_expert_intermediate_size": {"model": {"num_experts": 16, "qk_norm": False}},
    "optim.master_weights": {"optim": {"name": "adamw", "weights": "bfloat16", "offload": True}},
    "compute.mlp_chunk_tokens": {"compute": {"activation_checkpointing": "mlp"}},
    "model.sliding_window": {"model": {"window_pattern": "SL"}},
    "model.window_pattern": {"model": {"sliding_window": 512}},
    "compute.activation_offloading": {"compute": {"activation_checkpointing": "block"}},
    "optim.momentum_cooldown": {"optim": {"momentum_end": 0.8}},
    **{f"optim.ema_nesterov_{k}": {"optim": {"ema_nesterov": 0.6}} for k in ("decay", "start", "until")},
    "schedule.batch_growth_until": {"schedule": {"batch_growth": 2}},
    "schedule.batch_lr": {"schedule": {"batch_growth": 2}},
    "data.val_fraction": {"data": {"sources": ["a.txt"]}},
    "multi_token.until": {"multi_token": {"weights": [0.5]}},
    "schedule.clock": {"schedule": {"length": "3h"}},
    "precision.keep_first": FP8,
    "precision.keep_last": FP8,
    "precision.keep": FP8,
    "precision.head": FP8,
    "precision.warmup_steps": FP8,
    "precision.bf16_from": FP8,
    "precision.native": FP8,
    "precision.backend": FP8,
    **{
        f"average.{k}": {"average": {"name": "ema"}}
        for k in ("half_life", "start", "every", "blend", "offload")
    },
    **{".".join(path): {"optim": {"name": "adamw"}} for path, _ in config_fields() if path[0] == "adapter"},
    **{".".join(path): YARN for path, _ in config_fields() if path[:2] == ("model", "rope_scaling")},
    "model.rope_local_base_freq": {"model": {"window_pattern": "SL", "sliding_window": 512}},
    **dict.fromkeys(("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"), LLAMA3),
    **dict.fromkeys(("model.rope_scaling.short_factor", "model.rope_scaling.long_factor"), LONGROPE),
}
# Valid values of keys for which `another` would return an invalid one
VALUES: dict[str, str] = {
    "compute.gpu_budget": "22.5",
    "model.num_attention_heads": "6",
    "model.rope_scaling.rope_type": "llama3",
    "model.rope_scaling.factor": "4.0",
    "model.rope_scaling.short_factor": str([1.5] * 32),
    "model.rope_scaling.long_factor": str([1.5] * 32),
    "model.rope_scaling.original_max_position_embeddings": "1024",
    "model.num_key_value_heads": "4",
    "model.head_dim": "128",
    "model.window_pattern": "SL",
    "model.rope_pattern": "RN",
    "model.num_experts": "16",
    "batch.sequence_length": "1024",
    "batch.tokens": "40960",
    "batch.micro_tokens": "2048",
    "checkpoint.background": "false",
    "data.sources": '["a.txt", "b.jsonl"]',
    "data.language_temperature": "3.33",
    "data.source_temperature": "2.0",
    "data.weights": "{en = 0.5, de = 2.0}",
    "precision.keep": '["o_proj"]',
    "multi_token.weights": "[0.5, 0.25]",
    "optim.betas": "[0.7, 0.8]",
    "optim.name": "adamw",
    "optim.ns_steps": "6",
    "optim.weight_decay_schedule": "constant",
    "schedule.name": "cosine",
    "schedule.warmup": "40 steps",
    "schedule.stages": "[{until = 0.5, sequence_length = 512}, {until = 1.0, sequence_length = 1024}]",
    "guard.spike_factor": "20",
    "average.blend": "auto",
    "adapter.targets": '["q_proj", "down_proj"]',
}


def another(key: str, field: FieldInfo) -> str:
    """Return a valid value of a key, as text, that is not its default."""
    if key in VALUES:
        return VALUES[key]
    choices = [c for part in (field.annotation, *get_args(field.annotation)) for c in literal(part)]
    kinds = {field.annotation, *get_args(field.annotation)}
    if choices:
        return str(next(choice for choice in choices if choice != field.default))
    if field.annotation is bool:
        return "false" if field.default else "true"
    if Duration in kinds or any(Duration in get_args(kind) for kind in kinds):
        return "77 steps"
    if int in kinds or any(int in get_args(kind) for kind in kinds):
        return str(2 * field.default if field.default else 7)
    if float in kinds or any(float in get_args(kind) for kind in kinds):
        return repr(field.default / 2 if field.default else 0.25)
    assert str in kinds or any(str in get_args(kind) for kind in kinds), (key, field)
    return "some"


def literal(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


@pytest.fixture(scope="module")
def everything() -> dict[str, Any]:
    """Return the parsed but not validated values of a command line with every key."""
    return parse(
        *(
            word
            for path, field in config_fields()
            for word in (f"--{'.'.join(path)}", another(".".join(path), field))
        )
    )[1]


@pytest.mark.parametrize("path", [path for path, _ in config_fields()], ids=".".join)
def test_every_key_can_be_given(path: tuple[str, ...], everything: dict[str, Any]) -> None:
    key = ".".join(path)
    field = next(field for other, field in config_fields() if other == path)
    text, given = another(key, field), everything
    for part in path:
        given = given[part]
    layer: Any = given
    for part in reversed(path):
        layer = {part: layer}
    config = build([NEEDS.get(key, {}), layer])
    value: Any = config
    for part in path:
        value = getattr(value, part)
    assert value != field.default
    # The value in the JSON of the configuration is the text that was given.
    stored = config.model_dump(mode="json")
    for part in path:
        stored = stored[part]
    if isinstance(value, bool):
        assert text == str(value).lower()
    elif isinstance(value, (int, float)):
        assert float(text) == value == stored
    elif isinstance(value, (str, Duration)):
        assert text == str(value) == stored
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_hyphens_underscores_and_equals_signs() -> None:
    for argv in (
        ("--model.hidden_size", "512"),
        ("--model.hidden-size", "512"),
        ("--model.hidden_size=512",),
        ("--model.hidden-size=512",),
    ):
        assert parse(*argv)[1] == {"model": {"hidden_size": "512"}}


def test_own_options_are_separate_from_configuration_keys() -> None:
    own, given = parse("thing", "--seed", "4", "--loud", "--times", "3")
    assert own == Own(what="thing", loud=True, times=3)
    assert given == {"seed": "4"}
    assert parse() == (Own(), {})


@pytest.mark.parametrize(("alias", "text"), [("steps", "12"), ("hours", "0.5"), ("tokens", "1_000_000")])
def test_length_aliases(alias: str, text: str) -> None:
    config = build([parse(f"--schedule.{alias}", text)[1]])
    assert config.schedule.length == Duration.parse(LENGTH_ALIASES[alias].format(text))


LISTS = {
    "multi_token.weights": ([0.5, 0.25], [0.5]),
    "model.rope_scaling.short_factor": ([1.5] * 32,),
    "model.rope_scaling.long_factor": ([1.5] * 32,),
    "data.sources": (["a.txt", "b c.txt"], ["a.txt"]),
    "precision.keep": (["q_proj", "v_proj"], ["o_proj"]),
    "optim.betas": ([0.9, 0.95],),
    "adapter.targets": (["q_proj", "v_proj"], ["q_proj"], "all"),
    "adapter.modules_to_save": (["embed_tokens", "lm_head"], ["lm_head"]),
}


def test_lists_are_written_with_commas_or_in_brackets() -> None:
    """Covers every option that is a list of plain values. A single value needs no brackets."""
    list_keys = {".".join(path) for path, field in config_fields() if takes_list(field.annotation)}
    assert list_keys == set(LISTS)
    for key, values in LISTS.items():
        part = key.split(".")[0]
        for value in values:
            words = value if isinstance(value, str) else ",".join(map(str, value))
            for text in (words, words.replace(",", ", "), json.dumps(value) if words != value else value):
                fp8 = {"precision": {"name": "fp8"}} if part == "precision" else {}
                needs = LONGROPE if part == "model" else {}
                config = build([{"optim": {"name": "adamw"}, **fp8, **needs}, parse(f"--{key}", text)[1]])
                found = reduce(getattr, key.split("."), config)
                assert (found if isinstance(found, str) else list(found)) == value


def test_none_is_accepted_for_optional_keys() -> None:
    config = build([{"evaluate": {"every": "5m"}}, parse("--evaluate.every", "none")[1]])
    assert config.evaluate.every is None


def test_negative_numbers_are_values() -> None:
    with pytest.raises(UsageError, match=r"optim.lr: .*greater than 0, not '-1'"):
        build([parse("--optim.lr", "-1")[1]])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--optim.lr"], "--optim.lr: its value is missing; see deskside made-up --help"),
        (["--optim.lr", "--seed", "1"], "--optim.lr: its value is missing; see deskside made-up --help"),
        (["--times"], "--times: its value is missing; see deskside made-up --help"),
        (["--times", "x"], "--times: must be a whole number, not 'x'"),
        (["--tims", "1"], "--tims: there is no such option; did you mean --times?"),
        (["--optim.lrr", "1"], "--optim.lrr: there is no such option; did you mean --optim.lr?"),
        (["--model.hiden-size=3"], "--model.hiden-size: there is no such option; did you mean --model.hidden-size?"),
        (["--zzzzzzzzzz"], "--zzzzzzzzzz: there is no such option; see deskside made-up --help"),
        (["one", "two"], "'two': unexpected argument; options are written --key value"),
        (["--data.sources", "[a"], "data.sources: '[a' is not a TOML list or table, such as [0.9, 0.95]"),
        (["--schedule.stages", "512"],
         "schedule.stages: is a list, written in brackets like [\"a\", \"b\"], not '512'"),
        (["--optim.betas", "0.9,x"],
         "optim.betas.1: must be a number, not 'x'"),
        (["--optim.lr="], "optim.lr: must be a number, not ''"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(argv: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as error:
        build([parse(*argv)[1]])
    assert str(error.value) == message
    assert capfd.readouterr() == ("", "")


def test_none_is_for_keys_that_may_be_none_in_one_alternative(capfd: pytest.CaptureFixture[str]) -> None:
    config = build([parse("--optim.name", "adamw", "--optim.embedding_lr", "none")[1]])
    assert isinstance(config.optim, AdamWConfig) and config.optim.embedding_lr is None
    with pytest.raises(UsageError, match=r"^optim\.embedding_lr: must be a number"):
        build([parse("--optim.embedding_lr", "none")[1]])
    documented = [path for path, info in config_fields() if re.search(r"\bnone: ", info.description or "")]
    for path in documented:
        assert parse(f"--{'.'.join(path)}", "none")[1][path[0]][path[1]] is None, path


def test_align_options_exist_only_for_their_command(capsys: pytest.CaptureFixture[str]) -> None:
    """--align.KEY exists only for a command with an objective, and not for keys that the command sets itself."""
    with pytest.raises(UsageError, match=r"--align\.turns: there is no such option"):
        parse("--align.turns", "last")
    command = Command("x", Own, configuration=True, align=SftConfig)
    given = command.parse_config(["--align.turns", "last"])[1]
    assert given == {"align": {"turns": "last"}}
    with pytest.raises(UsageError, match=r"did you mean --align\.turns"):
        command.parse_config(["--align.turn", "last"])
    with pytest.raises(UsageError, match="no such option"):
        command.parse_config(["--align.data", "a"])
    config = build([{"align": {"name": "sft"}, "data": {"document_mask": True}}, given])
    assert isinstance(config.align, SftConfig) and config.align.turns == "last"


@pytest.mark.parametrize(
    "layer, message",
    [
        ({"align": {"name": "sft"}}, "data.document_mask: must be true"),
        ({"align": {"name": "sft", "turns": "some"}}, "align.turns: input should be 'all' or 'last'"),
        ({"align": {"name": "sft", "turn": "all"}}, "align.turn: there is no such option"),
        ({"align": {"turns": "all"}}, "align"),
        (
            {"align": {"name": "sft"}, "data": {"document_mask": True}, "multi_token": {"weights": [0.5]}},
            "multi_token.weights: is not supported in fine-tuning",
        ),
        (
            {"align": {"name": "sft"}, "data": {"document_mask": True}, "dropout": 0.1},
            "dropout: is not supported in fine-tuning",
        ),
        ({"parallel": {"context": 2}, "dropout": 0.1}, "dropout: is not supported with shared rows"),
        (
            {"optim": {"name": "adamw"}, "adapter": {"rank": 4}, "dropout": 0.1},
            "dropout: is for runs that train all weights",
        ),
        ({"dropout": 1e-6}, "dropout: 1e-06 is below the smallest rate"),
        ({"dropout": 0.95}, "dropout: "),
    ],
)
def test_an_objective_is_checked_in_one_line(layer: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        build([layer])
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_help_has_every_key_within_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        parse("--help", "all")
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for key in option_keys():
        assert re.search(rf"--{key.replace('_', '-')}\s", text), key
    for undocumented in ("default: None", "default: ()", "default: {}", "PydanticUndefined"):
        assert undocumented not in text
    joined = " ".join(text.split())
    muon, adamw = MuonConfig().lr, AdamWConfig().lr
    assert f"(default: {muon}; adamw: {adamw})" in joined  # defaults that differ between alternatives
    assert MuonConfig().head_lr == AdamWConfig().head_lr
    assert f"the output head (AdamW) (default: {MuonConfig().head_lr})" in joined  # the same in both
    assert "--optim.name {muon,adamw}" in joined
    assert "Newton-Schulz iterations (muon only; default: 5)" in joined


def test_help_of_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help", "schedule")
    text = capsys.readouterr().out
    assert "--schedule.name" in text and "--optim.lr" not in text and "WHAT" not in text.split("\n", 1)[1]
    with pytest.raises(UsageError, match=r"--help optm: .*optim.* all"):
        parse("--help", "optm")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--optim.learning_rate", "--optim.lr"),
        ("--learning-rate", "--optim.lr"),
        ("--lr", "--optim.lr"),
        ("--model.lr", "--optim.lr"),
        ("--weight_decay", "--optim.weight-decay"),
        ("--sequence-length", "--batch.sequence-length"),
        ("--batch-size", "--batch.tokens"),
        ("--max-steps", None),  # the fake command has no --steps
        ("--something-else", None),
    ],
)
def test_suggestions(wrong: str, right: str | None) -> None:
    with pytest.raises(UsageError, match="there is no such option") as error:
        parse(wrong, "1")
    assert str(error.value).startswith(wrong)
    found = re.search(r"did you mean (\S+)\?", str(error.value))
    assert (found and found[1]) == right


@pytest.mark.parametrize("command", [sft.SftRun, dpo.DpoRun, kto.KtoRun, grpo.GrpoRun])
def test_the_help_of_fine_tuning_states_the_commands_own_defaults(command: type[FinetuneRun]) -> None:
    keys = {".".join(path) for path, _ in config_fields()} | {"epochs"}
    texts = command.command.defaults
    assert texts.keys() <= keys
    shown = command.command.help("all").split()
    for text in texts.values():
        words = f"(default: {text})".split()
        assert any(shown[at : at + len(words)] == words for at in range(len(shown))), text
    # The numbers are those of a run.
    layer = command.defaults.layer(768, {})
    assert f"{layer['optim']['lr']:g}" in texts["optim.lr"].replace(",", " ").split()
    assert float(texts["schedule.warmup"]) == layer["schedule"]["warmup"]
    for part, values in layer.items():
        for key, value in values.items():
            default = RunConfig.model_fields[part].default
            if (part, key) not in {("optim", "betas"), ("optim", "lr")} and value != getattr(
                default, key, None
            ):
                text = f"{value:g}" if isinstance(value, float) else str(value).lower()
                assert text in re.split(r"[ ;]+", texts[f"{part}.{key}"])
    changed = command.defaults.layer(1536, {"adapter": {"rank": 4}})
    assert changed["optim"]["lr"] == pytest.approx(5 * layer["optim"]["lr"])


def test_the_row_of_a_step_in_the_help_is_that_of_a_run() -> None:
    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=8192))
    for command, step in ((sft, sft.STEP), (dpo, dpo.STEP)):
        batch = default_batch(model, {}, tokens=10**9, step=step, processes=1)
        texts = command.COMMAND.defaults
        assert f"up to {batch['tokens']}," in texts["batch.tokens"]
        assert texts["batch.sequence_length"].startswith(f"{batch['sequence_length']},")
