"""`deskside import-config`: every key is accounted for, the TOML is valid, and `sft --config` trains with it."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deskside.cli.import_config import read
from deskside.cli.import_config import run as run_import
from deskside.cli.sft import run as run_sft
from deskside.config import merge
from deskside.config.imported import sections
from deskside.utils.errors import UsageError
from tests.align.tiny import model as tiny_model

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
revision_of_model: abc
load_in_4bit: true
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: ./mine.jsonl
    type: chat_template
    field_messages: dialogue
    shards: 4
dataset_prepared_path: last_run_prepared
val_set_size: 0.1
output_dir: ./outputs/qlora-out
adapter: qlora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [q_proj, v_proj]
peft_use_dora: true
peft_use_rslora: false
wandb_project: mine
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_steps: 10
evals_per_epoch: 4
weight_decay: 0.0
special_tokens:
  pad_token: "<|end_of_text|>"
deepspeed: zero3.json
"""
UNSLOTH = """
model: unsloth/Qwen2.5-0.5B
data: {dataset: tatsu-lab/alpaca, format_type: auto}
training:
  training_type: lora
  max_seq_length: 2048
  load_in_4bit: true
  output_dir: outputs
  num_epochs: 3
  learning_rate: 0.0002
  batch_size: 2
  gradient_accumulation_steps: 4
  warmup_steps: 5
  max_steps: 0
  save_steps: 50
  weight_decay: 0.01
  random_seed: 3407
  packing: false
  train_on_completions: false
  gradient_checkpointing: "unsloth"
lora:
  {lora_r: 64, lora_alpha: 16, lora_dropout: 0.0, target_modules: "q_proj,o_proj", use_rslora: true, use_loftq: true}
logging: {enable_wandb: true, wandb_project: mine, enable_tensorboard: false}
"""

BOMB = "\n".join(f"x{n + 1}: &x{n + 1} [{', '.join([f'*x{n}'] * 10)}]" for n in range(30))


def imported(folder: Path, text: str) -> Any:
    (folder / "other.yml").write_text(text, "utf-8")
    return read(folder / "other.yml")


def test_axolotl(tmp_path: Path) -> None:
    found = imported(tmp_path, AXOLOTL)
    assert (found.command, found.model) == ("sft", "NousResearch/Llama-3.2-1B@abc")
    config = merge.build([tomllib.loads(found.toml())])
    assert config.align is not None and config.adapter is not None
    assert (
        config.align.data == ("hf:teknium/GPT4-LLM-Cleaned", "./mine.jsonl")
        and config.align.val_fraction == 0.1
    )
    adapter = config.adapter
    assert (adapter.rank, adapter.alpha, adapter.dropout, adapter.base) == (16, 32.0, 0.0, "nf4")
    assert adapter.targets == ("q_proj", "v_proj") and adapter.dora
    assert (config.batch.sequence_length, config.batch.tokens) == (2048, 2 * 4 * 2048)
    assert (config.optim.name, config.optim.lr, config.optim.states) == ("adamw", 2e-4, "8bit")
    assert config.optim.weight_decay == 0
    assert (config.schedule.name, str(config.schedule.length), str(config.schedule.warmup)) == (
        "cosine",
        "1 epoch",
        "10 steps",
    )
    assert config.compute.activation_checkpointing == "block" and config.track.wandb == "mine"
    lacking = {key.split(":")[0] for key, _ in found.missing}
    expected = {"output_dir", "evals_per_epoch", "special_tokens", "deepspeed", "lora_dropout"}
    assert lacking == {*expected, "datasets.shards", "datasets.field_messages"}


def test_unsloth(tmp_path: Path) -> None:
    found = imported(tmp_path, UNSLOTH)
    assert (found.command, found.model) == ("sft", "unsloth/Qwen2.5-0.5B")
    config = merge.build([tomllib.loads(found.toml())])
    assert config.align is not None and config.adapter is not None
    assert config.align.data == ("hf:tatsu-lab/alpaca",)
    adapter = config.adapter
    assert (adapter.rank, adapter.alpha, adapter.base) == (64, 16.0, "nf4")
    assert adapter.targets == ("q_proj", "o_proj") and adapter.rank_stabilised
    assert (config.batch.tokens, config.seed, config.optim.weight_decay) == (2 * 4 * 2048, 3407, 0.01)
    assert config.schedule.name == "wsd" and config.schedule.final_lr_fraction == 0
    assert str(config.schedule.length) == "3 epochs" and str(config.checkpoint.every) == "50 steps"
    assert config.track.wandb == "mine" and not config.track.tensorboard
    lacking = {key.split(":")[0] for key, _ in found.missing}
    assert lacking == {"training.train_on_completions", "training.output_dir", "lora.use_loftq"}


@pytest.mark.parametrize("text", [AXOLOTL, UNSLOTH])
def test_no_key_is_lost(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every key with a value that has an effect appears in the report."""
    import yaml

    (tmp_path / "other.yml").write_text(text, "utf-8")
    assert run_import([str(tmp_path / "other.yml"), "--json"]) == 0
    told = capsys.readouterr().out
    source = yaml.safe_load(text)
    flat = sections(source) if "training" in source else source
    keys = {key for key, value in flat.items() if value not in (False, None, 0)}
    # In the command, or part of another key's line.
    named = {"base_model", "revision_of_model", "model", "data.dataset", "training.training_type"}
    named |= {"logging.wandb_project"}
    assert [key for key in keys - named if key not in told] == []


def lacking(found: Any) -> set[str]:
    return {key.split(":")[0] for key, _ in found.missing}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("datasets: [{path: a/c, type: {field_instruction: q, format: '{instruction}'}}]", "datasets.type"),
        ("datasets: [{path: a/c, type: gpteacher}]", "datasets.type"),
        ("datasets: [{path: ./a.jsonl, split: 'train[:10]'}]", "datasets.split"),
        ("datasets: [{path: json, data_files: [a.jsonl], name: part}]", "datasets.name"),
        ("tokenizer_config: c/d", "tokenizer_config"),
        ("load_best_model_at_end: true", "load_best_model_at_end"),
        ("bf16: false", "bf16"),
        ("train_on_eos: last", "train_on_eos"),
        ("max_steps: .inf", "max_steps"),
        ("micro_batch_size: .nan", "micro_batch_size"),
        ("neftune_noise_alpha: 0", "neftune_noise_alpha"),
    ],
)
def test_without_counterpart(text: str, key: str, tmp_path: Path) -> None:
    found = imported(tmp_path, f"base_model: a/b\nadapter: lora\n{text}")
    assert key in lacking(found)


def test_all_files_of_a_dataset(tmp_path: Path) -> None:
    text = "base_model: a/b\ndatasets: [{path: json, data_files: [a.jsonl, b.jsonl]}]"
    assert imported(tmp_path, text).layer["align"]["data"] == ["a.jsonl", "b.jsonl"]
    assert imported(tmp_path, "base_model: a/b\ndatasets: c/d").layer["align"]["data"] == ["c/d"]


def test_what_is_off_is_in_the_report(tmp_path: Path) -> None:
    found = imported(tmp_path, "base_model: a/b\nsome_feature: false\nadam_beta1: 0.0")
    assert "some_feature" in {key for key, _ in found.same}
    assert found.layer["optim"]["betas"] == [0.0, 0.999]


def test_linear_decay_begins_after_the_warm_up(tmp_path: Path) -> None:
    found = imported(tmp_path, "base_model: a/b\nlr_scheduler: linear\nmax_steps: 60\nwarmup_steps: 15")
    assert found.layer["schedule"]["decay"] == 0.75


@pytest.mark.parametrize(
    ("rl", "command", "loss"), [("dpo", "dpo", "sigmoid"), ("simpo", "dpo", "simpo"), ("kto", "kto", None)]
)
def test_preferences(rl: str, command: str, loss: str | None, tmp_path: Path) -> None:
    found = imported(
        tmp_path, f"base_model: a/b\nrl: {rl}\ndpo_beta: 0.3\ndatasets: [{{path: a/c, split: t}}]\n"
    )
    config = merge.build([tomllib.loads(found.toml())])
    assert found.command == command and config.align is not None
    assert config.align.beta == 0.3 and config.align.data == ("hf:a/c::t",)  # type: ignore[union-attr]
    assert loss is None or config.align.loss == loss  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "not valid YAML"),
        ("learning_rate: 1", "neither"),
        ("[1, 2]", "neither"),
        ("base_model: a/b\nadapter: lora\nlora_r: -1", "adapter.rank"),
        ("base_model: a/b\nlora_target_modules: &a [*a]", "values"),
        (f"base_model: a/b\nx0: &x0 [1]\n{BOMB}", "values"),
    ],
)
def test_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as error:
        imported(tmp_path, text)
    assert "\n" not in str(error.value)


def test_sft_trains_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options override the file, and only the command that it was written for accepts it."""
    monkeypatch.chdir(tmp_path)
    model = tiny_model(tmp_path / "model")
    turns = [
        [{"role": "user", "content": f"one {n}"}, {"role": "assistant", "content": "two"}] for n in range(40)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps({"messages": t}) + "\n" for t in turns), "utf-8")
    text = AXOLOTL.replace("  - path: teknium/GPT4-LLM-Cleaned\n    type: alpaca\n", "").replace("2048", "64")
    text = (
        text.replace("wandb_project: mine\n", "")
        .replace("qlora\n", "lora\n")
        .replace("load_in_4bit: true\n", "")
    )
    (tmp_path / "other.yml").write_text(text.replace("warmup_steps: 10", "warmup_steps: 1"), "utf-8")
    assert run_import(["other.yml", "--out", "other.toml"]) == 0
    assert "deskside sft" in capsys.readouterr().out
    arguments = [str(model), "--config", "other.toml", "--compute.device", "cpu", "--optim.states", "float32"]
    assert run_sft([*arguments, "--steps", "2", "--adapter.rank", "3", "--name", "made"]) == 0
    config = json.loads((tmp_path / "runs" / "made" / "run.json").read_text("utf-8"))["config"]
    assert config["adapter"]["rank"] == 3 and config["adapter"]["alpha"] == 32 and config["adapter"]["dora"]
    assert config["optim"]["lr"] == 2e-4 and config["align"]["data"] == ["./mine.jsonl"]
    assert config["schedule"]["length"] == "2 steps" and config["schedule"]["name"] == "cosine"
    for content, message in (("[align]\ndata = 'absent.jsonl'", "absent.jsonl"), ("align = 3", "table")):
        (tmp_path / "edited.toml").write_text(content)
        with pytest.raises(UsageError, match=message):
            run_sft([str(model), "--config", "edited.toml", "--compute.device", "cpu"])
    with pytest.raises(UsageError, match="another command"):
        from deskside.cli.dpo import run as run_dpo

        run_dpo([str(model), "--config", "other.toml"])
    with pytest.raises(UsageError, match="exists already"):
        run_import(["other.yml", "--out", "other.toml"])


def test_what_was_written_and_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "q.yml").write_text("base_model: a/b\nlearning_rate: 0.1\nfoo: 1\n")
    out = tmp_path / "q.toml"
    assert run_import([str(tmp_path / "q.yml"), "--out", str(out)]) == 0
    shown, said = capsys.readouterr()
    assert str(out) in shown and "deskside sft a/b --config" in " ".join(shown.split())
    assert said.count("counterpart") == 1  # of foo
