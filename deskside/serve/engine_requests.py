"""Conversion of an API request to engine requests."""

import os
from collections.abc import Sequence

from tokenizers import Tokenizer

from deskside.engine.adjustments import check_adjustments
from deskside.engine.grammar import Grammar
from deskside.engine.requests import Request
from deskside.serve.protocol import ApiError, ChatRequest, CompletionRequest, field_error
from deskside.serve.responses import Echo
from deskside.serve.service import Service
from deskside.utils.errors import UsageError


def engine_requests(
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[Sequence[int]],
    service: Service,
    grammar: Grammar | None,
    skip_special_tokens: bool,
) -> list[Request]:
    """Return one engine request per prompt. Raises ApiError for values that are out of range."""
    max_tokens = service.max_tokens if body.max_new_tokens is None else body.max_new_tokens
    if max_tokens > service.max_tokens:
        is_new_name = isinstance(body, ChatRequest) and body.max_completion_tokens is not None
        field = "max_completion_tokens" if is_new_name else "max_tokens"
        raise ApiError(
            400, f"{field}: {max_tokens} exceeds this server's maximum of {service.max_tokens}", param=field
        )
    seed = int.from_bytes(os.urandom(8)) if body.seed is None else body.seed % (1 << 64)
    samples = body.samples_per_prompt
    scored = isinstance(body, CompletionRequest) and body.echo
    try:
        check_adjustments(body.sampling(), body.stop_token_ids or (), service.loaded.config.vocab_size)
        return [
            Request(
                tuple(prompt),
                min(max_tokens, service.max_length - len(prompt)),
                body.sampling(),
                seed,
                samples=samples,
                first_sample=number * samples,
                eos_tokens=frozenset() if body.ignore_eos else service.loaded.eos_tokens,
                stop_tokens=frozenset(body.stop_token_ids or ()),
                stop_strings=body.stop_strings,
                # The best of several samples is chosen by their log-probabilities.
                logprobs=body.wants_logprobs or samples > body.choices_per_prompt,
                grammar=grammar,
                adapter=service.adapter_number(body.model),
                skip_special_tokens=skip_special_tokens,
                continues_text=isinstance(body, CompletionRequest),
                min_tokens=body.min_tokens,
                top_logprobs=body.num_top_logprobs,
                prompt_logprobs=body.num_top_logprobs if scored and body.wants_logprobs else None,
            )
            for number, prompt in enumerate(prompts)
        ]
    except UsageError as error:
        raise field_error(error) from None


def echoes(
    body: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> list[Echo]:
    """Return the prompts as the response repeats them; none unless the request asks for it."""
    if not (isinstance(body, CompletionRequest) and body.echo):
        return []
    return [
        Echo(given, tokens, starts_text=False)
        if isinstance(given, str)
        else Echo(str(tokenizer.decode(tokens, skip_special_tokens=False)), tokens, starts_text=True)
        for given, tokens in zip(body.prompts(), prompts, strict=True)
    ]
