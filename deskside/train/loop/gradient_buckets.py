"""Sums of the gradients of all replicas, computed during the backward pass that completes them.

Gradients are summed in buckets that are fixed before the first step, in the order in which the backward finishes them:
from the head down to the embedding. Each large gradient is a separate bucket and is summed in place; the small ones
of consecutive sublayers share a bucket. A bucket is sent as soon as the last backward of the step has completed it and
all buckets before it, on a stream of its own. So every rank sends the same buckets in the same order in every run.
Consecutive buckets of less than `parallel.bucket_mib` are sent together, by one collective that still sums them in
place: few large collectives use the link better and disturb the backward less often, many small ones begin earlier.

torch's DDP is not used, because it regroups its buckets after the first step. The order of additions, and thus the last
bits of the sums, would then differ between a resumed run and an uninterrupted one. Each process divides its loss by the
number of targets of all processes, so gradients are summed, not averaged.

A matrix that one rank updates (`optim/owners.py`) is summed on that rank only; the others free their gradient of it.

In bfloat16, half the bytes travel: every rank sends each of the others its share of the bucket, adds up in float32
what it received, and sends the sum, rounded to bfloat16, to all. Each gradient and each sum is rounded to nearest once,
whatever the number of ranks. So the error of a sum is at most u (sum_r |g_r| + |sum_r g_r|) + u^2 sum_r |g_r| with
u = 2^-8, plus that of the additions in float32.
"""

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deskside.config.sections import DEFAULT_BUCKET_MIB
from deskside.kernels.functional import at_least_float32
from deskside.optim.groups import ParameterInfo
from deskside.optim.side_stream import WAITING, SideStream
from deskside.train.loop.gradient_hooks import call_after_gradient
from deskside.train.parallel import World

# Float32 bytes from which a gradient is summed separately, and a shared bucket is full. By default, each is a transfer.
BUCKET_BYTES = round(2**20 * DEFAULT_BUCKET_MIB)
# Buckets that may wait for their sum before the backward waits for the oldest; WAITING if the sums are converted.
IN_FLIGHT = 8
ALIGNMENT = 64  # elements, so that kernels read the gradients in a bucket at aligned addresses


@dataclass
class Bucket:
    """Parameters whose gradients are summed together. owner: the only rank that needs the sum; None: every rank does.

    missing: gradients that this backward has not completed yet.
    """

    parameters: list[nn.Parameter]
    owner: int | None = None
    missing: int = 0

    def gradients(self) -> list[Tensor]:
        """Return the gradients. Raises RuntimeError if one is missing."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if len(gradients) < len(self.parameters):
            raise RuntimeError(
                "a parameter has no gradient on this rank; the ranks would deadlock in the all-reduce"
            )
        return gradients


def make_buckets(infos: Sequence[ParameterInfo], owners: Mapping[str, int]) -> list[Bucket]:
    """Return the buckets of `infos` (in the order of the forward), sorted by when the backward completes them."""
    ends: list[tuple[int, Bucket]] = []  # with the position of the bucket's last parameter
    shared, end, sublayer = Bucket([]), -1, ""
    for position, info in enumerate(reversed(infos)):
        if info.name in owners or 4 * info.parameter.numel() >= BUCKET_BYTES:
            ends.append((position, Bucket([info.parameter], owners.get(info.name))))
            continue
        if _sublayer(info.name) != sublayer and 4 * sum(p.numel() for p in shared.parameters) >= BUCKET_BYTES:
            ends.append((end, shared))
            shared = Bucket([])
        shared.parameters.append(info.parameter)
        end, sublayer = position, _sublayer(info.name)
    if shared.parameters:
        ends.append((end, shared))
    return [bucket for _, bucket in sorted(ends, key=lambda entry: entry[0])]


def _sublayer(name: str) -> str:
    """Return the part of a parameter's name that names its sublayer, such as "layers.3.attn"."""
    return ".".join(name.split(".")[:3])


def make_transfers(buckets: Sequence[Bucket], limit: float) -> list[list[Bucket]]:
    """Return consecutive buckets that are sent together: until they have `limit` float32 bytes.

    The last bucket is sent alone, because nothing hides the time of its sum, and so are matrices that one rank updates.
    """
    transfers: list[list[Bucket]] = []
    is_full = True
    for bucket in buckets:
        if is_full or bucket.owner is not None or bucket is buckets[-1]:
            transfers.append([])
        transfers[-1].append(bucket)
        size = 4 * sum(parameter.numel() for each in transfers[-1] for parameter in each.parameters)
        is_full = bucket.owner is not None or size >= limit
    return transfers


class GradientBuckets:
    """Sums the gradients of `infos` over all replicas; does nothing for one process or a sharded model.

    Args:
        owners: Ranks by the name of the matrix that they update.
        dtype: `parallel.gradient_dtype`.
        transfer_bytes: Float32 bytes of gradients that are sent together, if they are summed in place
            (`parallel.bucket_mib`).
    """

    def __init__(
        self,
        infos: Sequence[ParameterInfo],
        world: World,
        owners: Mapping[str, int],
        dtype: torch.dtype,
        transfer_bytes: float = 0.0,
    ):
        self.world, self.dtype = world, dtype
        self.buckets: list[Bucket] = []
        self._transfers: list[list[Bucket]] = []
        # If sums are not gradients, each needs memory beside its gradient until it is converted.
        in_place = dtype == torch.float32 and all(i.parameter.dtype == dtype for i in infos)
        self._in_place = in_place
        self._side = SideStream(world.device, IN_FLIGHT if in_place else WAITING)
        self._rehearsed: deque[list[Tensor]] = deque(maxlen=0 if in_place else WAITING)
        self._overlap = self._armed = False
        self._next = 0  # the first transfer that this backward has not sent, or rehearsed
        if world.size == 1 or world.sharded:
            return
        self.buckets = make_buckets(infos, owners)
        self._transfers = make_transfers(self.buckets, transfer_bytes if in_place else 0.0)
        for number, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                call_after_gradient(parameter, self._complete, number)

    def begin_step(self, overlap: bool) -> None:
        """Begin a step. overlap: send buckets during its last backward; otherwise, `finish` sends all of them.

        A step that may run out of memory must not overlap: the other ranks would wait for its buckets forever. Its
        backward still allocates what sending would need. Nor do buckets overlap if processes share rows, whose backward
        has collectives of another group of ranks.
        """
        self._side.join()  # a step that ran out of memory may have left work behind
        self._rehearsed.clear()
        self._overlap, self._armed, self._next = overlap, False, 0

    def begin_pass(self, last: bool) -> None:
        """Begin a pass. last: it is the last of the step, so its backward completes the gradients and may send them."""
        self._armed = last and self.world.context is None
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    @torch.no_grad()
    def rehearse(self) -> None:
        """Allocate what `finish` allocates if no backward has sent buckets, and free it again.

        A process that has too little memory for it fails here, where no other waits for its buckets yet.
        """
        allocated: deque[list[Tensor]] = deque(maxlen=None if self._in_place else WAITING)
        for bucket in self.buckets:
            allocated.append(self._buffers(bucket.gradients())[0])

    def finish(self) -> None:
        """Send the buckets that are left, and let the device wait for all sums."""
        self._armed = False
        self._rehearsed.clear()
        for transfer in self._transfers[self._next if self._overlap else 0 :]:
            self._send(transfer)
        self._side.join()

    def _complete(self, number: int, parameter: nn.Parameter) -> None:
        if not self._armed:
            return
        self.buckets[number].missing -= 1
        while self._next < len(self._transfers) and not any(b.missing for b in self._transfers[self._next]):
            transfer = self._transfers[self._next]
            if self._overlap:
                self._send(transfer)
            else:
                self._rehearsed += [self._buffers(bucket.gradients())[0] for bucket in transfer]
            self._next += 1

    @torch.no_grad()
    def _send(self, transfer: Sequence[Bucket]) -> None:
        sums: list[list[Tensor]] = []
        converted = []
        for bucket in transfer:
            gradients = bucket.gradients()
            buffers, parts = self._buffers(gradients)
            sums.append(buffers)
            for parameter, gradient, part in zip(bucket.parameters, gradients, parts, strict=True):
                if bucket.owner not in (None, self.world.rank):
                    parameter.grad = None
                elif gradient.dtype == part.dtype:
                    parameter.grad = part
                else:
                    converted.append((gradient, part))

        def work() -> None:
            if self.dtype == torch.bfloat16:
                for buffers in sums:
                    sum_bfloat16(*buffers)
            elif transfer[0].owner is not None:
                dist.reduce(sums[0][0], dst=transfer[0].owner)
            else:
                # One collective for all. As in Megatron-LM: torch has no public name for it.
                with dist._coalescing_manager() if len(sums) > 1 else contextlib.nullcontext():
                    for (flat,) in sums:
                        dist.all_reduce(flat)
            for gradient, part in converted:
                gradient.copy_(part)

        self._side.run(work, *(buffer for buffers in sums for buffer in buffers))

    @torch.no_grad()
    def _buffers(self, gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the arguments of the sum, the flat gradients first, and the view of the sum for each gradient."""
        flat, parts = self._flat(gradients)
        if self.dtype != torch.bfloat16:
            return [flat], parts
        return [flat, torch.empty_like(flat), flat.new_empty(len(flat) // self.world.size)], parts

    def _flat(self, gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients in one flat tensor of the dtype that is sent, and the view of it for each of them.

        A single gradient that has this dtype and a contiguous layout is not copied.
        """
        first, divisor = gradients[0], 1
        dtype = at_least_float32(first)
        if self.dtype == torch.bfloat16:
            dtype, divisor = torch.bfloat16, self.world.size
        is_flat = first.dtype == dtype and first.is_contiguous() and first.numel() % divisor == 0
        if len(gradients) == 1 and is_flat:
            return first.view(-1), gradients
        sizes = [-(-g.numel() // ALIGNMENT) * ALIGNMENT for g in gradients]
        flat = first.new_empty(-(-sum(sizes) // divisor) * divisor, dtype=dtype)
        slots = flat[: sum(sizes)].split(sizes)
        parts = [slot[: g.numel()].view(g.shape) for slot, g in zip(slots, gradients, strict=True)]
        torch._foreach_copy_(parts, gradients)
        return flat, parts


def sum_bfloat16(flat: Tensor, received: Tensor, share: Tensor) -> None:
    """Sum a bfloat16 tensor over all ranks in place, with additions in float32.

    flat: its length is a multiple of the number of ranks. received: scratch of its size. share: scratch for one rank's
    share.
    """
    dist.all_to_all_single(received, flat)
    share.copy_(received.view(-1, len(share)).sum(0, dtype=torch.float32))
    dist.all_gather_into_tensor(flat, share)
