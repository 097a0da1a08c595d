"""Scores of prompts for requests that ask for them: log-probabilities of the tokens, and the sum of hidden states.

Both need the hidden state of every token of the prompt, where generation needs only the last one. So these prompts are
prefilled in passes of their own, without cached prefixes and CUDA graphs, and the host reads the results at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from deskside.engine.requests import RowState, TopTokens
from deskside.engine.sampling import ranked
from deskside.model.block import MLP, Attention, CachedBlocks, LayerCache, MoE
from deskside.model.transformer import Transformer
from deskside.ops.composite import AddNormLinear

LOGIT_BYTES = 2**27  # of the float32 logits that are computed at once


class HiddenRecorder(CachedBlocks):
    """Computes blocks as `blocks` does, and keeps the hidden states of the last pass: (N, D) for packed tokens."""

    narrows = False

    def __init__(self, blocks: CachedBlocks):
        self._blocks = blocks
        self.hidden_ND: Tensor

    def attention(
        self, attn: Attention, residual_BTD: Tensor, delta_BTD: Tensor, layer_cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        return self._blocks.attention(attn, residual_BTD, delta_BTD, layer_cache)

    def mlp(self, mlp: MLP | MoE, residual_BTD: Tensor, delta_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return self._blocks.mlp(mlp, residual_BTD, delta_BTD)

    def final(self, operator: AddNormLinear, residual_BTD: Tensor, delta_BTD: Tensor) -> Tensor:
        hidden_1ND = self._blocks.final(operator, residual_BTD, delta_BTD)
        self.hidden_ND = hidden_1ND[0]
        return hidden_1ND


def score_parts(model: Transformer, hidden_ND: Tensor, parts: Sequence[tuple[RowState, int]]) -> None:
    """Add a pass's results to the rows' `scores`.

    Args:
        hidden_ND: Final hidden states of the packed parts, perhaps with padding after them.
        parts: Rows and their numbers of tokens in this pass; `prefilled` is that after the pass.
    """
    start = 0
    for row, count in parts:
        part_TD = hidden_ND[start : start + count]
        start += count
        scores, request = row.scores, row.request
        assert scores is not None
        if request.embed:
            total_D = part_TD.double().sum(0).cpu()
            scores.hidden_sum = total_D if scores.hidden_sum is None else scores.hidden_sum + total_D
        if request.prompt_logprobs is not None:
            first = row.prefilled - count + 1  # the hidden state of a token predicts the next one
            targets = row.prompt_tokens[first : row.prefilled + 1].tolist()
            pairs = token_logprobs(model, part_TD[: len(targets)], targets, request.prompt_logprobs)
            for logprob, top in pairs:
                scores.logprobs.append(logprob)
                scores.tops.append(top)


def token_logprobs(
    model: Transformer, hidden_TD: Tensor, targets: Sequence[int], top: int
) -> list[tuple[float, TopTokens]]:
    """Return the natural log-probability of each target after its hidden state, and the `top` most probable tokens."""
    results: list[tuple[float, TopTokens]] = []
    rows = max(1, LOGIT_BYTES // (4 * model.config.vocab_size))
    for start in range(0, len(targets), rows):
        logits_RV = model.logits(model.head_input(hidden_TD[None, start : start + rows]))[0].float()
        target_R1 = torch.tensor(targets[start : start + rows], device=logits_RV.device)[:, None]
        # Target and alternatives from one tensor: a target that is the most probable token has exactly its value.
        log_p_RV = logits_RV.log_softmax(-1)
        logprobs = log_p_RV.gather(1, target_R1)[:, 0].tolist()
        if not top:
            results += [(logprob, ()) for logprob in logprobs]
            continue
        top_RK = ranked(logits_RV, top)
        top_logprobs = log_p_RV.gather(1, top_RK).tolist()
        for logprob, tokens, values in zip(logprobs, top_RK.tolist(), top_logprobs, strict=True):
            results.append((logprob, tuple(zip(tokens, values, strict=True))))
    return results
