"""The GRPO objective, compared with TRL's GRPOTrainer on the same logits."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deskside.align.grpo_data import Question
from deskside.align.logprobs import pad_sequences
from deskside.align.policy_loss import STD_EPSILON, advantages, policy_loss
from deskside.align.rollout_batch import loss_count, rollout_batch
from deskside.align.rollouts import Rollout
from deskside.align.sampler import SampledAnswer
from deskside.config.align import GrpoConfig
from tests.align import trl_oracle

S, L, V = 8, 9, 30
PLAIN = GrpoConfig(average="sequence", clip_high=0.2)
AVERAGES = {"sequence": "grpo", "token": "dapo", "fixed": "dr_grpo"}


def made(far: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(S, L, V, generator=generator, requires_grad=True)
    tokens = torch.randint(V, (S, L), generator=generator)
    lengths = torch.randint(1, L + 1, (S, 1), generator=generator)
    mask = torch.arange(L) < lengths
    now = logits.detach().log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    sampled = now + far * torch.randn(S, L, generator=generator)
    reference = now + far * torch.randn(S, L, generator=generator)
    return logits, tokens, mask, torch.randn(S, generator=generator), sampled, reference


@pytest.mark.parametrize(
    ("average", "ratio"), [*itertools.product(AVERAGES, ["token"]), ("sequence", "sequence")]
)
@pytest.mark.parametrize("kl", [0.0, 0.04])
@pytest.mark.parametrize("clip", [(0.2, 0.2), (0.2, 0.28)])
def test_as_trl_computes_it(average: str, ratio: str, kl: float, clip: tuple[float, float]) -> None:
    logits, tokens, mask, advantage, sampled, reference = made(0.3)
    options = {"ratio": ratio, "kl": kl}
    wanted, metrics = trl_oracle.grpo(
        logits, tokens, mask, advantage, sampled, reference,
        loss=AVERAGES[average], low=clip[0], high=clip[1], longest=L, **options,
    )  # fmt: skip
    (wanted_grad,) = torch.autograd.grad(wanted, logits)
    logprobs = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    found = policy_loss(
        logprobs, sampled, advantage, mask,
        GrpoConfig(average=average, clip_low=clip[0], clip_high=clip[1], answer_tokens=L, **options),
        reference if kl else None,
    )  # fmt: skip
    loss = found.loss / (mask.sum() if average == "token" else S)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-7)
    if kl:
        assert (found.kl_SL.sum() / mask.sum()).item() == pytest.approx(metrics["kl"], rel=1e-4)
    if ratio == "token":
        share = (found.clipped_SL.sum() / mask.sum()).item()
        assert share > 0
        assert share == pytest.approx(metrics["clip_ratio/region_mean"], rel=1e-5)


@pytest.mark.parametrize(
    ("average", "ratio"), [*itertools.product(AVERAGES, ["token"]), ("sequence", "sequence")]
)
def test_results_of_tools_are_masked_as_trl_does(average: Any, ratio: Any) -> None:
    """Our batches do not score the tokens of tool results at all."""
    logits, tokens, mask, advantage, sampled, reference = made(0.3)
    tool_mask = torch.rand(S, L, generator=torch.Generator().manual_seed(9)) < 0.6
    tool_mask[:, 0] = True
    wanted, metrics = trl_oracle.grpo(
        logits, tokens, mask, advantage, sampled, reference,
        loss=AVERAGES[average], ratio=ratio, low=0.2, high=0.28, kl=0.04, longest=L, tool_mask_SL=tool_mask,
    )  # fmt: skip
    (wanted_grad,) = torch.autograd.grad(wanted, logits)

    options = GrpoConfig(average=average, ratio=ratio, kl=0.04, answer_tokens=L)
    question = Question("", "", (1, 2, 3))
    rollouts = [
        Rollout(
            s,
            question,
            SampledAnswer(
                tuple(tokens[s, :n].tolist()),
                tuple(sampled[s, :n].tolist()),
                True,
                tuple(tool_mask[s, :n].tolist()),
            ),
            "",
            0.0,
            float(advantage[s]),
        )
        for s, n in enumerate(mask.sum(1).tolist())
    ]
    rows: Any = SimpleNamespace(
        sequence_length=S * (L + 3), max_boundaries=lambda n: n * (S + 1), pad_token=0
    )
    batch = rollout_batch(rows, [rollouts], options, loss_count(rollouts, options), torch.device("cpu"))
    own = tool_mask & mask
    logprobs = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    targets = batch.targets_BT.flatten()[batch.target_index_M]
    assert torch.equal(targets, tokens[own]) and int((batch.targets_BT >= 0).sum()) == int(own.sum())
    found = policy_loss(
        pad_sequences(logprobs[own], batch.mask_SL),
        batch.sampled_SL,
        batch.advantage_S,
        batch.mask_SL,
        options,
        pad_sequences(reference[own], batch.mask_SL),
    )
    loss = found.loss / batch.num_valid_step
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-7)
    assert (found.kl_SL.sum() / own.sum()).item() == pytest.approx(metrics["kl"], rel=1e-4)


def test_clipped_tokens_have_no_gradient() -> None:
    logits, tokens, mask, advantage, sampled, _ = made(0.6)
    logprobs = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0].detach().requires_grad_()
    found = policy_loss(logprobs, sampled, advantage, mask, PLAIN)
    (grad,) = torch.autograd.grad(found.loss, logprobs)
    assert found.clipped_SL.any()
    assert not grad[found.clipped_SL].any()
    assert grad[mask & ~found.clipped_SL].all()


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    logits, tokens, mask, advantage, _, _ = made(0.0)
    logprobs = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    found = policy_loss(logprobs, logprobs.detach(), advantage, mask, GrpoConfig(average="token"))
    (grad,) = torch.autograd.grad(found.loss, logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(-(logprobs * mask * advantage[:, None]).sum(), logits)
    torch.testing.assert_close(grad, wanted)


def test_padding_may_hold_anything() -> None:
    logits, tokens, mask, advantage, sampled, _ = made(0.1)
    logprobs = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0].detach()
    clean = policy_loss(logprobs, sampled, advantage, mask, PLAIN)
    dirty = policy_loss(
        logprobs.masked_fill(~mask, float("nan")),
        sampled.masked_fill(~mask, float("inf")),
        advantage,
        mask,
        PLAIN,
    )
    assert clean.loss == dirty.loss


def test_advantages_as_trl_normalises_them() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 1], [0.1, 0.1, 0.1, 0.1], [3, 1, 2, 2]])
    std = rewards.std(1, keepdim=True)
    centred = rewards - rewards.mean(1, keepdim=True)
    torch.testing.assert_close(advantages(rewards, scale=True), centred / (std + STD_EPSILON))
    torch.testing.assert_close(advantages(rewards, scale=False), centred)
    assert not advantages(rewards, scale=True)[1].any()
    with pytest.raises(ValueError, match="two answers"):
        advantages(rewards[:, :1], scale=True)


@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4), min_size=1, max_size=5),
    st.booleans(),
)
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(
    rewards: list[list[float]], scale: bool
) -> None:
    given_GS = torch.tensor(rewards)
    found_GS = advantages(given_GS, scale)
    assert torch.isfinite(found_GS).all()
    assert (found_GS.sum(1).abs() <= 1e-4 * (1 + given_GS.abs().sum(1))).all()
    for group, advantage in zip(given_GS, found_GS, strict=True):
        order = group.argsort()
        assert (advantage[order].diff() >= 0).all()
