"""Batches of GRPO: sampled answers, packed into rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deskside.align.answers import AnswerBatch, TokenizedText, lay_out, pack_units, to_device
from deskside.align.grpo_data import Questions
from deskside.align.rollouts import Rollout
from deskside.config.align import GrpoConfig


@dataclass(frozen=True)
class RolloutBatch(AnswerBatch):
    """A micro-batch of S sampled answers.

    Its scored tokens are those that the model sampled; results of tools between them are not. sampled_SL:
    log-probabilities of the weights that sampled the answers. reference_SL: those of the initial weights,
    None without align.kl. in_loss_S: bool, True if the answer counts in the loss. cut_off_S: bool, True if the answer
    was truncated. tool_calls_S, tool_failures_S: numbers of tool calls and of failed ones.
    """

    sampled_SL: Tensor
    reference_SL: Tensor | None
    advantage_S: Tensor
    reward_S: Tensor
    in_loss_S: Tensor
    cut_off_S: Tensor
    tool_calls_S: Tensor
    tool_failures_S: Tensor


def loss_count(rollouts: Sequence[Rollout], options: GrpoConfig) -> int:
    """Return what the loss of a step is divided by: its answers, or the sampled tokens of those in the loss."""
    if options.average != "token":
        return len(rollouts)
    return sum(r.sampled.num_sampled for r in rollouts if _is_in_loss(r, options))


def pack_rollouts(rollouts: Sequence[Rollout], sequence_length: int) -> list[list[Rollout]]:
    """Return the answers of each row."""
    lengths = np.array([len(r.question.tokens) + len(r.sampled.tokens) - 1 for r in rollouts], np.int64)
    return [[rollouts[i] for i in row] for row in pack_units(lengths, sequence_length)]


def rollout_batch(
    questions: Questions,
    rows: Sequence[Sequence[Rollout]],
    options: GrpoConfig,
    step_count: int,
    device: torch.device,
) -> RolloutBatch:
    """Return the batch of rows of answers, without reference. step_count: `loss_count` of the step on all ranks."""
    texts = [[_text_of(rollout) for rollout in row] for row in rows]
    fields: dict[str, Any] = lay_out(
        texts, questions.sequence_length, questions.max_boundaries(len(rows)) + 1, questions.pad_token
    )
    flat = [rollout for row in rows for rollout in row]
    sampled_SL = torch.zeros(fields["mask_SL"].shape)
    sampled_SL[fields["mask_SL"]] = torch.tensor(
        [
            logprob
            for r in flat
            for logprob, own in zip(r.sampled.logprobs, r.sampled.is_own, strict=True)
            if own
        ]
    )
    fields |= {
        "sampled_SL": sampled_SL,
        "advantage_S": torch.tensor([r.advantage for r in flat]),
        "reward_S": torch.tensor([r.reward for r in flat]),
        "in_loss_S": torch.tensor([_is_in_loss(r, options) for r in flat], dtype=torch.bool),
        "cut_off_S": torch.tensor([not r.sampled.ended for r in flat], dtype=torch.bool),
        "tool_calls_S": torch.tensor([float(r.sampled.tool_calls) for r in flat]),
        "tool_failures_S": torch.tensor([float(r.sampled.tool_failures) for r in flat]),
    }
    count = sum(r.sampled.num_sampled for r in flat) if options.average == "token" else len(flat)
    return RolloutBatch(
        **to_device(fields, device), reference_SL=None, num_valid=count, num_valid_step=step_count
    )


def _is_in_loss(rollout: Rollout, options: GrpoConfig) -> bool:
    return options.learn_truncated or rollout.sampled.ended


def _text_of(rollout: Rollout) -> TokenizedText:
    question, sampled = rollout.question.tokens, rollout.sampled
    scored = len(question) + np.flatnonzero(sampled.is_own)
    return TokenizedText(np.array([*question, *sampled.tokens], np.int64), len(question), scored)
