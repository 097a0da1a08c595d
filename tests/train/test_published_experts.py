"""A Qwen3-MoE created by transformers, trained here and there: the same losses and weights."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from deskside.data.reading.loader import Batch
from deskside.train.loop.step import StepMetrics, Stepper
from deskside.train.state.init_weights import InitialWeights
from deskside.weights.load import load_model
from tests.train.tiny_run import config, rows, train

transformers = pytest.importorskip("transformers")
COEFFICIENT, LR, STEPS = 0.3, 3e-3, 4


def published(folder: Path, data: Path, **changes: Any) -> Any:
    """Save random weights with the tokenizer of the prepared data, and return the model of transformers."""
    shape = transformers.Qwen3MoeConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=64, max_position_embeddings=128, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, norm_topk_prob=True, router_aux_loss_coef=COEFFICIENT, initializer_range=0.1,
        tie_word_embeddings=False, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(shape)
    model.save_pretrained(folder)
    shutil.copy(data / "tokenizer.json", folder)
    return model


@pytest.mark.parametrize("compile", ["off", "fused"])
def test_steps_are_those_of_transformers(
    compile: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, load-balancing loss, clipping and AdamW in float32, compared with transformers and torch.optim."""
    theirs = published(tmp_path / "hf", data)
    seen: list[Batch] = []
    original = Stepper.run

    def run(self: Stepper, batches: Sequence[Batch], step: int, dry: bool = False) -> StepMetrics:
        if not dry:
            seen.extend(batches)
        return original(self, batches, step, dry)

    monkeypatch.setattr(Stepper, "run", run)
    initial = InitialWeights.of(load_model(tmp_path / "hf"), str(tmp_path / "hf"))
    wanted = config(
        data,
        model=load_model(tmp_path / "hf").config.model_dump(),
        optim={"name": "adamw", "lr": LR, "scale": False, "grad_clip": 0.5},
        schedule={"name": "wsd", "length": f"{STEPS} steps"},
        precision={"name": "fp32"},
        compute={"compile": compile},
    )
    ours = train(tmp_path, wanted, "ours", initial=initial).run.path
    assert len(seen) == STEPS

    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for batch, row in zip(seen, rows(ours), strict=True):
        out = theirs(batch.tokens_BT, output_router_logits=True)
        loss = F.cross_entropy(out.logits.flatten(0, 1), batch.targets_BT.flatten())
        balance = torch.stack(
            [load_balancing_loss_func((logits,), 4, 2) for logits in out.router_logits]
        ).mean()
        (loss + COEFFICIENT * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        assert row["loss"] == pytest.approx(float(loss), rel=1e-5)
        assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
        optimizer.zero_grad()
    theirs.save_pretrained(tmp_path / "theirs")
    expected = load_file(tmp_path / "theirs/model.safetensors")
    found = load_file(ours / "model/model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
