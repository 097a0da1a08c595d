"""Memory of adapters beside frozen weights: bytes of live storages, and those of one eager step."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deskside.budget.adapters import adapter_params, block_bytes, frozen_bytes, stacked_adapter_bytes
from deskside.budget.memory import LIBRARIES, instants, training_memory
from deskside.budget.scaling import Scaling
from deskside.budget.shape import block_matrix_params
from deskside.budget.sizes import Sizes
from deskside.budget.step_spec import AdapterSpec, StepSpec
from deskside.config.model import ModelConfig
from deskside.config.optim import AdamWConfig
from deskside.config.run import RunConfig
from deskside.config.sections import PROJECTIONS, AdapterConfig
from deskside.config.step_options import step_options
from deskside.kernels.attention import AttentionContext
from deskside.kernels.cross_entropy import LossOptions, linear_cross_entropy
from deskside.model.init import initialize
from deskside.model.transformer import Transformer
from deskside.optim.build import build
from deskside.precision.attach_adapters import attach_adapters
from deskside.precision.convert import convert
from deskside.precision.frozen import stored_bytes
from deskside.precision.lora import Adapter, num_trained_parameters
from deskside.train.prepare.setup import recompute
from tests.budget.test_memory_oracle import SMALL

FORMATS: list[Any] = ["bf16", "int8", "nf4"]
MEASURED = Path(__file__).parents[2] / "docs/data/2026-11-22-release/memory/adapters.json"
QWEN = ModelConfig(
    vocab_size=151936, hidden_size=1536, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    head_dim=128, intermediate_size=8960, tie_word_embeddings=True,
)  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MLP_ONLY = ("gate_proj", "up_proj", "down_proj")


def work_of(adapter: AdapterSpec, passes: int = 1, rows: int = 8, **options: Any) -> StepSpec:
    settings: dict[str, Any] = {"optimizer": "adamw", "compiled": False, "loss_chunk_tokens": 256, **options}
    return StepSpec(512, passes * rows * 512, rows * 512, adapter=adapter, **settings)


def adapted(shape: ModelConfig, adapter: AdapterSpec) -> Transformer:
    model = Transformer(shape)
    options = AdapterConfig(
        rank=adapter.rank,
        base=adapter.base,
        targets=adapter.targets,  # type: ignore[arg-type]
        dora=adapter.dora,
        modules_to_save=adapter.tables,  # type: ignore[arg-type]
    )
    attach_adapters(model, options, 0)
    return model


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"gated_mlp": False, "hidden_act": "gelu"},
        {"attention_bias": True},
        EXPERTS,
    ],
    ids=["default", "tied", "not gated", "bias", "experts"],
)
def test_bytes_of_weights_are_those_of_live_storages(format: Any, changes: dict[str, Any]) -> None:
    shape = ModelConfig(**{**SMALL, "num_hidden_layers": 2, **changes})
    targets = tuple(name for name in PROJECTIONS if shape.gated_mlp or name != "gate_proj")
    adapter = AdapterSpec(8, targets, format)
    model = Transformer(shape)
    initialize(model, 0)
    attach_adapters(model, AdapterConfig(rank=8, base=format), 0)
    assert num_trained_parameters(model) == adapter_params(shape, adapter)
    sizes = Sizes(shape, StepSpec(64, 64, 64, adapter=adapter))
    live = stored_bytes(model) - sum(t.nbytes for t in (model.rope_cos, model.rope_sin) if t is not None)
    assert live == pytest.approx(frozen_bytes(sizes, adapter) + 4 * adapter_params(shape, adapter), rel=2e-4)


def test_bits_per_weight() -> None:
    shape = ModelConfig(**SMALL)
    bits = {
        f: 8 * block_bytes(shape, AdapterSpec(1, ("q_proj",), f)) / block_matrix_params(shape)
        for f in FORMATS
    }
    assert bits["bf16"] == 16
    assert bits["int8"] == pytest.approx(8.04, abs=0.03) and bits["nf4"] == pytest.approx(4.14, abs=0.02)


@pytest.mark.parametrize("targets", [PROJECTIONS, ("q_proj", "v_proj"), MLP_ONLY])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_joined_bytes_are_those_of_what_the_products_take(
    targets: tuple[str, ...], gated: bool, experts: dict[str, int], dtype: torch.dtype
) -> None:
    targets = tuple(name for name in targets if gated or name != "gate_proj")
    shape = ModelConfig(**{**SMALL, "gated_mlp": gated, "hidden_act": "silu" if gated else "gelu", **experts})
    spec = work_of(AdapterSpec(8, targets, "bf16"), precision="bf16" if dtype == torch.bfloat16 else "fp32")
    assert spec.adapter is not None
    model = adapted(shape, spec.adapter)
    own = {p.data_ptr() for p in model.parameters()}
    made = [
        t
        for m in model.modules()
        if isinstance(m, Adapter)
        for t in m.joined(dtype)
        if t.data_ptr() not in own
    ]
    assert stacked_adapter_bytes(shape, spec) == sum(t.nbytes for t in made)


@pytest.mark.parametrize("format", FORMATS)
def test_peaks_measured_on_a_card(format: Any) -> None:
    """Qwen2.5-1.5B's shape on an H200. Its logits are 1.16 GiB, of which the loss kernel has no second copy."""
    (row,) = (arm for arm in json.loads(MEASURED.read_text("utf-8"))["arms"] if arm["arm"] == format)
    spec = StepSpec(1024, 4096, 4096, optimizer="adamw", adapter=AdapterSpec(16, PROJECTIONS, format))
    assert training_memory(QWEN, spec).allocated / 2**30 == pytest.approx(row["peak_gib"], rel=0.005)


class Live(TorchDispatchMode):
    """Tracks the bytes of all live storages after each operation. torch's own tracker refuses frozen parameters."""

    def __init__(self, *before: Tensor):
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._note(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._note([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        return out

    def _note(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            self.storages[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, self.total())

    def total(self) -> int:
        self.storages = {key: pair for key, pair in self.storages.items() if not pair[0].expired()}
        return sum(size for _, size in self.storages.values())


@dataclass(frozen=True)
class Tracked:
    kept: int
    gradients: int
    states: int
    after_backward: int
    peak: int


def track(shape: ModelConfig, spec: StepSpec) -> Tracked:
    """Run one optimizer step on fake tensors, so that shapes can be real ones."""
    assert spec.adapter is not None
    # bitsandbytes creates its tables at the first use, which fake tensors do not allow.
    if spec.adapter.base == "nf4":
        import bitsandbytes  # takes seconds, in every process that collects tests

        bitsandbytes.functional.quantize_4bit(torch.zeros(1, 64), quant_type="nf4", compress_statistics=True)
    with FakeTensorMode(allow_non_fake_inputs=True):  # bitsandbytes keeps its table of quantiles
        model = adapted(shape, spec.adapter)
        convert(model, spec.precision)
        recompute(model.layers, spec.activation_checkpointing)
        optimizer = build(model, AdamWConfig(), Scaling(1.0, 1.0, 1.0))
        optimizer.set_progress(1.0, 0.0, 1)
        optimizer.create_state()
        states = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
        tokens_BT = torch.zeros(
            spec.micro_tokens // spec.sequence_length, spec.sequence_length, dtype=torch.int64
        )
        rope = [t for t in (model.rope_cos, model.rope_sin) if t is not None]
        own = [*model.parameters(), *(b for b in model.buffers() if not any(b is t for t in rope)), *states]
        with Live(*own) as live:
            before = live.total()
            for _ in range(spec.accumulation):
                hidden_BTD = model.hidden(tokens_BT, AttentionContext(backend="sdpa"))
                kept = (
                    live.total()
                    - before
                    - sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
                )
                loss = linear_cross_entropy(
                    hidden_BTD.flatten(0, 1),
                    model.head_weight,
                    tokens_BT.flatten(),
                    LossOptions(chunk_tokens=256),
                )
                del hidden_BTD
                loss.backward()
                del loss
            after = live.total()
            gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            optimizer.clip_and_norm(1.0)
            optimizer.step(torch.zeros(()))
        return Tracked(kept, gradients, sum(t.nbytes for t in states), after, live.peak)


@pytest.mark.parametrize(
    ("adapter", "options"),
    [
        pytest.param(AdapterSpec(16, PROJECTIONS, "bf16"), {}, marks=pytest.mark.full),
        pytest.param(AdapterSpec(16, PROJECTIONS, "bf16"), {"passes": 2}, marks=pytest.mark.full),
        (AdapterSpec(64, ("q_proj", "v_proj"), "bf16"), {}),
        pytest.param(
            AdapterSpec(16, PROJECTIONS, "bf16", dora=True, tables=("embed_tokens", "lm_head")), {},
            marks=pytest.mark.full,
        ),
        pytest.param(AdapterSpec(16, PROJECTIONS, "bf16", dora=True), {}, marks=pytest.mark.full),
        pytest.param(AdapterSpec(8, ("k_proj", "down_proj"), "int8", dora=True), {}, marks=pytest.mark.full),
        pytest.param(
            AdapterSpec(16, PROJECTIONS, "bf16", tables=("embed_tokens", "lm_head")), {}, marks=pytest.mark.full
        ),
        pytest.param(
            AdapterSpec(4, PROJECTIONS, "bf16", tables=("embed_tokens", "lm_head")), {"passes": 2},
            marks=pytest.mark.full,
        ),
        pytest.param(AdapterSpec(4, MLP_ONLY, "bf16"), {}, marks=pytest.mark.full),
        pytest.param(AdapterSpec(16, PROJECTIONS, "int8"), {}, marks=pytest.mark.full),
        pytest.param(AdapterSpec(16, PROJECTIONS, "nf4"), {}, marks=pytest.mark.full),
        pytest.param(
            AdapterSpec(16, PROJECTIONS, "nf4"), {"activation_checkpointing": "block"}, marks=pytest.mark.full
        ),
    ],
    ids=["all", "two passes", "q and v", "dora and tables", "dora", "dora of some", "tables", "tables, two passes",
         "mlp", "int8", "nf4", "recomputed"],
)  # fmt: skip
def test_every_item_and_the_peak(adapter: AdapterSpec, options: dict[str, Any]) -> None:
    shape, spec = ModelConfig(**SMALL), work_of(adapter, **options)
    found = track(shape, spec)
    items = instants(shape, spec)
    update = items["update"].items
    assert found.gradients == pytest.approx(update["gradients"], rel=1e-3)
    assert found.states == pytest.approx(update["optimizer"], rel=1e-3)
    assert found.after_backward == pytest.approx(sum(update.values()) - LIBRARIES, rel=0.02)
    peak = training_memory(shape, spec).allocated - LIBRARIES
    # Before the first adapter, nothing needs a gradient, so half of a block is free if its attention has no adapter.
    above = 1.1 if adapter.targets == MLP_ONLY else 1.2 if "activation_checkpointing" in options else 1.03
    assert 0.99 * found.kept <= items["loss"].items["activations"] <= above * found.kept
    assert 0.99 * found.peak <= peak <= (above + 0.02) * found.peak


@pytest.mark.parametrize(
    "targets", [PROJECTIONS, ("q_proj", "v_proj"), MLP_ONLY], ids=["all", "q and v", "mlp"]
)
def test_what_the_forward_of_experts_keeps(targets: tuple[str, ...]) -> None:
    """Uses real tensors, because the rows of an expert depend on values.
    Bookkeeping of the routing is not modelled.
    """
    shape = ModelConfig(**{**SMALL, **EXPERTS, "num_hidden_layers": 2})
    spec = work_of(AdapterSpec(16, targets, "bf16"), rows=2)
    assert spec.adapter is not None
    model = adapted(shape, spec.adapter)
    convert(model, spec.precision)
    tokens_BT = torch.randint(0, shape.vocab_size, (2, 512), generator=torch.Generator().manual_seed(0))
    with Live(*model.parameters(), *model.buffers()) as live:
        before = live.total()
        hidden_BTD = model.hidden(tokens_BT, AttentionContext(backend="sdpa"))
        kept = live.total() - before
        del hidden_BTD
    items = instants(shape, spec)["loss"].items
    above = 1.45 if targets == MLP_ONLY else 1.03  # before the first adapter nothing needs a gradient
    assert 0.94 * kept <= items["activations"] + items["copies"] <= above * kept


def test_a_run_asks_for_what_trains() -> None:
    given = {"optim": {"name": "adamw"}, "adapter": {"rank": 8, "base": "nf4"}}
    config = RunConfig.model_validate(given)
    assert step_options(config)["adapter"] == AdapterSpec(8, PROJECTIONS, "nf4")
    without_gate = RunConfig.model_validate({**given, "model": {"gated_mlp": False}})
    spec = step_options(without_gate)["adapter"]
    assert spec is not None and "gate_proj" not in spec.targets and len(spec.targets) == 6
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    config = RunConfig.model_validate({**given, "model": experts, "adapter": {"rank": 8}})
    spec = step_options(config)["adapter"]
    assert spec is not None and spec.targets == PROJECTIONS
    assert step_options(RunConfig())["adapter"] is None


def test_four_bits_take_a_fraction_of_full_training() -> None:
    """At 1.5B parameters, as in the issue: weights, gradients and states of
    everything, compared with NF4 and adapters.
    """
    full = training_memory(QWEN, StepSpec(1024, 1024, 1024, optimizer="adamw", copies="step"))
    nf4 = training_memory(
        QWEN, StepSpec(1024, 1024, 1024, optimizer="adamw", adapter=AdapterSpec(16, PROJECTIONS, "nf4"))
    )
    assert nf4.items["weights"] < 0.23 * full.items["weights"]
    assert nf4.allocated < 0.2 * full.allocated
