"""POST /v1/embeddings: the mean over a text's tokens of the hidden states after the final norm.

This is mean pooling of transformers' `last_hidden_state`, over the same tokens as a prompt of completions has. The
vectors are not normalized.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from deskside.engine.requests import Request as EngineRequest
from deskside.engine.requests import SampleOutput
from deskside.serve.field_lists import IneffectiveFields, ShortText
from deskside.serve.protocol import ApiError, Prompts, prompt_list
from deskside.serve.service import Service

MAX_DIMENSIONS = 1 << 20


class EmbeddingRequest(IneffectiveFields):
    """POST /v1/embeddings. `input` is text, token ids, or a list of inputs of one kind."""

    model: ShortText | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None

    @property
    def characters(self) -> int:
        """Number of characters to tokenize, or of token ids to check."""
        return sum(map(len, self.prompts()))

    def prompts(self) -> Sequence[str | list[int]]:
        """Return the inputs as a list, even if there is only one."""
        return prompt_list(self.input)


def embedding_requests(
    body: EmbeddingRequest, prompts: Sequence[Sequence[int]], service: Service
) -> list[EngineRequest]:
    """Return one engine request per input. Raises ApiError for another number of dimensions than the model's."""
    size = service.loaded.config.hidden_size
    if body.dimensions not in (None, size):
        raise ApiError(
            400, f"dimensions: this model's embeddings have {size}; leave it out", param="dimensions"
        )
    adapter = service.adapter_number(body.model)
    return [EngineRequest(tuple(prompt), 0, embed=True, adapter=adapter) for prompt in prompts]


class EmbeddingWriter:
    """Creates the response."""

    def __init__(self, body: EmbeddingRequest, model: str):
        self._base64, self._model = body.encoding_format == "base64", model

    def complete(
        self, answers: Sequence[Sequence[SampleOutput]], prompt_lengths: Sequence[int], cached: Sequence[int]
    ) -> dict[str, Any]:
        """Return the response. base64: of float32 in little-endian order."""
        data = []
        for index, ((answer,), length) in enumerate(zip(answers, prompt_lengths, strict=True)):
            assert answer.prompt is not None and answer.prompt.hidden_sum is not None
            mean_D = (answer.prompt.hidden_sum / length).to(torch.float32)
            vector: Any = mean_D.tolist()
            if self._base64:
                vector = base64.b64encode(mean_D.numpy().astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": vector})
        total = sum(prompt_lengths)
        return {
            "object": "list",
            "data": data,
            "model": self._model,
            "usage": {"prompt_tokens": total, "total_tokens": total},
        }
