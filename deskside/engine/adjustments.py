"""Changes to the logits of a row before temperature and filters: bias, minimum length and penalties.

They are applied in this order, which is vLLM's:

    logit_bias          is added to the logits of the tokens that it names
    min_tokens          removes the end tokens until the answer has this many tokens
    repetition_penalty  divides the logits of tokens in the prompt or the answer if they are positive, else multiplies
                        them (Keskar et al. 2019, arXiv 1909.05858, as in transformers)
    frequency_penalty   is subtracted once for each time that the token occurs in the answer (as in OpenAI's API)
    presence_penalty    is subtracted once if the token occurs in the answer (as in OpenAI's API)

All of this is kept in tensors on the device with one row per slot, so a step with adjustments can be captured in a CUDA
graph and generate several tokens per replay, like any other. The tensors are allocated once a request needs them. A
step that has no row with adjustments does not touch them.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from deskside.engine.sampling import Sampling, SamplingTensors
from deskside.utils.errors import UsageError

MAX_BIASES = 1024  # entries of logit_bias
MAX_STOP_TOKENS = 64
MAX_END_TOKENS = 2 * MAX_STOP_TOKENS  # end-of-text and stop tokens of a request


@dataclass(frozen=True)
class Adjustments:
    """The adjustments of R rows, in addition to their sampling settings.

    Attributes:
        in_prompt_RV: bool, tokens of the prompt.
        count_RV: int32, how often each token occurs in the answer.
        bias_token_RK, bias_RK: int64 and float32. Unused entries repeat the first one, or add 0 to token 0.
        end_RE: int64, the end tokens. Unused entries repeat the first one.
        min_tokens_R: int64.
    """

    in_prompt_RV: Tensor
    count_RV: Tensor
    bias_token_RK: Tensor
    bias_RK: Tensor
    end_RE: Tensor
    min_tokens_R: Tensor

    @staticmethod
    def empty(rows: int, vocabulary: int, device: torch.device) -> "Adjustments":
        """Return rows without adjustments."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return Adjustments(
            zeros(vocabulary, dtype=torch.bool),
            zeros(vocabulary, dtype=torch.int32),
            zeros(MAX_BIASES),
            zeros(MAX_BIASES, dtype=torch.float32),
            zeros(MAX_END_TOKENS),
            zeros(),
        )

    def __getitem__(self, rows: Tensor) -> "Adjustments":
        return Adjustments(*(getattr(self, field.name)[rows] for field in fields(self)))

    @staticmethod
    def interleaved(positions: Sequence["Adjustments"]) -> "Adjustments":
        """Return the adjustments of T positions of each row as R * T rows, those of a row after one another."""
        return Adjustments(
            *(
                torch.stack([getattr(position, field.name) for position in positions], dim=1).flatten(0, 1)
                for field in fields(Adjustments)
            )
        )

    def start(
        self, slot: int, prompt: Tensor, sampling: Sampling, end_tokens: Sequence[int], min_tokens: int
    ) -> None:
        """Initialize the row of a new sample, in place. prompt: int64, on the same device."""
        device = self.count_RV.device
        self.in_prompt_RV[slot] = False
        self.in_prompt_RV[slot, prompt] = True
        self.count_RV[slot] = 0
        tokens, biases = zip(*(sampling.logit_bias or ((0, 0.0),)), strict=True)
        self.bias_token_RK[slot] = _padded(tokens, MAX_BIASES, torch.int64).to(device)
        self.bias_RK[slot] = _padded(biases, MAX_BIASES, torch.float32).to(device)
        self.end_RE[slot] = _padded(end_tokens or (0,), MAX_END_TOKENS, torch.int64).to(device)
        self.min_tokens_R[slot] = min_tokens if end_tokens else 0

    def clear(self, slot: int) -> None:
        """Remove bias and minimum of a row. Its penalties are sampling settings."""
        self.bias_RK[slot].zero_()
        self.min_tokens_R[slot].zero_()

    def count(self, slots_B: Tensor, token_B: Tensor, valid_B: Tensor | None = None) -> None:
        """Count a new token of each of these different rows, in place. valid_B: 1 where there is one; None for all."""
        seen_B = self.count_RV[slots_B, token_B]
        self.count_RV[slots_B, token_B] = seen_B + (1 if valid_B is None else valid_B.int())

    def after(self, token_R: Tensor) -> "Adjustments":
        """Return the adjustments of the next position, with one more token in each row."""
        ones_R1 = torch.ones_like(token_R, dtype=torch.int32)[:, None]
        count_RV = self.count_RV.scatter_add(1, token_R[:, None], ones_R1)
        return Adjustments(
            self.in_prompt_RV,
            count_RV,
            self.bias_token_RK,
            self.bias_RK,
            self.end_RE,
            self.min_tokens_R,
        )

    def apply(self, logits_RV: Tensor, settings: SamplingTensors, length_R: Tensor) -> Tensor:
        """Return the adjusted logits in float32. length_R: int64, tokens of the answer so far."""
        # Entries that name a token twice write the same value, so the order of writing does not matter.
        logits_RV = logits_RV.float()
        biased_RK = logits_RV.gather(1, self.bias_token_RK) + self.bias_RK
        logits_RV = logits_RV.scatter(1, self.bias_token_RK, biased_RK)
        early_R1 = (length_R < self.min_tokens_R)[:, None]
        ends_RE = logits_RV.gather(1, self.end_RE).masked_fill(early_R1, -torch.inf)
        logits_RV = logits_RV.scatter(1, self.end_RE, ends_RE)
        in_answer_RV = self.count_RV > 0
        logits_RV = penalise(logits_RV, self.in_prompt_RV | in_answer_RV, settings.repetition_penalty_B)
        logits_RV = logits_RV - settings.frequency_penalty_B[:, None] * self.count_RV
        return logits_RV - settings.presence_penalty_B[:, None] * in_answer_RV


def penalise(logits_BV: Tensor, seen_BV: Tensor, penalty_B: Tensor) -> Tensor:
    """Return float32 logits with the repetition penalty applied to seen tokens."""
    logits_BV = logits_BV.float()
    penalty_B1 = penalty_B[:, None]
    changed_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV, changed_BV, logits_BV)


def check_adjustments(sampling: Sampling, stop_tokens: Collection[int], vocabulary: int) -> None:
    """Raise UsageError for a bias or stop tokens that do not fit the tables or are outside of the vocabulary."""
    fields = {"logit_bias": [token for token, _ in sampling.logit_bias], "stop_token_ids": stop_tokens}
    for (name, tokens), most in zip(fields.items(), (MAX_BIASES, MAX_STOP_TOKENS), strict=True):
        if len(tokens) > most:
            raise UsageError(f"{name}: {len(tokens)} entries; give at most {most}")
        invalid = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if invalid is not None:
            raise UsageError(
                f"{name}: token {invalid} is outside of the model's vocabulary of {vocabulary} tokens"
            )


def _padded(values: Sequence[float], size: int, dtype: torch.dtype) -> Tensor:
    """Return the values as a tensor of this size, in which the first one fills the rest."""
    return torch.tensor([*values, *[values[0]] * (size - len(values))], dtype=dtype)
