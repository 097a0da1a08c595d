"""Device-side state of the rows, and the prefill and decoding steps that update it.

Each slot of the state holds one running row. A step computes a batch of lanes; `lanes_B` contains the slot of each.
Lanes without a row, which pad the batch, use the last slot, a dummy. A step updates the state in place and returns a
`StepOutput`. The host need not read the tokens of a step before it queues the next one, and a step can be captured in a
CUDA graph, unless the model itself synchronizes with the device.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from deskside.engine.adjustments import Adjustments
from deskside.engine.fused import FusedBlocks, experts_wait
from deskside.engine.grammar import MASK_BITS, forbid
from deskside.engine.prompts import PackedPrompts
from deskside.engine.requests import EngineStepOptions, Request, RowState, TokenOutput
from deskside.engine.sampling import GREEDY, DrawnTokens, SamplingTensors, draw
from deskside.kernels.decode import KERNEL_DTYPES, kernel_supports
from deskside.kernels.decode_step import greedy_tokens, write_state
from deskside.kernels.prefill import packed_kernel_supports
from deskside.model.block import CachedBlocks
from deskside.model.cache import KVCache, allocate_pool
from deskside.model.transformer import Transformer
from deskside.precision.row_adapters import RowChoice

STAGED_BYTES = 2**16  # copies from pageable memory up to this size do not wait for the device


class CachedModel:
    """A model and its paged KV cache.

    pages: number of pages, besides page 0, where padding is written. limit: maximum tokens of a row. adapters: of the
    model, which rows choose.
    """

    def __init__(
        self, model: Transformer, pages: int, page_size: int, limit: int, adapters: RowChoice | None = None
    ):
        self.model, self._adapters = model, adapters
        device = model.embed.weight.device
        k, v = allocate_pool(model.config, pages + 1, page_size, model.activation_dtype, device)
        none = torch.zeros(0, 1, dtype=torch.int64, device=device)
        self.cache = KVCache(k, v, none, none[:, 0], limit, managed=True)
        # On a CPU the fused blocks are plain torch, and no faster.
        fused = device.type == "cuda" and model.activation_dtype in KERNEL_DTYPES
        self.blocks = FusedBlocks(model) if fused else CachedBlocks()
        if adapters is not None:
            self.blocks.narrows = False  # a pass has one choice of adapters, for all of its tokens
        self._can_capture: dict[int, bool] = {}  # by number of tokens of a prefill pass

    @property
    def nbytes(self) -> int:
        """Size of the keys and values in bytes."""
        return self.cache.k.nbytes + self.cache.v.nbytes

    def can_capture_decode(self, lanes: int, tokens: int) -> bool:
        """Return True if a decoding step with this many new tokens per lane never waits for the device.

        The products of experts may wait, and so may attention outside of the decoding kernel.
        """
        queries = tokens * self.model.config.num_attention_heads // self.model.config.num_key_value_heads
        return kernel_supports(queries, self.cache.k[0]) and not experts_wait(self.model, lanes * tokens)

    def can_capture_prefill(self, tokens: int) -> bool:
        """Return True if a prefill pass of this many tokens never waits for the device."""
        if tokens not in self._can_capture:
            heads = self.model.config.num_attention_heads
            supported = packed_kernel_supports(heads, self.cache.k[0])
            self._can_capture[tokens] = supported and not experts_wait(self.model, tokens)
        return self._can_capture[tokens]

    def choose(self, adapter_N: Tensor | None) -> None:
        """Choose the adapter of each token of the next pass; None if none has one."""
        if self._adapters is not None:
            self._adapters.set(adapter_N)

    def prefill(
        self,
        tokens_1N: Tensor,
        table_LN: Tensor,
        lengths_L: Tensor,
        cu_seqlens: Tensor,
        blocks: CachedBlocks | None = None,
    ) -> Tensor:
        """Append packed prompts, or parts of them, to the cache. Return the logits of each row's last token: (L, V).

        table_LN, lengths_L, cu_seqlens: see kernels/prefill.py. blocks: in place of `self.blocks`.
        """
        view = self.cache.view_packed(table_LN, lengths_L, cu_seqlens)
        return self.model.forward_cached(tokens_1N, view, logits_of="last", blocks=blocks or self.blocks)[
            :, 0
        ]

    def decode(self, tokens_BT: Tensor, table_BN: Tensor, lengths_B: Tensor, bound: int) -> Tensor:
        """Append T tokens to each row of the cache and return their logits: (B, T, V)."""
        view = self.cache.view_rows(table_BN, lengths_B, bound)
        return self.model.forward_cached(tokens_BT, view, blocks=self.blocks)


@dataclass(frozen=True)
class StepOutput:
    """The sampled tokens of each lane: up to W, of which the first count_B are valid, with logprobs if requested.

    count_B is None if all W are valid. The other fields are those of `DrawnTokens`, with W positions.
    """

    token_BW: Tensor
    count_B: Tensor | None = None
    logprob_BW: Tensor | None = None
    sampled_logprob_BW: Tensor | None = None
    top_token_BWK: Tensor | None = None
    top_logprob_BWK: Tensor | None = None

    @staticmethod
    def of(drawn: DrawnTokens) -> "StepOutput":
        """Return the output of a step with one token per lane."""
        logprobs = (drawn.logprob_B, drawn.sampled_logprob_B, drawn.top_token_BK, drawn.top_logprob_BK)
        return StepOutput(
            drawn.token_B[:, None], None, *(None if x is None else x[:, None] for x in logprobs)
        )

    @staticmethod
    def joined(outputs: Sequence["StepOutput"]) -> "StepOutput":
        """Return the outputs of consecutive steps of the same lanes, all of whose tokens are valid, as one."""

        def join(name: str) -> Tensor | None:
            parts = [part for output in outputs if (part := getattr(output, name)) is not None]
            return torch.cat(parts, dim=1) if parts else None

        logprobs = (join(field.name) for field in fields(StepOutput)[2:])
        return StepOutput(torch.cat([output.token_BW for output in outputs], dim=1), None, *logprobs)

    def packed(self) -> Tensor:
        """Return all fields as one tensor (B, 1 + W, 1 + 3 W or 1 + 3 W + 2 W K), to copy it to the host at once.

        int64 without logprobs, else float64, which represents every token id exactly.
        """
        W = self.token_BW.shape[1]
        count_B1 = torch.full_like(self.token_BW[:, :1], W) if self.count_B is None else self.count_B[:, None]
        tops = (self.top_token_BWK, self.top_logprob_BWK)
        parts = [self.token_BW, self.logprob_BW, self.sampled_logprob_BW]
        parts += [None if top is None else top.flatten(1) for top in tops]
        present = [count_B1, *(part for part in parts if part is not None)]
        if len(present) > 2:
            present = [part.double() for part in present]
        return torch.cat(present, dim=1)


def unpack(packed: list[float], logprobs: bool, top: int = 0) -> list[TokenOutput]:
    """Return the valid tokens of one lane of `StepOutput.packed`. logprobs, top: of the step's options."""
    count, *values = packed
    if not logprobs:
        return [TokenOutput(int(token)) for token in values[: int(count)]]
    W = len(values) // (3 + 2 * top)
    outputs = []
    for i in range(int(count)):
        start, K = 3 * W + i * top, W * top
        pairs = zip(values[start : start + top], values[start + K : start + K + top], strict=True)
        tops = tuple((int(token), logprob) for token, logprob in pairs)
        outputs.append(TokenOutput(int(values[i]), values[W + i], values[2 * W + i], tops))
    return outputs


class Slots:
    """The rows' state on the device. The first dimension S is the slots and one dummy.

    Attributes:
        state_S3: int64: the newest token, which is not in the cache yet; tokens in the cache; new tokens so far.
        table_SN: int64, the pages of each row.
        settings: Sampling settings.
        adapter_S: int64, numbers of the rows' adapters.
        adjustments: Of each slot; None until a request has some.
        allowed_SW: int32, the tokens that a grammar allows next, see `grammar.MaskBuilder.masks`; None until a request
            has a grammar.
    """

    def __init__(self, slots: int, pages_per_row: int, vocabulary: int, device: torch.device):
        self.dummy = slots
        self.vocabulary = vocabulary
        self.device = device
        self.state_S3 = torch.zeros(slots + 1, 3, dtype=torch.int64, device=device)
        self.table_SN = torch.zeros(slots + 1, pages_per_row, dtype=torch.int64, device=device)
        self.settings = SamplingTensors.of([GREEDY] * (slots + 1), [0] * (slots + 1), device)
        self.adapter_S = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self.adjustments: Adjustments | None = None
        self._adjusted: set[int] = set()  # slots that have some, on the host
        self.allowed_SW: Tensor | None = None

    def to_device(self, values: Sequence[int]) -> Tensor:
        """Copy integers to the device as int64, without waiting for it."""
        return self.copy(torch.tensor(values, dtype=torch.int64))

    def copy(self, host: Tensor) -> Tensor:
        """Copy a tensor from the host to the device, without waiting for it.

        The driver stages small copies from pageable memory before the call returns, so the host tensor may be freed.
        For large ones it would first wait for the device; from pinned memory it does not.
        """
        if self.device.type == "cuda" and host.nbytes > STAGED_BYTES:
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def fill(self, rows: Sequence[RowState]) -> None:
        """Initialize the slots of new rows, whose pages already hold their `prefilled` tokens."""
        N = self.table_SN.shape[1]
        integers = array("q")  # a tensor is made from it much faster than from lists
        for row in rows:
            integers.extend((row.slot, 0, row.prefilled, 0, row.request.adapter, *row.settings.integers))
            integers.extend(row.pages)
            integers.frombytes(bytes(8 * (N - len(row.pages))))
        on_device = self.copy(torch.frombuffer(integers, dtype=torch.int64)).view(len(rows), -1)
        floats = torch.tensor([row.settings.floats for row in rows], dtype=torch.float32)
        slots, state, adapter, settings, table = on_device.split_with_sizes((1, 3, 1, 2, N), 1)
        slots = slots[:, 0]
        self.table_SN.index_copy_(0, slots, table)
        self.state_S3.index_copy_(0, slots, state)
        self.adapter_S.index_copy_(0, slots, adapter[:, 0])
        self.settings.integers.index_copy_(0, slots, settings)
        self.settings.floats.index_copy_(0, slots, self.copy(floats))
        if self.allowed_SW is not None:
            self.allowed_SW[slots] = -1  # all tokens

    def start_adjustments(self, slot: int, request: Request) -> None:
        """Initialize the adjustments of a new row. Without any, drop those of the slot's last row."""
        if not request.adjusts:
            if slot in self._adjusted and self.adjustments is not None:
                self.adjustments.clear(slot)
                self._adjusted.remove(slot)
            return
        self._adjusted.add(slot)
        if self.adjustments is None:
            self.adjustments = Adjustments.empty(self.dummy + 1, self.vocabulary, self.device)
        prompt = self.to_device(request.prompt)
        ends = (
            [token for token in request.end_tokens if token < self.vocabulary] if request.min_tokens else []
        )
        self.adjustments.start(slot, prompt, request.sampling, ends, request.min_tokens)

    def count_tokens(self, lanes_B: Tensor, token_BT: Tensor, valid_B: Tensor | None = None) -> None:
        """Count new tokens of the lanes. valid_B: how many of the T are valid; None for all."""
        assert self.adjustments is not None
        for place, token_B in enumerate(token_BT.unbind(1)):
            self.adjustments.count(lanes_B, token_B, None if valid_B is None else valid_B > place)

    def allow(self, slots: list[int], masks: Tensor) -> None:
        """Set the tokens that grammars allow next in these slots. masks: from `MaskBuilder.masks`."""
        if self.allowed_SW is None:
            shape = (self.dummy + 1, -(-self.vocabulary // MASK_BITS))
            self.allowed_SW = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        self.allowed_SW[self.to_device(slots)] = self.copy(masks)

    def adjustments_of(self, lanes_B: Tensor, options: EngineStepOptions) -> Adjustments | None:
        """Return the adjustments of the lanes; None if no row of the step has any."""
        return self.adjustments[lanes_B] if options.adjusted and self.adjustments is not None else None

    def adapters_of(self, lanes_B: Tensor, options: EngineStepOptions) -> Tensor | None:
        """Return the adapters of the lanes; None if no row of the step has one."""
        return self.adapter_S[lanes_B] if options.adapted else None

    def read(self, lanes_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the newest tokens, the cached lengths and the numbers of new tokens of the lanes."""
        token_B, length_B, count_B = self.state_S3[lanes_B].unbind(1)
        return token_B, length_B, count_B

    def write(
        self, lanes_B: Tensor, token_B: Tensor, length_B: Tensor, count_B: Tensor, added: int = 0
    ) -> None:
        """Set what `read` returns, with token 0 for NOT_FINITE. The dummy slot stays zero.

        added: to lengths and counts.
        """
        write_state(self.state_S3, lanes_B, token_B, length_B, count_B, added)


def prefill(
    models: tuple[CachedModel, ...],
    slots: Slots,
    prompts: PackedPrompts,
    options: EngineStepOptions,
    blocks: CachedBlocks | None = None,
) -> StepOutput:
    """Prefill parts of prompts. Rows whose prompt is complete get their first token; ignore the output of the others.

    models: the model, and the draft model if there is one, whose logits are not used. blocks: how the model's blocks
    are computed, if not as usual.
    """
    lanes_L = prompts.lanes_L
    _, length_L, num_new_L = slots.read(lanes_L)
    table_LN = slots.table_SN[lanes_L]
    models[0].choose(slots.adapters_of(prompts.lanes_N, options) if options.adapted else None)
    packed = (prompts.tokens_1N, table_LN, length_L, prompts.cu_seqlens)
    logits_LV, *_ = [
        model.prefill(*packed) if index or blocks is None else model.prefill(*packed, blocks)
        for index, model in enumerate(models)
    ]
    drawn = _draw(slots, lanes_L, logits_LV, num_new_L, options)
    counts_L = prompts.cu_seqlens.diff()
    slots.write(lanes_L, drawn.token_B, length_L + counts_L, num_new_L + prompts.complete_L)
    if options.adjusted:
        slots.count_tokens(lanes_L, drawn.safe_token_B[:, None], prompts.complete_L)
    return StepOutput.of(drawn)


def decode(
    models: tuple[CachedModel, ...],
    slots: Slots,
    lanes_B: Tensor,
    bound: int,
    options: EngineStepOptions,
    num_tokens: int = 1,
) -> StepOutput:
    """Generate `num_tokens` tokens for each lane, one after the other, also after an end token.

    models: see `prefill`. bound: maximum length of a row, including the new tokens.
    """
    drawn = [_decode_one(models, slots, lanes_B, bound, options) for _ in range(num_tokens)]
    return drawn[0] if num_tokens == 1 else StepOutput.joined(drawn)


def _decode_one(
    models: tuple[CachedModel, ...], slots: Slots, lanes_B: Tensor, bound: int, options: EngineStepOptions
) -> StepOutput:
    token_B, length_B, count_B = slots.read(lanes_B)
    table_BN = slots.table_SN[lanes_B]
    models[0].choose(slots.adapters_of(lanes_B, options))
    logits_BTV, *_ = [model.decode(token_B[:, None], table_BN, length_B, bound) for model in models]
    drawn = _draw(slots, lanes_B, logits_BTV[:, 0], count_B, options)
    slots.write(lanes_B, drawn.token_B, length_B, count_B, added=1)
    if options.adjusted:
        slots.count_tokens(lanes_B, drawn.safe_token_B[:, None])
    return StepOutput.of(drawn)


def _draw(
    slots: Slots, lanes_B: Tensor, logits_BV: Tensor, count_B: Tensor, options: EngineStepOptions
) -> DrawnTokens:
    if options.only_argmax:  # without the settings, whose gathers are two kernels
        return DrawnTokens(greedy_tokens(logits_BV), None, None)
    settings = slots.settings[lanes_B]
    adjustments = slots.adjustments_of(lanes_B, options)
    adjusted_BV = logits_BV if adjustments is None else adjustments.apply(logits_BV, settings, count_B)
    if options.constrained and slots.allowed_SW is not None:
        adjusted_BV = forbid(adjusted_BV, slots.allowed_SW[lanes_B])
    return draw(logits_BV, settings, options.width, count_B, adjusted_BV, options.logprobs, options.top)
