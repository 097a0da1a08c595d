"""Fields of requests that decide how tokens are sampled and when an answer ends.

`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids` and `ignore_eos` are vLLM's; the others are
OpenAI's. engine/adjustments.py documents the penalties.
"""

from typing import Annotated

from pydantic import Field

from deskside.engine.adjustments import MAX_BIASES, MAX_STOP_TOKENS
from deskside.engine.sampling import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_SUBTRACTED,
    MAX_TOP_K,
    MIN_PENALTY,
    MIN_TEMPERATURE,
    Sampling,
)
from deskside.serve.strict_model import StrictModel

MAX_STOPS, MAX_STOP_CHARACTERS = 4, 256
MAX_CHOICES = 4096
MAX_INT32 = 2**31 - 1
MAX_SEED = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
TokenCount = Annotated[int, Field(ge=0, le=MAX_INT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Subtracted = Annotated[float, Field(ge=-MAX_SUBTRACTED, le=MAX_SUBTRACTED)]
TokenIdText = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class SamplingFields(StrictModel):
    """Fields of chat and text completion requests."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    max_tokens: TokenCount | None = None
    min_tokens: TokenCount = 0
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY)] | None = None
    frequency_penalty: Subtracted | None = None
    presence_penalty: Subtracted | None = None
    logit_bias: Annotated[dict[TokenIdText, Bias], Field(max_length=MAX_BIASES)] | None = None

    @property
    def choices_per_prompt(self) -> int:
        """Number of completions of each prompt in the response."""
        return self.n or 1

    @property
    def samples_per_prompt(self) -> int:
        """Number of completions of each prompt that are generated."""
        return self.choices_per_prompt

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self) -> Sampling:
        """Return the sampling parameters. OpenAI's default is temperature 1 over all tokens."""
        top_p = 1.0 if self.top_p is None else self.top_p
        temperature = 1.0 if self.temperature is None else self.temperature
        top_k = self.top_k if self.top_k and self.top_k > 0 else None  # 0 and -1 disable it
        if top_p == 0:
            top_k = 1  # only the most probable token
        return Sampling(
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,  # greedy
            top_k=top_k,
            top_p=top_p if 0 < top_p < 1 else None,
            min_p=self.min_p or None,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((int(token), bias) for token, bias in (self.logit_bias or {}).items()),
        )
