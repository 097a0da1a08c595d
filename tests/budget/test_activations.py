"""The activations of a layer, against what autograd and the compiler save, and against counting by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from deskside.budget.memory import instants
from deskside.budget.step_spec import StepSpec
from deskside.config.model import ModelConfig
from deskside.kernels.attention import AttentionContext
from deskside.model.transformer import Transformer
from deskside.ops.linear import Embedding
from tests.budget.test_memory import SMALL

FP8 = frozenset({"fp8"})
VARIANTS: list[dict[str, Any]] = [
    {},
    {"qk_norm": False, "num_key_value_heads": 6},
    {"qk_norm": False, "gated_mlp": False, "hidden_act": "gelu", "intermediate_size": 384},
    {"qk_norm": False, "position_embedding": "learned"},
    {"norm_position": "sandwich"},
    {"norm_position": "output", "qk_norm_over": "projection"},
    {"norm": "layernorm", "norm_bias": True, "parallel_residual": True, "qk_norm": False, "gated_mlp": False},
]


def at_loss(shape: ModelConfig, micro_tokens: int, **options: Any) -> dict[str, int]:
    return instants(shape, StepSpec(micro_tokens, micro_tokens, micro_tokens, **options))["loss"].items


def saved_bytes(config: ModelConfig, compiled: bool) -> int:
    """Return the bytes that the backward of all blocks keeps for 128 tokens in
    bfloat16, without weights and their casts.
    """
    model = Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for module in model.modules():
        if isinstance(module, Embedding):
            module.output_dtype = torch.bfloat16
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    casts = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape[::-1]))}
    kept: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage().data_ptr()
        if storage not in own and tuple(t.shape) not in casts:
            kept[storage] = t
        return t

    def run(tokens: torch.Tensor) -> torch.Tensor:
        return model.hidden(tokens, AttentionContext(backend="sdpa"))

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        result = (torch.compile(run) if compiled else run)(torch.arange(128)[None] % 64)
    assert result.dtype == torch.bfloat16
    return sum(t.untyped_storage().nbytes() for t in kept.values())


def check(given: dict[str, Any], compiled: bool) -> None:
    one, three = (ModelConfig(**{**SMALL, **given, "num_hidden_layers": layers}) for layers in (1, 3))
    real = saved_bytes(three, compiled) - saved_bytes(one, compiled)
    modelled = [at_loss(c, 128, compiled=compiled)["activations"] for c in (one, three)]
    assert modelled[1] - modelled[0] == pytest.approx(real, rel=0.05)


@pytest.mark.parametrize("given", VARIANTS)
def test_activations_are_what_autograd_saves(given: dict[str, Any]) -> None:
    check(given, compiled=False)


@pytest.mark.full
@pytest.mark.parametrize("given", VARIANTS)
def test_activations_are_what_the_compiler_saves(given: dict[str, Any]) -> None:
    torch._dynamo.reset()
    check(given, compiled=True)


def test_each_rung_of_checkpointing_keeps_less() -> None:
    kept = [
        at_loss(ModelConfig(), 2048, activation_checkpointing=rung)["activations"]
        for rung in ("none", "attention", "mlp", "block")
    ]
    assert kept[0] > max(kept[1:3])
    assert min(kept[1:3]) > kept[3] > 12 * 2048 * 2 * 768


def test_a_recomputed_fused_mlp_has_its_normed_input_again() -> None:
    """Per token, it takes 2 x 768 bytes for the normed input and 6 x 2048 in the MLP. In FP8, both inputs are codes."""
    shape, bf16 = ModelConfig(), StepSpec(2048, 65536, 32768, copies="step")
    for work, recomputed in (
        (bf16, 2 * 768 + 6 * 2048),
        (replace(bf16, precision="fp8", native=FP8), 768 + 5 * 2048),
    ):
        kept, again = (
            instants(shape, replace(work, activation_checkpointing=level))["backward"].items["workspace"]  # type: ignore[arg-type]
            for level in ("none", "mlp")
        )
        assert again - kept == 32768 * recomputed


def test_fp8_keeps_what_projections_read_in_one_byte() -> None:
    """Per token of each of 12 blocks, two normed inputs of 768 and the MLP's 2048 hidden channels take one byte less
    each. Attention's output of 768 takes one more, because attention itself keeps it in BF16.
    """
    shape, bf16 = ModelConfig(), StepSpec(2048, 65536, 32768)
    fp8 = replace(bf16, precision="fp8", native=FP8)

    def kept(work: StepSpec) -> int:
        return instants(shape, work)["loss"].items["activations"]

    less = 12 * 32768 * (2 * 768 + 2048 - 768)
    assert kept(bf16) - kept(fp8) == less
    assert kept(bf16) - kept(replace(fp8, kept_blocks=3)) == less * 9 // 12
    assert kept(replace(fp8, native=frozenset())) == kept(fp8)
    assert kept(replace(fp8, precision="nvfp4")) == kept(bf16)
    assert kept(replace(fp8, precision="fp8-rowwise")) == kept(fp8)
    # A recomputed sublayer keeps neither its normed input nor its output, so the MLP's remain.
    again = [kept(replace(work, activation_checkpointing="attention")) for work in (bf16, fp8)]
    assert again[0] - again[1] == 12 * 32768 * (768 + 2048)
