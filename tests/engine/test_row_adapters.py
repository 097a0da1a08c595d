"""Rows with different adapters in one batch give the same answers as an engine with the merged model."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decode import random_adapters
from deskside.engine import steps
from deskside.engine.engine import Draft, Engine
from deskside.engine.prompts import PackedPrompts
from deskside.engine.requests import EngineStepOptions, Request, SampleOutput
from deskside.engine.sampling import Sampling
from deskside.engine.speculate import speculate
from deskside.engine.steps import CachedModel, Slots
from deskside.kernels import prefill, prefill_triton
from deskside.precision.frozen import quantize_for_generation
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import load_model
from deskside.weights.peft_adapters import read_peft
from deskside.weights.served_adapters import attach_by_row
from tests.engine.test_capture import LANES, META, PAGES, NoConstantsByIndex, OnOneDevice, models
from tests.engine.test_generate import SHAPE, make
from tests.weights.test_peft_adapters import ATTENTION, LLAMA, adapted, base_model

BIAS = {"attention_bias": True, "mlp_bias": True}
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ATTENTION, "r": 3},
    "rslora": {"target_modules": "all-linear", "use_rslora": True, "rank_pattern": {"up_proj": 7}},
    "dora": {"target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"], "use_dora": True, "r": 5},
}
PROMPT = tuple(range(3, 45))  # long enough for some pages, so that prefixes could be shared


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base model and adapters of it."""
    root = tmp_path_factory.mktemp("adapters")
    for name, options in ADAPTERS.items():
        adapted(root, LLAMA, BIAS, options)
        (root / "adapter").rename(root / name)
    return [root / name for name in ("base", *ADAPTERS)]


def requests(number: int = 0, sampled: bool = True) -> list[Request]:
    random = Request(PROMPT[:9], 8, Sampling(0.8, top_k=20), seed=4, samples=2, logprobs=True, adapter=number)
    greedy = [Request(PROMPT[:end], 10, logprobs=True, adapter=number) for end in (5, 42, 42, 30)]
    return [*greedy, random] if sampled else greedy


def expected(folder: Path, sampled: bool = True) -> list[list[SampleOutput]]:
    return Engine(load_model(folder).model, max_tokens=512, page_size=8).run(requests(0, sampled))


def check(found: list[list[SampleOutput]], wanted: list[list[SampleOutput]]) -> None:
    for row, other in zip(chain(*found), chain(*wanted), strict=True):
        assert row.tokens == other.tokens
        torch.testing.assert_close(row.logprobs, other.logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("drafts", [0, 2])
def test_rows_of_one_batch_use_their_own_adapters(folders: list[Path], drafts: int) -> None:
    model = load_model(folders[0]).model
    choice = attach_by_row(model, [read_peft(folder) for folder in folders[1:]])
    draft = Draft(load_model(folders[0]).model, drafts) if drafts else None
    engine = Engine(model, adapters=choice, draft=draft, max_tokens=2048, page_size=8, prefill_tokens=40)
    sampled = not drafts  # speculation draws other random numbers
    wanted = [expected(folder, sampled) for folder in folders]
    assert len({tuple(outputs[1][0].tokens) for outputs in wanted}) == 4
    given = [requests(number, sampled) for number in range(4)]
    for _ in range(2):  # the second time with cached prefixes
        order = (2, 0, 3, 1)
        found = engine.run([given[number][index] for index in range(len(given[0])) for number in order])
        for place, number in enumerate(order):
            check(found[place :: len(order)], wanted[number])
    assert engine.counts.cached_tokens > 0


def test_adapters_beside_weights_in_codes(folders: list[Path]) -> None:
    model = load_model(folders[0]).model
    quantize_for_generation(model, "int8", torch.device("cpu"))
    tokens_BT = torch.tensor([PROMPT])
    with torch.no_grad():
        before = model(tokens_BT)
        choice = attach_by_row(model, [read_peft(folder) for folder in folders[1:]])
        assert torch.equal(model(tokens_BT), before)
        for number, folder in enumerate(folders[1:], start=1):
            choice.set(torch.full((len(PROMPT),), number))
            merged = load_model(folder).model(tokens_BT)
            assert float((model(tokens_BT) - merged).norm()) < 0.1 * float((before - merged).norm())


def test_numbers_of_adapters_are_checked(folders: list[Path]) -> None:
    model = load_model(folders[0]).model
    engine = Engine(model, adapters=attach_by_row(model, [read_peft(folders[1])]), max_tokens=512)
    with pytest.raises(UsageError, match=r"adapter: must be between 0 and 1, not 2"):
        engine.submit(Request(PROMPT, 3, adapter=2))
    with pytest.raises(UsageError, match=r"adapter: must be between 0 and 0"):
        Engine(model, max_tokens=512).submit(Request(PROMPT, 3, adapter=1))


@pytest.mark.parametrize("drafts", [0, 2])
@torch.no_grad()
def test_steps_stay_on_their_device(drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs can therefore capture them; see test_capture.py."""
    monkeypatch.setattr(prefill, "packed_kernel_supports", lambda heads, pool: True)
    monkeypatch.setattr(prefill_triton, "attend_packed", lambda q_NHC, *rest: torch.empty_like(q_NHC))
    model = make(**BIAS).to(META)
    target = CachedModel(model, LANES * PAGES, 16, 48, random_adapters(model, (2, 3), dora=True))
    (draft,), slots = models(1), Slots(LANES, PAGES, SHAPE["vocab_size"], META)
    lanes, options = slots.to_device(range(LANES)), EngineStepOptions(1, False, False, adapted=True)
    prompts = PackedPrompts.of(torch.zeros(3 * LANES + 1 + 32, dtype=torch.int64, device=META), LANES)
    with OnOneDevice(), NoConstantsByIndex():
        assert steps.prefill((target,), slots, prompts, options).packed().shape == (LANES, 2)
        if drafts:
            packed = speculate(target, draft, slots, lanes, 48, options, drafts).packed()
        else:
            packed = steps.decode((target,), slots, lanes, 48, options).packed()
    assert packed.shape == (LANES, 2 + drafts)


def test_tokens_of_packed_prompts_know_their_rows() -> None:
    """There are rows of 3, 0 and 2 tokens, then padding."""
    packed = torch.tensor([7, 4, 5, 1, 1, 1, 0, 3, 3, 5, *range(8)])
    assert PackedPrompts.of(packed, 3).lanes_N.tolist()[:5] == [7, 7, 7, 5, 5]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head.weight"),
        ({"trainable_token_indices": [3]}, "model.embed_tokens"),
        ({"bias": "all"}, "bias"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
    ],
)
def test_what_cannot_be_beside_others_is_refused(
    options: dict[str, Any], name: str, folders: list[Path], tmp_path: Path
) -> None:
    adapted(tmp_path, LLAMA, BIAS, {"target_modules": ATTENTION, **options})
    with pytest.raises(UsageError, match=rf"also changes .*{name}.*deskside serve"):
        attach_by_row(load_model(folders[0]).model, [read_peft(tmp_path / "adapter")])


def test_adapters_of_another_model_are_refused(folders: list[Path], tmp_path: Path) -> None:
    base_model(LLAMA, {"hidden_size": 32}, tmp_path / "smaller")
    with pytest.raises(RunError, match=r"another shape"):
        attach_by_row(load_model(tmp_path / "smaller").model, [read_peft(folders[1])])
    base_model("GPT2", {}, tmp_path / "gpt2")
    with pytest.raises(UsageError, match=r"which this base model does not have"):
        attach_by_row(load_model(tmp_path / "gpt2").model, [read_peft(folders[1])])
