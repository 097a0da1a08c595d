"""From logits to the next token.

The filters are applied one after another, each on what the one before left, renormalised:

    repetition_penalty  a token that prompt or answer hold already: its logit is divided by the penalty where it is
                        positive, else multiplied (Keskar et al. 2019, arXiv 1909.05858, as in transformers)
    temperature         logits / temperature; 0 is greedy and ignores the filters below
    top_k               the k most probable tokens
    top_p               the smallest set of most probable tokens that holds at least this probability
                        (nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751)
    min_p               tokens with at least this share of the best token's probability
                        (Nguyen et al. 2024, arXiv 2407.01082)

Equal logits are ordered by token id, so top_k keeps exactly k.

A token is drawn by a race: each candidate gets an exponential random number over its probability, and the smallest
wins, which happens with the candidate's probability (the Gumbel-max trick, Maddison et al. 2014, arXiv 1411.0030).
The numbers are a function of the row's stream, its count of tokens and the token (noise.py). So the winner depends on
the order in which candidates are looked at as little as on the rest of the batch, and the whole vocabulary is only
sorted where a filter needs it.

Every row has its own settings, as tensors, so that a step runs on the device without reading them. Only the number of
candidates to rank must be known before (`width_of`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deskside.engine import counter_rng
from deskside.utils.errors import UsageError

GREEDY_ONLY, UNRANKED, ALL = 0, -1, -2  # widths besides a number of best tokens
NOT_FINITE = -1  # instead of a token if the logits were NaN or infinite
# Bounds of the settings. Outside of them float32 overflows or a single term decides everything: a repetition penalty
# of 1e-39 lets every token of the prompt win, control tokens included.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 100.0
MAX_TOP_K = 2**31 - 1
MIN_PENALTY, MAX_PENALTY = 0.1, 10.0
WIDTHS = (64, 256, 1024, 4096)
ONE = 2.0**52  # a probability of 1 where probabilities are added up as integers


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. None disables a filter. Raises UsageError for values out of range."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise UsageError(
                f"temperature: {self.temperature} must be 0 (greedy), or between {MIN_TEMPERATURE:g} and "
                f"{MAX_TEMPERATURE:g}; try 0.8"
            )
        if self.top_k is not None and not 1 <= self.top_k <= MAX_TOP_K:
            raise UsageError(
                f"top_k: {self.top_k} must be between 1 and {MAX_TOP_K}; leave it out to keep every token"
            )
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not 0 < share <= 1:
                raise UsageError(
                    f"{name}: {share} must be above 0 and at most 1; leave it out to switch it off"
                )
        if not MIN_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise UsageError(
                f"repetition_penalty: {self.repetition_penalty} must be between {MIN_PENALTY:g} and "
                f"{MAX_PENALTY:g}; 1 switches it off"
            )


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Settings:
    """The samplings of rows. shares: (B, 4) float32, whole: (B, 2) int64; two tensors, so that rows are quickly taken
    out and put in."""

    shares: Tensor
    whole: Tensor

    @staticmethod
    def of(samplings: Sequence[Sampling], streams: Sequence[int], device: torch.device | str) -> "Settings":
        """A filter that is off gets a value that keeps everything. Copies to a GPU without waiting for it."""
        shares = [
            [s.temperature, 2.0 if s.top_p is None else s.top_p, s.min_p or 0.0, s.repetition_penalty]
            for s in samplings
        ]
        whole = [
            [1 << 40 if s.top_k is None else s.top_k, stream]
            for s, stream in zip(samplings, streams, strict=True)
        ]
        return Settings(
            torch.tensor(shares, dtype=torch.float32).view(-1, 4).to(device, non_blocking=True),
            torch.tensor(whole, dtype=torch.int64).view(-1, 2).to(device, non_blocking=True),
        )

    @staticmethod
    def stacked(rows: Sequence["Settings"], device: torch.device | str) -> "Settings":
        """Rows of several settings after one another. Copies to a GPU without waiting for it."""
        return Settings(
            torch.cat([row.shares for row in rows]).to(device, non_blocking=True),
            torch.cat([row.whole for row in rows]).to(device, non_blocking=True),
        )

    @property
    def temperature_B(self) -> Tensor:
        return self.shares[:, 0]

    @property
    def top_p_B(self) -> Tensor:
        return self.shares[:, 1]

    @property
    def min_p_B(self) -> Tensor:
        return self.shares[:, 2]

    @property
    def penalty_B(self) -> Tensor:
        return self.shares[:, 3]

    @property
    def top_k_B(self) -> Tensor:
        return self.whole[:, 0]

    @property
    def stream_B(self) -> Tensor:
        return self.whole[:, 1]

    def __getitem__(self, rows: Tensor) -> "Settings":
        return Settings(self.shares[rows], self.whole[rows])

    def put(self, rows: Tensor, other: "Settings") -> None:
        """Overwrite some rows."""
        self.shares[rows], self.whole[rows] = other.shares, other.whole

    def repeated(self, times: int) -> "Settings":
        """Every row `times` times, one after the other."""
        return Settings(self.shares.repeat_interleave(times, 0), self.whole.repeat_interleave(times, 0))


@dataclass(frozen=True)
class Drawn:
    """token: int64, NOT_FINITE where the row's logits are NaN or infinite.

    Two natural logarithms of its probability, float32:

    logprob: by the model at the row's temperature (1 where it is greedy), over the whole vocabulary, before penalty
        and filters. It is what a policy gradient needs: filters are not part of the policy.
    sampled_logprob: by the distribution that the token was drawn from; 0 where it is greedy.
    """

    token_B: Tensor
    logprob_B: Tensor | None  # None where it was not asked for
    sampled_logprob_B: Tensor | None

    @property
    def safe_token_B(self) -> Tensor:
        """The token, or 0 if there is none, so that it can index an embedding."""
        return self.token_B.clamp(min=0)


def width_of(samplings: Iterable[Sampling], vocabulary: int) -> int:
    """Return how many candidates must be sorted to sample rows with these settings.

    A number of most probable tokens, ALL, or UNRANKED or GREEDY_ONLY, which sort none.
    """
    drawn = [s for s in samplings if s.temperature > 0]
    if not drawn:
        return GREEDY_ONLY
    if all(s.top_k is None and s.top_p is None for s in drawn):
        return UNRANKED
    most = max(vocabulary if s.top_k is None else s.top_k for s in drawn)
    return next((width for width in WIDTHS if most <= width < vocabulary), ALL)


def candidates(logits_BV: Tensor, settings: Settings, width: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens that may be drawn, and the tokens: (log_p_BW, token_BW).

    log_p is float32, its exponentials sum to one in each row, and it is -inf where a filter removed the token.
    Most probable first, except where width is UNRANKED: then all tokens by number. Not for GREEDY_ONLY.
    """
    V = logits_BV.shape[1]
    greedy_B1 = (settings.temperature_B == 0)[:, None]
    scaled_BV = _scaled(logits_BV, settings)
    if width == UNRANKED:
        token_BW = torch.arange(V, device=logits_BV.device).expand_as(scaled_BV)
        scaled_BW = scaled_BV
        first_BW = token_BW == logits_BV.argmax(-1, keepdim=True)
        best_B1 = torch.zeros_like(scaled_BV[:, :1])  # the largest logit has been taken off
        keep_BW = scaled_BW >= best_B1 + settings.min_p_B.log()[:, None]
    else:
        token_BW = ranked(logits_BV, V if width == ALL else width)
        scaled_BW = scaled_BV.gather(1, token_BW)
        rank_W = torch.arange(token_BW.shape[1], device=logits_BV.device)
        first_BW = (rank_W == 0).expand_as(token_BW)
        keep_BW = rank_W < settings.top_k_B[:, None]
        p_BW = scaled_BW.masked_fill(~keep_BW, -torch.inf).softmax(-1, dtype=torch.float64)
        # A token stays while the tokens before it hold less than top_p; the first always stays. Added up as integers:
        # of floating-point numbers CUDA has no cumsum whose order is fixed, and a deterministic run refuses it.
        share_BW = (p_BW * ONE).long()
        keep_BW = keep_BW & (share_BW.cumsum(-1) - share_BW < settings.top_p_B[:, None].double() * ONE)
        keep_BW = keep_BW & (scaled_BW >= scaled_BW[:, :1] + settings.min_p_B.log()[:, None])
    keep_BW = torch.where(greedy_B1, first_BW, keep_BW | first_BW)
    return scaled_BW.masked_fill(~keep_BW, -torch.inf).log_softmax(-1), token_BW


def draw(
    logits_BV: Tensor,
    settings: Settings,
    width: int,
    count_B: Tensor,
    seen_BV: Tensor | None = None,
    logprobs: bool = True,
) -> Drawn:
    """The next token of each row. count_B: int64, how many tokens its stream has given; seen_BV: bool, see `penalise`.

    width: of these settings by `width_of`, or a wider one.
    """
    penalised_BV = logits_BV if seen_BV is None else penalise(logits_BV, seen_BV, settings.penalty_B)
    sampled_B = None
    if width == GREEDY_ONLY:
        token_B = penalised_BV.argmax(-1)  # of a row with NaN, the place of the NaN
        decided_B = penalised_BV.gather(1, token_B[:, None])[:, 0]
        sampled_B = torch.zeros_like(token_B, dtype=torch.float32) if logprobs else None
    else:
        log_p_BW, token_BW = candidates(penalised_BV, settings, width)
        winner_B1 = gumbel_argmax(log_p_BW, settings.stream_B, count_B, counter_rng.DRAW, token_BW)[:, None]
        token_B = token_BW.gather(1, winner_B1)[:, 0]
        # One NaN or infinite logit makes the normalised log-probability of every token NaN.
        decided_B = log_p_BW.gather(1, winner_B1)[:, 0]
        sampled_B = decided_B if logprobs else None
    logprob_B = raw_logprobs(logits_BV, settings, token_B) if logprobs else None
    return Drawn(torch.where(decided_B.isfinite(), token_B, NOT_FINITE), logprob_B, sampled_B)


def raw_logprobs(logits_BV: Tensor, settings: Settings, token_B: Tensor) -> Tensor:
    """`Drawn.logprob` of given tokens, float32."""
    scaled_BV = _scaled(logits_BV, settings)
    return scaled_BV.gather(1, token_B[:, None])[:, 0] - scaled_BV.logsumexp(-1)


def gumbel_argmax(
    log_p_BW: Tensor, stream_B: Tensor, count_B: Tensor, purpose: int, token_BW: Tensor
) -> Tensor:
    """Which candidate wins, int64 (B,). log_p needs no normalisation; -inf never wins."""
    return (log_p_BW - counter_rng.exponentials(stream_B, count_B, purpose, token_BW).log()).argmax(-1)


def penalise(logits_BV: Tensor, seen_BV: Tensor, penalty_B: Tensor) -> Tensor:
    """The repetition penalty on the tokens that a row has seen; float32."""
    logits_BV = logits_BV.float()
    penalty_B1 = penalty_B[:, None]
    changed_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    return torch.where(seen_BV, changed_BV, logits_BV)


def ranked(logits_BV: Tensor, width: int) -> Tensor:
    """Tokens of the `width` largest logits, largest first, equal ones by token id: int64 (B, width).

    Value and token are one integer, because torch's topk leaves the order of equal values open, and bfloat16 has many.
    """
    V = logits_BV.shape[1]
    bits_BV = (logits_BV.float() + 0.0).view(torch.int32)  # + 0.0: there is one zero
    rising_BV = (bits_BV ^ ((bits_BV >> 31) & 0x7FFFFFFF)).long()
    key_BV = (rising_BV << 32) | torch.arange(V - 1, -1, -1, device=logits_BV.device)
    best_BW = key_BV.sort(descending=True)[0] if width >= V else key_BV.topk(width)[0]
    return V - 1 - (best_BW & 0xFFFFFFFF)


def _scaled(logits_BV: Tensor, settings: Settings) -> Tensor:
    """Logits over the temperature. The largest is taken off first, so that a tiny temperature cannot overflow."""
    temperature_B1, logits_BV = settings.temperature_B[:, None], logits_BV.float()
    return (logits_BV - logits_BV.amax(-1, keepdim=True)) / torch.where(
        temperature_B1 > 0, temperature_B1, 1.0
    )
