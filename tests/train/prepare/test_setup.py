"""Decisions about a run's precision before it begins: which products are native, and what the run records."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from deskside.config import merge
from deskside.config.run import RunConfig
from deskside.model.transformer import Transformer
from deskside.ops.linear import HeadLoss
from deskside.precision.hardware_caps import HardwareCaps
from deskside.precision.head import QuantizedHead
from deskside.precision.selfcheck import CheckResult
from deskside.train.parallel import World, destroy_distributed, init_distributed
from deskside.train.preflight import check_start
from deskside.train.prepare import setup
from deskside.utils.errors import UsageError
from tests.train import tiny_run
from tests.train.tiny_run import write_text

CARD = torch.device("cuda")
SMALL = {
    "vocab_size": 128, "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip


def config(name: str, **parts: Any) -> RunConfig:
    precision = {"name": name, **parts.pop("precision", {})}
    batch = {"sequence_length": 64, "tokens": 256, **parts.pop("batch", {})}
    model = {**SMALL, **parts.pop("model", {})}
    if "num_experts" in model:
        del model["intermediate_size"]  # experts have another one
    return merge.build([{"model": model, "precision": precision, "batch": batch, **parts}])


class Card:
    """A GPU that this machine lacks. `layers` and `head`: results of their self-checks. `caps`: its formats."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, layers: CheckResult, head: CheckResult, has: HardwareCaps
    ):
        self.asked: list[bool | None] = []
        self.found: list[HardwareCaps] = []
        self.said: list[str] = []

        def caps(device: torch.device, mxfp8: bool | None = None) -> HardwareCaps:
            self.asked.append(mxfp8)
            return has

        def check(recipe: str, device: Any, way: Any, backend: str, found: HardwareCaps) -> CheckResult:
            self.found.append(found)
            return layers

        monkeypatch.setattr(setup, "hardware_caps", caps)
        monkeypatch.setattr(setup, "check", check)
        monkeypatch.setattr(setup, "check_head", lambda device, way: head)
        monkeypatch.setattr(setup, "grouped_backend", lambda device, dtype, shape, rows: "triton")


NATIVE, EMULATED = CheckResult(True, {}, "", native=True), CheckResult(True, {}, "", native=False)


def head_of(model: Transformer) -> QuantizedHead:
    (loss,) = (module for module in model.modules() if isinstance(module, HeadLoss))
    assert isinstance(loss.forward_override, QuantizedHead)
    return loss.forward_override


@pytest.mark.parametrize("native", [True, False])
def test_a_head_runs_as_its_own_check_says(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses an NVFP4 recipe, which a GPU like the H200 emulates although its FP8 is native."""
    card = Card(monkeypatch, EMULATED, NATIVE if native else EMULATED, HardwareCaps())
    asked = config("nvfp4", precision={"head": "fp8", "keep_first": 0.0, "keep_last": 0.0})
    recipe, facts = setup.choose_recipe(asked, CARD, card.said.append)
    assert (facts["native"], facts["head"]["native"]) == (False, native)
    told = "run in FP8 on tensor cores" if native else "head's FP8 is emulated"
    assert told in card.said[-1]
    world = World(torch.device("cpu"))
    model = setup.build_model(asked, world, recipe)
    applied = setup.prepare_execution(asked, model, world, recipe, facts).precision
    assert (applied.shared.native, head_of(model).native) == (False, native)


def test_a_head_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = CheckResult(False, {}, "weight gradient is all zero")
    card = Card(monkeypatch, NATIVE, wrong, HardwareCaps())
    with pytest.raises(
        UsageError, match=r"^precision\.head: fp8 fails .*weight gradient is all zero; use bf16$"
    ):
        setup.choose_recipe(config("fp8", precision={"head": "fp8"}), CARD, card.said.append)


def test_a_head_in_bf16_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, NATIVE, CheckResult(False, {}, "not to be asked"), HardwareCaps())
    _, facts = setup.choose_recipe(config("fp8"), CARD, card.said.append)
    assert "head" not in facts and not card.said


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("native", [True, False])
def test_experts_run_as_their_own_check_says(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, NATIVE, NATIVE, HardwareCaps(grouped_fp8=True))
    ways: list[Any] = []

    def experts(recipe: str, device: Any, way: Any, caps: HardwareCaps) -> CheckResult:
        ways.append((recipe, way, caps.grouped_fp8))
        return NATIVE if native else EMULATED

    monkeypatch.setattr(setup, "check_experts", experts)
    asked = config("fp8", model=EXPERTS)
    recipe, facts = setup.choose_recipe(asked, CARD, card.said.append)
    assert ways == [("fp8-delayed", None, True)] and recipe == "fp8-delayed"
    assert facts["experts"] == {"chosen": "fp8-rowwise", "native": native, "errors": {}}
    assert facts["units"]["grouped_fp8"] is native and facts["grouped_products"] == "triton"
    assert "fp8-rowwise" in card.said[0]  # a scaling that differs from the dense layers' is reported
    assert [text for text in card.said if "emulated" in text] == card.said[1:] and len(
        card.said
    ) == 2 - native
    world = World(torch.device("cpu"))
    model = setup.build_model(asked, world, recipe)
    applied = setup.prepare_execution(asked, model, world, recipe, facts).precision
    assert applied.shared.native and applied.shared.caps.grouped_fp8 is native


@pytest.mark.parametrize(
    ("parts", "std"),
    [({}, 0.02), ({"optim": {"name": "adamw"}}, 1.0), ({"model": {"initializer_range": 0.5}}, 0.5)],
)
def test_embeddings_begin_as_the_run_says(parts: dict[str, Any], std: float) -> None:
    asked = config("bf16", **parts)
    built = setup.build_model(asked, World(torch.device("cpu")), "bf16")
    assert asked.embedding_std() == std
    assert float(built.embed.weight.detach().float().std()) == pytest.approx(std, rel=0.05)


def test_a_run_says_if_its_experts_are_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, NATIVE, NATIVE, HardwareCaps())
    monkeypatch.setattr(setup, "grouped_backend", lambda device, dtype, shape, rows: "loop")
    assert (
        setup.choose_recipe(config("bf16"), CARD, card.said.append)[1].keys().isdisjoint({"grouped_products"})
    )
    _, facts = setup.choose_recipe(config("bf16", model=EXPERTS), CARD, card.said.append)
    assert facts["grouped_products"] == "loop" and len(card.said) == 1
    _, facts = setup.choose_recipe(config("fp32", model=EXPERTS), torch.device("cpu"), card.said.append)
    assert facts["grouped_products"] == "loop" and len(card.said) == 1  # a CPU has no native formats


def test_experts_that_are_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, NATIVE, NATIVE, HardwareCaps(grouped_fp8=True))
    wrong = CheckResult(False, {}, "weight gradient is all zero")
    monkeypatch.setattr(setup, "check_experts", lambda *_: wrong)
    with pytest.raises(UsageError, match=r"experts in fp8-rowwise fail .*all zero; use bf16$"):
        setup.choose_recipe(config("fp8", model=EXPERTS), CARD, card.said.append)


def test_experts_are_emulated_where_layers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, EMULATED, NATIVE, HardwareCaps(grouped_fp8=True))
    ways: list[Any] = []
    monkeypatch.setattr(setup, "check_experts", lambda *given: ways.append(given[2]) or EMULATED)
    setup.choose_recipe(config("fp8", model=EXPERTS), CARD, card.said.append)
    assert ways == [False]


@pytest.mark.parametrize("faster", [True, False])
def test_what_the_stopwatch_found_is_kept(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is recorded in the run's facts, where other processes and a resumed run find it."""
    card = Card(monkeypatch, NATIVE, NATIVE, HardwareCaps(fp4=True, mxfp8=faster))
    _, facts = setup.choose_recipe(config("fp8"), CARD, card.said.append)
    assert facts["units"] == {"fp4": True, "mxfp8": faster, "grouped_fp8": False}
    setup.choose_recipe(config("fp8"), CARD, card.said.append, facts)
    assert card.asked == [None, faster]
    old = {"chosen": "fp8-delayed", "native": True}  # of a run that recorded none
    setup.choose_recipe(config("fp8"), CARD, card.said.append, old)
    assert card.asked[-1] is None

    world = World(torch.device("cpu"))
    model = setup.build_model(config("fp8"), world, "fp8-delayed")
    applied = setup.prepare_execution(config("fp8"), model, world, "fp8-delayed", facts).precision
    assert applied.shared.caps == HardwareCaps(fp4=True, mxfp8=faster)


@pytest.mark.parametrize(
    ("backend", "recipe", "said"),
    [
        ("deskside", "fp8-delayed", None),
        ("torchao", "fp8-rowwise", None),
        ("transformer-engine", "fp8-delayed", "the history of its scales"),
        ("transformer-engine", "fp8-tensorwise", None),
        ("transformer-engine", "nvfp4", "the state of its random numbers"),
    ],
)
def test_what_a_library_does_not_hand_out_is_told(
    backend: str, recipe: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch, NATIVE, NATIVE, HardwareCaps())
    setup.choose_recipe(config(recipe, precision={"backend": backend}), CARD, card.said.append)
    if said is None:
        assert not card.said
    else:
        assert card.said == [f"{backend} does not give access to {said}: a resumed run is not bit-identical"]


def test_nothing_is_timed_that_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch, NATIVE, NATIVE, HardwareCaps(True, True))
    for asked in (config("bf16"), config("fp8", precision={"native": "never"})):
        setup.choose_recipe(asked, CARD, card.said.append)
    assert not card.asked and card.found == [HardwareCaps(), HardwareCaps()]


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ({}, None),
        ({"model": {"hidden_size": 80}}, "hidden_size: 80"),
        ({"batch": {"sequence_length": 16}}, "16"),
    ],
)
def test_sizes_that_native_nvfp4_cannot_have_are_emulated(
    parts: dict[str, Any], size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(monkeypatch, NATIVE, NATIVE, HardwareCaps(fp4=True))
    setup.choose_recipe(config("nvfp4", **parts), CARD, card.said.append)
    assert card.found == [HardwareCaps(fp4=size is None)]
    if size is None:
        assert not card.said
    else:
        assert card.said[0].startswith("NVFP4 products are emulated: ") and size in card.said[0]


def test_data_of_the_home_directory_are_found_and_prepared_there(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "data").symlink_to(data)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    check_start(tiny_run.config("~/data"))
    write_text(tmp_path / "text.txt")
    new = tiny_run.config("~/new", data={"sources": [str(tmp_path / "text.txt")]})
    assert setup.ensure_data(new, World(torch.device("cpu")), lambda line: None) == home / "new"
    assert (home / "new" / "index.json").is_file() and not (tmp_path / "~").exists()


def test_validation_that_is_too_small_is_told_when_training_begins(data: Path) -> None:
    said: list[str] = []
    setup.ensure_data(tiny_run.config(data), World(torch.device("cpu")), said.append)
    assert [line.startswith("warning: validation is ") for line in said] == [True]


def prepares_slowly(folder: Path) -> None:
    distributed_c10d.default_pg_timeout = timedelta(seconds=1)  # of torch; 30 minutes, 10 with NCCL
    world = init_distributed("cpu", "auto")

    def prepare(config: RunConfig, say: Any) -> None:
        time.sleep(3)
        (folder / f"{world.rank}.txt").touch()

    setup.prepare_sources = prepare
    sources = {"sources": [str(folder / "text.txt")]}
    setup.ensure_data(tiny_run.config(folder / "data", data=sources), world, print)
    assert [path.name for path in folder.glob("*.txt")] == ["0.txt"]
    destroy_distributed(world)


def test_other_ranks_wait_for_the_data_however_long_it_takes(tmp_path: Path) -> None:
    child = tiny_run.call(prepares_slowly, tmp_path, log=tmp_path / "log", ranks=2)
    assert child.wait() == 0, child.text()
