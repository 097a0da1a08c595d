"""Runs with adapters, from a pretrained model to an export: what trains, what is saved, and bitwise resume."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deskside.config.run import RunConfig
from deskside.data.reading.loader import Batch
from deskside.export.peft import merge_into_original
from deskside.train.loop.step import StepMetrics, Stepper
from deskside.train.state.init_weights import InitialWeights
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import load_model
from deskside.weights.merge_adapters import load_adapted_run
from tests.train.tiny_run import call, checkpoints, config, curve, events, plan, resume, rows, train

TOKENS = torch.tensor([[3, 5, 17, 60, 3, 9, 11, 2, 44, 5]])
STEPS = 24
ADAPTER: dict[str, Any] = {
    "optim": {"name": "adamw", "lr": 5e-3, "weight_decay": 0.0},
    "schedule": {"length": f"{STEPS} steps"},
}


@pytest.fixture(scope="module")
def pretrained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pretrained")
    train(root, config(data, schedule={"length": "40 steps"}), "base")
    return root / "base"


def given(pretrained: Path) -> InitialWeights:
    return InitialWeights.of(load_model(pretrained), str(pretrained))


def stop_in(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Stepper.run

    def run(self: Stepper, micro_batches: list[Batch], step: int, dry: bool = False) -> StepMetrics:
        if step == last and not dry:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, micro_batches, step, dry)

    monkeypatch.setattr(Stepper, "run", run)


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param({"base": "bf16"}, marks=pytest.mark.full),
        {"base": "int8", "dropout": 0.2},
        {"base": "nf4", "targets": ["q_proj", "down_proj"]},
        {"base": "int8", "dora": True, "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
    ids=["bf16", "int8 with dropout", "nf4", "dora and tables"],
)
def test_resumed_to_the_last_bit(
    adapter: dict[str, Any], pretrained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if adapter["base"] == "nf4":
        pytest.importorskip("bitsandbytes")
    wanted = config(data, adapter={"rank": 4, **adapter}, **ADAPTER)
    first = given(pretrained)
    straight = train(tmp_path, wanted, "straight", initial=first).run.path
    with monkeypatch.context() as patch:
        stop_in(14, patch)
        stopped = train(tmp_path, wanted, "stopped", initial=first)
    assert stopped.status == "SIGTERM" and len(rows(stopped.run.path)) == 14
    assert resume(stopped.run.path).status == "finished"
    assert curve(stopped.run.path) == curve(straight)
    weights = "model/model.safetensors"
    assert (stopped.run.path / weights).read_bytes() == (straight / weights).read_bytes()
    losses = [row["loss"] for row in rows(straight)]
    assert sum(losses[-8:]) < sum(losses[:8])  # a single step of 256 tokens is too noisy


@pytest.mark.full
@pytest.mark.parametrize("base", ["nf4", pytest.param("int8", marks=pytest.mark.full)])
def test_adapters_of_experts_resume_to_the_last_bit_and_merge(
    base: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    before = train(tmp_path, config(data, model=experts, schedule={"length": "40 steps"}), "base").run.path
    first = given(before)
    adapter = {"rank": 4, "alpha": 64, "base": base}
    wanted = config(data, model=experts, adapter=adapter, **ADAPTER)
    straight = train(tmp_path, wanted, "straight", initial=first).run.path
    with monkeypatch.context() as patch:
        stop_in(14, patch)
        stopped = train(tmp_path, wanted, "stopped", initial=first).run.path
    assert resume(stopped).status == "finished"
    assert curve(stopped) == curve(straight)
    weights = "model/model.safetensors"
    assert (stopped / weights).read_bytes() == (straight / weights).read_bytes()
    trained = load_file(straight / "checkpoints" / checkpoints(straight)[-1] / "model.safetensors")
    assert sum(".experts.adapters." in name for name in trained) == 2 * 3 * 2  # layers, projections, A and B
    losses = [row["loss"] for row in rows(straight)]
    assert sum(losses[-8:]) < sum(losses[:8])
    adapted, merged = load_adapted_run(straight, pytest.fail).model, load_model(straight).model
    adapted.embed.output_dtype = torch.float32
    torch.testing.assert_close(merged(TOKENS), adapted(TOKENS), rtol=1e-4, atol=1e-4)
    # With the original's weights instead of the rounded base, like `deskside export`.
    loaded = load_model(straight)
    assert merge_into_original(loaded, pytest.fail) == str(before)
    original, rounded = dict(load_model(before).model.named_parameters()), dict(merged.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        if "experts" in name:
            assert float((parameter - original[name]).norm()) > 0.01 * float(parameter.norm())
            base_error = rounded[name] - parameter  # of the frozen format, which the original does not have
            path, _, weight = name.rpartition(".")
            frozen = adapted.get_submodule(path).dense(weight)  # type: ignore[operator]
            torch.testing.assert_close(base_error, frozen - original[name], rtol=1e-3, atol=1e-6)


def begin(root: Path, wanted: RunConfig, name: str, pretrained: Path) -> None:
    """Run in a child process: begin a run."""
    train(root, wanted, name, initial=given(pretrained))


@pytest.mark.full
def test_two_replicas_train_what_one_does(pretrained: Path, data: Path, tmp_path: Path) -> None:
    """Both make the same passes, one after the other or in parallel, so the result is bitwise equal.

    One pass of all rows would differ: BF16 rounds a gradient after the sum over its rows, and the
    first steps of adapters at this rate amplify the difference. Of six seeds, three differed by 1e-4
    to 3e-3, and all six by at most 3e-7 in float32.
    """
    passes = {"micro_tokens": 128}
    wanted = config(data, adapter={"rank": 4, "base": "int8"}, batch=passes, **ADAPTER)
    begin(tmp_path, wanted, "one", pretrained)
    child = call(begin, tmp_path, wanted, "two", pretrained, log=tmp_path / "two.log", ranks=2)
    assert child.wait() == 0, child.text()
    assert [plan(tmp_path / name)["fit"][0]["accumulation"] for name in ("one", "two")] == [2, 1]
    assert curve(tmp_path / "two") == curve(tmp_path / "one")
    weights = "model/model.safetensors"
    assert (tmp_path / "two" / weights).read_bytes() == (tmp_path / "one" / weights).read_bytes()
    assert plan(tmp_path / "two")["adapter"] == plan(tmp_path / "one")["adapter"]


def test_what_a_run_keeps_and_says(pretrained: Path, data: Path, tmp_path: Path) -> None:
    wanted = config(data, adapter={"rank": 2, "base": "int8"}, **ADAPTER)
    outcome = train(tmp_path, wanted, "run", initial=given(pretrained))
    run = outcome.run.path
    facts = plan(run)["adapter"]
    assert (facts["rank"], facts["base"], facts["fused"]) == (
        2,
        "int8",
        "the fused sublayers do not support adapters",
    )
    assert plan(run)["compile"] == "off"
    assert f"adapters of rank 2: {facts['trained_parameters']:,} parameters train" in events(run)
    newest = load_file(run / "checkpoints" / checkpoints(run)[-1] / "model.safetensors")
    assert sum(tensor.numel() for tensor in newest.values()) == facts["trained_parameters"]
    assert all(".adapter." in name for name in newest)
    states = load_file(run / "checkpoints" / checkpoints(run)[-1] / "optimizer.safetensors")
    assert sum(t.numel() for t in states.values() if t.ndim >= 2) == 2 * facts["trained_parameters"]
    # The base is unchanged, and the exported model is not.
    before, after = load_model(pretrained).model, load_model(run).model
    opened = load_adapted_run(run, pytest.fail)
    assert opened.init == str(pretrained / "model")
    apart = opened.model
    apart.embed.output_dtype = torch.float32
    torch.testing.assert_close(after(TOKENS), apart(TOKENS), rtol=1e-4, atol=1e-4)
    assert float((after(TOKENS) - before(TOKENS)).detach().abs().max()) > 0.01
    exported = load_model(run / "model").model
    torch.testing.assert_close(exported(TOKENS), after(TOKENS))
    assert outcome.summary["parameters"] == sum(p.numel() for p in before.parameters())


def test_fresh_tokens_train_beside_adapters(pretrained: Path, data: Path, tmp_path: Path) -> None:
    first = given(pretrained)
    seen = load_model(pretrained).tokenizer.encode("the river").ids[0]
    wanted = config(data, adapter={"rank": 2, "targets": ["v_proj"]}, **ADAPTER)
    run = train(tmp_path, wanted, "run", initial=replace(first, fresh=(seen,))).run.path
    newest = load_file(run / "checkpoints" / checkpoints(run)[-1] / "model.safetensors")
    assert {name for name in newest if ".adapter." not in name} == {"embed.trained.rows", "head.trained.rows"}
    before, after = load_model(pretrained).model.state_dict(), load_model(run).model.state_dict()
    for name in ("embed.weight", "head.weight"):
        moved = (before[name].bfloat16() != after[name].bfloat16()).any(dim=1).nonzero().flatten().tolist()
        assert moved == [seen]


def test_what_cannot_begin_or_go_on_is_named(
    pretrained: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(data, adapter={"rank": 2}, **ADAPTER)
    with pytest.raises(UsageError, match=r"adapter: adapters need trained weights; give them with --init"):
        train(tmp_path, wanted, "nothing")
    assert not (tmp_path / "nothing").exists()
    with monkeypatch.context() as patch:
        stop_in(5, patch)
        run = train(tmp_path, wanted, "run", initial=given(pretrained)).run.path
    base = run / "base.safetensors"
    base.write_bytes(base.read_bytes()[:-4] + b"\0\1\2\3")
    with pytest.raises(RunError, match=r"base.safetensors: is damaged"):
        resume(run)
