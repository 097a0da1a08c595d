"""Alignment of a mixture of experts: the balancing loss is included, and sampling sees every update of an expert."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.align.sampler import Sampler
from deskside.cli import dpo as dpo_command
from deskside.cli import grpo as grpo_command
from deskside.cli import sft as sft_command
from deskside.data import tokenizer as bpe
from deskside.data.reading.loader import Batch
from deskside.train.loop.step import Stepper
from deskside.weights.hf import save_hf
from deskside.weights.merge_adapters import merged
from tests.align import tiny

transformers = pytest.importorskip("transformers")
COEFFICIENT = 0.5
COMMANDS: dict[str, tuple[Any, Callable[[], Any], tuple[str, ...]]] = {
    "sft": (sft_command, tiny.mostly_wrong, ("--batch.sequence_length", "128", "--batch.tokens", "1024")),
    "dpo": (
        dpo_command,
        lambda: tiny.pairs(60),
        ("--batch.sequence_length", "160", "--batch.tokens", "640"),
    ),
    "grpo": (
        grpo_command,
        tiny.questions,
        ("--batch.sequence_length", "64", "--align.answer_tokens", "4", "--questions", "8"),
    ),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with random weights, saved by transformers."""
    folder = tmp_path_factory.mktemp("experts") / "hf"
    torch.manual_seed(0)
    shape = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=64, max_position_embeddings=256, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, norm_topk_prob=True, router_aux_loss_coef=COEFFICIENT, initializer_range=0.1,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(shape).save_pretrained(folder)
    bpe.save(bpe.train(["digits 0123456789 and letters, user assistant yes no please"] * 4, 260), folder)
    return folder


def run(command: str, model: Path, folder: Path, name: str, *more: str) -> Path:
    module, make_rows, options = COMMANDS[command]
    data = tiny.jsonl(folder / f"{name}.jsonl", make_rows())
    argv = tiny.command_line(model, data, folder, name)
    argv += [*options, "--optim.lr", "2e-3", *more]
    assert module.run(argv) == 0
    return folder / name


def router_gradients(
    command: str, coefficient: float, published: Path, folder: Path
) -> tuple[list[Tensor], Batch, Path]:
    """Return the routers' gradients in the first step, its only micro-batch, and the weights before it."""
    found: list[tuple[list[Tensor], Batch]] = []
    before, original = folder / "before", Stepper.forward_backward

    def forward_backward(self: Stepper, batches: Sequence[Batch]) -> Tensor:
        if not before.exists():
            save_hf(self.model, self.model.config, None, before)
        result = original(self, batches)
        grads = [block.mlp.mixture.router.weight.grad for block in self.model.layers]
        assert len(batches) == 1
        found.append(([grad.clone() for grad in grads], batches[0]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "forward_backward", forward_backward)
        more = ("--model.router_aux_loss_coef", str(coefficient), "--optim.name", "adamw")
        run(command, published, folder, f"{command}-{coefficient}", *more, "--schedule.steps", "1")
    return *found[-1], before  # the first calls are dry steps


def documents_mask(batch: Batch) -> Tensor:
    """Return a (B, 1, T, T) mask: zero where a token attends, otherwise the lowest number.
    Documents in a row do not see each other.
    """
    B, T = batch.tokens_BT.shape
    assert batch.cu_seqlens is not None
    document = torch.searchsorted(batch.cu_seqlens, torch.arange(B * T), right=True).view(B, T)
    seen = (document[:, :, None] == document[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None]


@pytest.mark.parametrize(
    "command", ["sft", *(pytest.param(name, marks=pytest.mark.full) for name in ("grpo", "dpo"))]
)
def test_the_balancing_loss_has_the_weight_of_the_configuration(
    command: str, published: Path, tmp_path: Path
) -> None:
    """The coefficient times transformers' gradients of the balancing loss is what
    it adds to the routers' gradients.
    """
    folders = [tmp_path / name for name in ("with", "without")]
    for folder in folders:
        folder.mkdir()
    ours, batch, before = router_gradients(command, COEFFICIENT, published, folders[0])
    without, other, _ = router_gradients(command, 0.0, published, folders[1])
    assert torch.equal(batch.tokens_BT, other.tokens_BT)

    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    theirs = transformers.AutoModelForCausalLM.from_pretrained(before)
    out = theirs.model(
        batch.tokens_BT,
        position_ids=batch.positions_BT,
        attention_mask=documents_mask(batch),
        output_router_logits=True,
    )
    torch.stack([load_balancing_loss_func((logits,), 4, 2) for logits in out.router_logits]).mean().backward()
    for layer, one, zero in zip(theirs.model.layers, ours, without, strict=True):
        expected = COEFFICIENT * layer.mlp.gate.weight.grad
        assert float(expected.norm()) > 1e-3
        torch.testing.assert_close(one - zero, expected, rtol=2e-3, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "adapters"])
def test_sampling_sees_every_update_of_the_experts(
    adapted: bool, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    original = Sampler.update_weights

    def update_weights(self: Sampler) -> None:
        original(self)
        wanted = dict((merged(self.model) if adapted else self.model).named_parameters())
        for name, parameter in self.copy.named_parameters():
            assert torch.equal(parameter, wanted[name].to(parameter.dtype)), name
        seen.append(self.copy.layers[0].mlp.mixture.experts.down_weight.detach().clone())

    monkeypatch.setattr(Sampler, "update_weights", update_weights)
    more = ("--adapter.rank", "4") if adapted else ()
    reward = tmp_path / "reward.py"  # random weights give no right answer, but answers of different lengths
    reward.write_text("def length(prompt, completion, answer):\n    return float(len(completion))\n")
    more = (*more, "--align.reward", f"{reward}:length", "--schedule.steps", "4")
    run("grpo", published, tmp_path, "synced", *more)
    assert sum(not torch.equal(a, b) for a, b in itertools.pairwise(seen)) >= 3
