"""Sampling of the next token from logits.

The settings are applied in this order. Each filter sees the renormalized distribution that the previous ones left:

    bias and penalties  see adjustments.py
    grammar             removes the tokens that may not come next (grammar.py)
    temperature         divides the logits; 0 is greedy and ignores the filters below
    top_k               keeps the k most probable tokens
    top_p               keeps the smallest set of most probable tokens with at least this total probability
                        (nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751)
    min_p               keeps tokens with at least this share of the top token's probability
                        (Nguyen et al. 2024, arXiv 2407.01082)

Equal logits are ordered by token id, so top_k keeps exactly k.

A token is sampled with the Gumbel-max trick (Maddison et al. 2014, arXiv 1411.0030) in its exponential form: each
candidate gets an exponential random number divided by its probability, and the smallest wins. The random number is a
function of the row's stream, its number of tokens and the candidate (counter_rng.py). So the result depends neither on
the order of the candidates nor on the rest of the batch, up to rounding, and the vocabulary is sorted only if a filter
needs it.

The settings of each row are tensors, so the host need not read them during a step. It only needs to know how many
candidates to sort (`ranking_width`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deskside.engine import counter_rng
from deskside.kernels.decode_step import FIXED_POINT_ONE, NOT_FINITE, greedy_tokens
from deskside.utils.errors import UsageError

# Special values of a ranking width, which is otherwise a number of most probable tokens: all rows are greedy; no row
# needs sorted candidates; the whole vocabulary is sorted.
GREEDY_ONLY, UNRANKED, ALL = 0, -1, -2
# Bounds of the settings. Outside of them float32 overflows, or one setting decides everything: with a repetition
# penalty of 1e-39, tokens of the prompt would always win, even control tokens.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 100.0
MAX_TOP_K = 2**31 - 1
MIN_PENALTY, MAX_PENALTY = 0.1, 10.0  # bounds of the repetition penalty
MAX_SUBTRACTED = 2.0  # presence and frequency penalty, either sign; OpenAI's bound
MAX_BIAS = 100.0  # either sign; OpenAI's bound, which excludes a token or makes it certain
TOP_LOGPROBS = 20  # maximum number of most probable tokens with log-probabilities
WIDTHS = (64, 256, 1024, 4096)  # ranking widths; few, because each has its own CUDA graph
SORTED_BY_KERNEL = 64  # largest width for which kernels/draw_triton.py sorts; a search is faster for more


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. None disables a filter. Raises UsageError for values out of range.

    logit_bias: pairs of a token and what is added to its logit; no token occurs twice.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def adjusts(self) -> bool:
        """True if a bias or penalty changes the logits (adjustments.py)."""
        penalties = (self.repetition_penalty != 1, self.presence_penalty != 0, self.frequency_penalty != 0)
        return any(penalties) or bool(self.logit_bias)

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise UsageError(
                f"temperature: must be 0 (greedy), or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}, "
                f"not {self.temperature}; try 0.8"
            )
        if self.top_k is not None and not 1 <= self.top_k <= MAX_TOP_K:
            raise UsageError(
                f"top_k: must be between 1 and {MAX_TOP_K}, not {self.top_k}; leave it out to keep every token"
            )
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not 0 < share <= 1:
                raise UsageError(
                    f"{name}: must be above 0 and at most 1, not {share}; leave it out to disable it"
                )
        if not MIN_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise UsageError(
                f"repetition_penalty: must be between {MIN_PENALTY:g} and {MAX_PENALTY:g}, not "
                f"{self.repetition_penalty}; 1 disables it"
            )
        subtracted = {
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        for name, value in subtracted.items():
            if not -MAX_SUBTRACTED <= value <= MAX_SUBTRACTED:
                raise UsageError(
                    f"{name}: must be between {-MAX_SUBTRACTED:g} and {MAX_SUBTRACTED:g}, not {value}; 0 disables it"
                )
        for token, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise UsageError(
                    f"logit_bias: must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {bias} (token {token})"
                )


GREEDY = Sampling(temperature=0.0)


class SamplingValues(NamedTuple):
    """The sampling settings of one row on the host: a row of `SamplingTensors.floats` and one of its `integers`."""

    floats: tuple[float, float, float, float, float, float]
    integers: tuple[int, int]

    @staticmethod
    def of(sampling: Sampling, stream: int) -> "SamplingValues":
        """Return the values of a row. A disabled filter gets a value that keeps every token."""
        floats = (
            sampling.temperature,
            2.0 if sampling.top_p is None else sampling.top_p,
            sampling.min_p or 0.0,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        return SamplingValues(floats, (1 << 40 if sampling.top_k is None else sampling.top_k, stream))


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling settings of B rows. There are only two tensors, so that indexing rows takes few kernels."""

    # (B, 6) float32: temperature, top_p, min_p, then repetition, presence and frequency penalty
    floats: Tensor
    integers: Tensor  # (B, 2) int64: top_k, random stream

    @staticmethod
    def of(
        samplings: Sequence[Sampling], streams: Sequence[int], device: torch.device | str
    ) -> "SamplingTensors":
        """Return the settings of rows with these samplings and random streams."""
        rows = [
            SamplingValues.of(sampling, stream) for sampling, stream in zip(samplings, streams, strict=True)
        ]
        return SamplingTensors(
            torch.tensor([row.floats for row in rows], dtype=torch.float32, device=device).view(-1, 6),
            torch.tensor([row.integers for row in rows], dtype=torch.int64, device=device).view(-1, 2),
        )

    @property
    def temperature_B(self) -> Tensor:
        return self.floats[:, 0]

    @property
    def top_p_B(self) -> Tensor:
        return self.floats[:, 1]

    @property
    def min_p_B(self) -> Tensor:
        return self.floats[:, 2]

    @property
    def repetition_penalty_B(self) -> Tensor:
        return self.floats[:, 3]

    @property
    def presence_penalty_B(self) -> Tensor:
        return self.floats[:, 4]

    @property
    def frequency_penalty_B(self) -> Tensor:
        return self.floats[:, 5]

    @property
    def top_k_B(self) -> Tensor:
        return self.integers[:, 0]

    @property
    def stream_B(self) -> Tensor:
        return self.integers[:, 1]

    def __getitem__(self, rows: Tensor) -> "SamplingTensors":
        return SamplingTensors(self.floats[rows], self.integers[rows])

    def repeated(self, times: int) -> "SamplingTensors":
        """Repeat each row, as `repeat_interleave` does."""
        return SamplingTensors(
            self.floats.repeat_interleave(times, 0), self.integers.repeat_interleave(times, 0)
        )


@dataclass(frozen=True)
class DrawnTokens:
    """One sampled token per row, and log-probabilities: natural logarithms, float32, None unless requested.

    Attributes:
        token_B: int64; NOT_FINITE where a logit of the row is NaN or +inf.
        logprob_B: Under the model's distribution at the row's temperature (1 if greedy), before adjustments and
            filters. A policy gradient needs this one, because the filters are not part of the policy.
        sampled_logprob_B: Under the distribution that the token was sampled from; 0 if greedy.
        top_token_BK, top_logprob_BK: The most probable tokens under the distribution of logprob_B, best first.
    """

    token_B: Tensor
    logprob_B: Tensor | None
    sampled_logprob_B: Tensor | None
    top_token_BK: Tensor | None = None
    top_logprob_BK: Tensor | None = None

    @property
    def safe_token_B(self) -> Tensor:
        """The token, or 0 in place of NOT_FINITE, so that it can index an embedding."""
        return self.token_B.clamp(min=0)


def ranking_width(samplings: Iterable[Sampling], vocabulary: int) -> int:
    """Return how many of the most probable tokens must be sorted to sample rows with these settings.

    May be ALL, or UNRANKED or GREEDY_ONLY if nothing needs to be sorted.
    """
    not_greedy = [s for s in samplings if s.temperature > 0]
    if not not_greedy:
        return GREEDY_ONLY
    if all(s.top_k is None and s.top_p is None for s in not_greedy):
        return UNRANKED
    needed = max(vocabulary if s.top_k is None else s.top_k for s in not_greedy)
    return next((width for width in WIDTHS if needed <= width < vocabulary), ALL)


def candidates(logits_BV: Tensor, settings: SamplingTensors, width: int) -> tuple[Tensor, Tensor]:
    """Return the filtered distribution and its tokens: (log_p_BW, token_BW).

    log_p_BW is float32 and normalized over W; it is -inf for tokens that a filter removed. The most probable token is
    first, except for width UNRANKED: then all tokens are in order of their ids. `width` must not be GREEDY_ONLY.
    """
    V = logits_BV.shape[1]
    greedy_B1 = (settings.temperature_B == 0)[:, None]
    scaled_BV = _scaled(logits_BV, settings)
    if width == UNRANKED:
        token_BW = torch.arange(V, device=logits_BV.device).expand_as(scaled_BV)
        scaled_BW = scaled_BV
        first_BW = token_BW == logits_BV.argmax(-1, keepdim=True)
        keep_BW = scaled_BW >= settings.min_p_B.log()[:, None]  # the maximum of scaled_BW is 0
    else:
        token_BW = ranked(logits_BV, V if width == ALL else width)
        scaled_BW = scaled_BV.gather(1, token_BW)
        rank_W = torch.arange(token_BW.shape[1], device=logits_BV.device)
        first_BW = (rank_W == 0).expand_as(token_BW)
        keep_BW = rank_W < settings.top_k_B[:, None]
        p_BW = scaled_BW.masked_fill(~keep_BW, -torch.inf).softmax(-1, dtype=torch.float64)
        # A token is kept if the more probable ones sum to less than top_p. The sum is in fixed point, because CUDA's
        # cumsum of floating-point numbers is not deterministic, and deterministic runs refuse it.
        share_BW = (p_BW * FIXED_POINT_ONE).long()
        keep_BW = keep_BW & (
            share_BW.cumsum(-1) - share_BW < settings.top_p_B[:, None].double() * FIXED_POINT_ONE
        )
        keep_BW = keep_BW & (scaled_BW >= scaled_BW[:, :1] + settings.min_p_B.log()[:, None])
    keep_BW = torch.where(greedy_B1, first_BW, keep_BW | first_BW)
    return scaled_BW.masked_fill(~keep_BW, -torch.inf).log_softmax(-1), token_BW


def draw(
    logits_BV: Tensor,
    settings: SamplingTensors,
    width: int,
    count_B: Tensor,
    adjusted_BV: Tensor | None = None,
    logprobs: bool = True,
    top: int = 0,
) -> DrawnTokens:
    """Sample the next token of each row.

    Args:
        width: The `ranking_width` of these settings, or a larger one.
        count_B: int64, new tokens of the row so far.
        adjusted_BV: The logits after adjustments and grammar; None if no row has either.
        top: Number of most probable tokens to return.
    """
    if adjusted_BV is None:
        adjusted_BV = logits_BV
    sampled_B = None
    if width == GREEDY_ONLY:
        token_B = greedy_tokens(adjusted_BV)
        sampled_B = torch.zeros_like(token_B, dtype=torch.float32) if logprobs else None
    elif adjusted_BV.is_cuda:
        token_B, sampled_B = _draw_by_kernels(adjusted_BV, settings, width, count_B)
    else:
        log_p_BW, token_BW = candidates(adjusted_BV, settings, width)
        winner_B1 = gumbel_argmax(log_p_BW, settings.stream_B, count_B, counter_rng.DRAW, token_BW)[:, None]
        token_B = token_BW.gather(1, winner_B1)[:, 0]
        # One NaN or +inf logit makes the normalized log-probability of every token NaN.
        decided_B = log_p_BW.gather(1, winner_B1)[:, 0]
        sampled_B = decided_B if logprobs else None
        token_B = torch.where(decided_B.isfinite(), token_B, NOT_FINITE)
    logprob_B = raw_logprobs(logits_BV, settings, token_B.clamp(min=0)[:, None])[:, 0] if logprobs else None
    if not top:
        return DrawnTokens(token_B, logprob_B, sampled_B)
    top_BK = ranked(logits_BV, top)
    return DrawnTokens(token_B, logprob_B, sampled_B, top_BK, raw_logprobs(logits_BV, settings, top_BK))


def _draw_by_kernels(
    logits_BV: Tensor, settings: SamplingTensors, width: int, count_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `DrawnTokens.token_B` and `sampled_logprob_B`. width: not GREEDY_ONLY."""
    from deskside.kernels.draw_triton import draw_from_pieces, draw_from_ranked

    assert settings.floats.is_contiguous() and settings.integers.is_contiguous()
    arguments = (logits_BV, settings.floats, settings.integers, count_B, counter_rng.DRAW)
    if 0 < width <= SORTED_BY_KERNEL:
        return draw_from_ranked(*arguments, width)
    return draw_from_pieces(*arguments, filtered=width != UNRANKED)


def raw_logprobs(logits_BV: Tensor, settings: SamplingTensors, token_BK: Tensor) -> Tensor:
    """Return `DrawnTokens.logprob_B` of the given tokens: (B, K)."""
    scaled_BV = _scaled(logits_BV, settings)
    return scaled_BV.gather(1, token_BK) - scaled_BV.logsumexp(-1, keepdim=True)


def gumbel_argmax(
    log_p_BW: Tensor, stream_B: Tensor, count_B: Tensor, purpose: int, token_BW: Tensor
) -> Tensor:
    """Sample from log_p_BW, which need not be normalized. Return indices of candidates: int64 (B,)."""
    return (log_p_BW - counter_rng.exponentials(stream_B, count_B, purpose, token_BW).log()).argmax(-1)


def ranked(logits_BV: Tensor, width: int) -> Tensor:
    """Return the tokens of the `width` largest logits in descending order, ties by token id: int64 (B, width).

    torch's topk does not specify the order of ties, which are frequent in bfloat16. So each logit is packed with its
    token into one integer key: the logit's bits, mapped so that integers sort like the floats, above the token.
    """
    V = logits_BV.shape[1]
    bits_BV = (logits_BV.float() + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    rising_BV = (bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)).long()
    key_BV = (rising_BV << 32) | torch.arange(V - 1, -1, -1, device=logits_BV.device)
    best_BW = key_BV.sort(descending=True)[0] if width >= V else key_BV.topk(width)[0]
    return V - 1 - (best_BW & 0xFFFFFFFF)


def _scaled(logits_BV: Tensor, settings: SamplingTensors) -> Tensor:
    """Return (logits - max) / temperature. The maximum is subtracted first, so a tiny temperature cannot overflow."""
    temperature_B1, logits_BV = settings.temperature_B[:, None], logits_BV.float()
    return (logits_BV - logits_BV.amax(-1, keepdim=True)) / torch.where(
        temperature_B1 > 0, temperature_B1, 1.0
    )
