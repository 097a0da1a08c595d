"""Losses on pairs against TRL's DPOTrainer on the same logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.align.losses import pair_losses
from deskside.config.align import DpoConfig
from tests.align import trl_oracle

B, T, V = 6, 12, 40  # three pairs


def made() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(B, T, V, generator=generator, requires_grad=True)
    reference = logits.detach() + 0.5 * torch.randn(B, T, V, generator=generator)
    tokens = torch.randint(V, (B, T), generator=generator)
    begin = torch.randint(1, 5, (B, 1), generator=generator)
    end = torch.randint(7, T + 1, (B, 1), generator=generator)
    places = torch.arange(T)
    return logits, reference, tokens, ((places >= begin) & (places < end)).long()


def ours(logits: Tensor, reference: Tensor, tokens: Tensor, mask: Tensor, **options: Any) -> Any:
    def paired(of: Tensor) -> Tensor:
        """TRL has all chosen answers before all rejected ones."""
        return of.view(2, -1).T.flatten()

    def summed(of: Tensor) -> Tensor:
        logprobs = of[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        return paired((logprobs * mask[:, 1:]).sum(1))

    return pair_losses(summed(logits), summed(reference), paired(mask.sum(1)), DpoConfig(**options))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "sigmoid_norm"])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_as_trl_computes_it(loss: str, beta: float) -> None:
    logits, reference, tokens, mask = made()
    wanted, metrics = trl_oracle.dpo(logits, reference, tokens, mask, loss=loss, beta=beta)
    (wanted_grad,) = torch.autograd.grad(wanted, logits)
    found = ours(logits, reference, tokens, mask, loss=loss, beta=beta)
    (grad,) = torch.autograd.grad(found.loss_P.mean(), logits)
    torch.testing.assert_close(found.loss_P.mean(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-7)
    assert found.chosen_reward_P.mean().item() == pytest.approx(metrics["rewards/chosen"], rel=1e-5)
    assert found.rejected_reward_P.mean().item() == pytest.approx(metrics["rewards/rejected"], rel=1e-5)
    better = (found.chosen_reward_P > found.rejected_reward_P).float().mean().item()
    assert better == pytest.approx(metrics["rewards/accuracies"])


def test_label_smoothing_from_trl_s_sigmoid_of_the_pair_and_of_the_pair_turned_round() -> None:
    logits, reference, tokens, mask = made()
    right, _ = trl_oracle.dpo(logits, reference, tokens, mask, loss="sigmoid", beta=0.3)
    turned = [torch.cat((t[B // 2 :], t[: B // 2])) for t in (logits, reference, tokens, mask)]
    wrong, _ = trl_oracle.dpo(*turned, loss="sigmoid", beta=0.3)  # type: ignore[arg-type]
    found = ours(logits, reference, tokens, mask, loss="sigmoid", beta=0.3, label_smoothing=0.2)
    torch.testing.assert_close(found.loss_P.mean(), 0.8 * right + 0.2 * wrong, rtol=1e-5, atol=1e-6)


def test_without_a_change_the_loss_is_log_two() -> None:
    logits, _, tokens, mask = made()
    found = ours(logits, logits.detach(), tokens, mask, loss="sigmoid", beta=0.1)
    torch.testing.assert_close(found.loss_P, torch.full((B // 2,), 0.6931472))
    assert not found.chosen_reward_P.any()
