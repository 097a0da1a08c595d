"""Preference losses, compared with TRL's DPO, CPO, ORPO and KTO trainers on the same logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deskside.align import answers
from deskside.align.answers import Scores, TokenizedText, lay_out
from deskside.align.dpo import METRICS, Dpo
from deskside.align.logprobs import pad_sequences
from deskside.align.preference_data import text_indices
from deskside.align.preference_losses import kl_estimate, labelled_losses, pair_losses
from deskside.align.text_rows import Units
from deskside.config.align import DpoConfig, KtoConfig
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
        """Reorder the rows as TRL expects them: all chosen answers before all rejected ones."""
        return of.view(2, -1).T.flatten()

    def summed(of: Tensor) -> Tensor:
        logprobs = of[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        return paired((logprobs * mask[:, 1:]).sum(1))

    return pair_losses(summed(logits), summed(reference), paired(mask.sum(1)), DpoConfig(**options))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "sigmoid_norm", "hinge", "robust"])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_as_trl_computes_it(loss: str, beta: float) -> None:
    logits, reference, tokens, mask = made()
    options: dict[str, Any] = {"loss": loss, "beta": beta}
    if loss == "robust":
        options["label_smoothing"] = 0.2
    wanted, metrics = trl_oracle.dpo(logits, reference, tokens, mask, **options)
    (wanted_grad,) = torch.autograd.grad(wanted, logits)
    found = ours(logits, reference, tokens, mask, **options)
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


REFERENCE_FREE = [
    {"loss": "cpo", "nll_weight": 1.0},
    {"loss": "cpo", "nll_weight": 0.0, "label_smoothing": 0.1},
    {"loss": "simpo", "gamma": 0.7, "beta": 2.0},
    {"loss": "simpo", "gamma": 0.7, "beta": 2.0, "nll_weight": 0.5},
    {"loss": "orpo", "beta": 0.3},
]


@pytest.mark.parametrize("options", REFERENCE_FREE)
@pytest.mark.parametrize("passes", [1, 3])
def test_a_reference_free_step_is_trl_s(
    options: dict[str, Any], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objective's whole loss of a step, likelihood of the answers included,
    in one pass and in one pass per pair.
    """
    logits, _, tokens, mask = made()
    real = (torch.arange(T) <= (mask * torch.arange(T)).amax(1, keepdim=True)).long()
    config = DpoConfig(**options)
    theirs = {"beta": config.beta, "label_smoothing": config.label_smoothing, "cpo_alpha": config.nll_weight}
    wanted, metrics = trl_oracle.reference_free(
        logits, tokens, real, mask, loss=config.loss, simpo_gamma=config.gamma, **theirs
    )
    (wanted_grad,) = torch.autograd.grad(wanted, logits)

    objective = Dpo(config)
    texts = [TokenizedText(tokens[b, : int(real[b].sum())].numpy(), int(mask[b].argmax())) for b in range(B)]
    pairs = [[0, 3], [1, 4], [2, 5]]  # TRL puts all chosen answers before all rejected ones
    rows = FewTexts([texts[b] for pair in pairs for b in pair])
    steps = rows.step_counts(objective)
    total = torch.zeros(())
    sums = dict.fromkeys(METRICS, 0.0)
    for part in torch.arange(3).chunk(passes):
        batch = objective._batch_of(rows, [part.numpy()], steps, torch.device("cpu"))  # type: ignore[arg-type]
        logprobs_BT = logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        used = [objective._text(rows, i) for pair in part.tolist() for i in (2 * pair, 2 * pair + 1)]  # type: ignore[arg-type]
        flat = [b for pair in part.tolist() for b in pairs[pair]]
        found_M = torch.cat([logprobs_BT[b, t.targets - 1] for b, t in zip(flat, used, strict=True)])
        scores = Scores(pad_sequences(found_M, batch.mask_SL), torch.empty(0), None)
        monkeypatch.setattr(answers, "score", lambda *_, scores=scores: scores)
        loss = objective.loss(None, batch, None, None)  # type: ignore[arg-type]
        total = total + loss.sum / batch.num_valid_step
        for name, value in loss.metric_sums.items():
            sums[name] += float(value)
    (grad,) = torch.autograd.grad(total, logits)
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-7)
    found = objective.metrics(sums, 3)
    for ours_, trl_ in (
        ("chosen_reward", "rewards/chosen"),
        ("rejected_reward", "rewards/rejected"),
        ("accuracy", "rewards/accuracies"),
        ("margin", "rewards/margins"),
    ):
        assert found[ours_] == pytest.approx(metrics[trl_], rel=1e-5)
    assert ("nll" in found) == (config.nll_weight > 0) and "kl" not in found
    if config.nll_weight:
        assert found["nll"] == pytest.approx(metrics["nll_loss"], rel=1e-5)


class FewTexts:
    """The part of a data set that `Dpo` reads: texts 2p and 2p + 1 belong to pair p."""

    def __init__(self, texts: list[TokenizedText]):
        self.texts = texts

    def text(self, index: int) -> TokenizedText:
        return self.texts[index]

    def reference_texts(self, rows: Units) -> list[list[int]]:
        return [text_indices([row]) for row in rows]

    def lay_out(self, texts: list[list[TokenizedText]]) -> dict[str, Any]:
        return lay_out(texts, B * T, B + 2, 0)

    def step_counts(self, objective: Dpo) -> tuple[int, int]:
        chosen = [objective._text(self, 2 * p).num_targets for p in range(3)]  # type: ignore[arg-type]
        return 3, sum(chosen)


def test_a_certain_answer_has_a_finite_odds_ratio() -> None:
    logprobs = torch.tensor([0.0, -3.0, -1e-12, -0.5], requires_grad=True)
    found = pair_losses(logprobs, None, torch.ones(4), DpoConfig(loss="orpo"))
    (grad,) = torch.autograd.grad(found.loss_P.sum(), logprobs)
    assert torch.isfinite(found.loss_P).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.5, 0.7)])
@pytest.mark.parametrize("shift", [1.0, -1.0])
def test_kto_as_trl_computes_it(weights: tuple[float, float], shift: float) -> None:
    """`shift` is the sign of the estimate of the KL divergence. A negative estimate counts as 0."""
    logits, reference, tokens, mask = made()
    label = torch.tensor([True, False, True, True, False, False])
    kl_reference = torch.randn(B, generator=torch.Generator().manual_seed(1))
    kl_logps = kl_reference + shift * torch.arange(B)
    wanted, metrics = trl_oracle.kto(
        logits, reference, tokens, mask, label, kl_logps, kl_reference, beta=0.2, weights=weights
    )
    (wanted_grad,) = torch.autograd.grad(wanted, logits)

    def summed(of: Tensor) -> Tensor:
        logprobs = of[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
        return (logprobs * mask[:, 1:]).sum(1)

    config = KtoConfig(beta=0.2, desirable_weight=weights[0], undesirable_weight=weights[1])
    kl = kl_estimate((kl_logps - kl_reference).sum(), B)
    found = labelled_losses(summed(logits), summed(reference), label, kl, config)
    (grad,) = torch.autograd.grad(found.loss_S.mean(), logits)
    torch.testing.assert_close(found.loss_S.mean(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-7)
    assert kl.item() == pytest.approx(metrics["kl"])
    assert found.reward_S[label].mean().item() == pytest.approx(metrics["rewards/chosen"], rel=1e-5)
    assert found.reward_S[~label].mean().item() == pytest.approx(metrics["rewards/rejected"], rel=1e-5)
