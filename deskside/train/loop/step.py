"""One optimizer step: micro-batches -> loss -> backward -> finite check -> update. Nothing here waits for the GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from deskside.config.sections import ComputeConfig, PrecisionConfig
from deskside.data.reading.loader import Batch
from deskside.kernels.attention import AttentionContext
from deskside.model.block import Block
from deskside.model.transformer import Transformer
from deskside.optim.build import Optimizer
from deskside.precision.convert import QuantizedModel
from deskside.train.loop.device_timer import DeviceEvent
from deskside.train.loop.guard import Guard
from deskside.train.objective import Loss, NextToken, Objective
from deskside.train.parallel import World, set_last_micro_batch, sum_gradients
from deskside.train.prepare.attention_backends import AttentionBackends
from deskside.utils.errors import RunError


class StepMetrics:
    """What a step came to, on its way from the device to the host: see `read`.

    On a GPU the copy is queued right behind the step, so that reading waits for this step and not for the next one,
    which has been launched by then. `end` is when the device had them.
    """

    def __init__(self, values: Tensor, extra: Sequence[str] = (), count: int = 0):
        """values: loss per counted target, gradient norm, 1.0 if skipped, then a sum for each name in `extra`."""
        self._extra, self.count = tuple(extra), count
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        self.end = DeviceEvent(values.device)

    def read(self) -> tuple[float, float, bool]:
        """Wait for the step: its loss, its gradient norm, and whether it was skipped."""
        loss, norm, skipped = self._all()[:3]
        return loss, norm, bool(skipped)

    def extra(self) -> dict[str, float]:
        """Wait for the step: the objective's sums, by name."""
        return dict(zip(self._extra, self._all()[3:], strict=True))

    def _all(self) -> list[float]:
        self.end.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


@dataclass
class Stepper:
    """What a step needs. `parameters` are the trainable ones in the order in which gradients are summed.

    `precision` is the recipe on the model, and `formats` says in which steps it holds.
    """

    model: Transformer
    optimizer: Optimizer
    guard: Guard
    world: World
    compute: ComputeConfig
    attention: AttentionBackends
    grad_clip: float
    parameters: Sequence[nn.Parameter]
    precision: QuantizedModel
    formats: PrecisionConfig
    objective: Objective = field(default_factory=NextToken)

    def set_progress(self, lr_factor: float, progress: float, step: int) -> None:
        """What the next step uses: see `Optimizer.set_progress`. `step`: steps done."""
        self.optimizer.set_progress(lr_factor, progress, step)
        late = self.formats.bf16_from is not None and progress >= self.formats.bf16_from
        self.precision.use(step >= self.formats.warmup_steps and not late)

    def __post_init__(self) -> None:
        self.window: int | None = None

    def set_window(self, window: int | None) -> None:
        """Give the windowed layers another window (a stage's), or the configuration's for None."""
        self.window = window
        for block in self.model.layers:
            assert isinstance(block, Block)
            if block.attn.window is not None:
                block.attn.window = window or self.model.config.sliding_window

    def loss(self, batch: Batch) -> Loss:
        """The objective's loss of a micro-batch."""
        tokens = batch.tokens_BT.shape[1]
        full, windowed = self.attention.at(tokens, self.window)
        context = AttentionContext(
            cu_seqlens=batch.cu_seqlens, max_seqlen=tokens, backend=full, window_backend=windowed
        )
        return self.objective.loss(self.model, batch, context, self.compute)

    def run(self, micro_batches: Sequence[Batch], step: int, dry: bool = False) -> StepMetrics:
        """Step number `step` (from 1). A `dry` one computes everything and changes nothing.

        A dry step raises torch.OutOfMemoryError on every process where one is out of memory, or RunError when the
        model is sharded: then the others already wait inside of the model.
        """
        self.precision.begin_step(step)
        sums = self.forward_backward_dry(micro_batches) if dry else self.forward_backward(micro_batches)
        sum_gradients(self.parameters, self.world)
        self.world.summed(sums)
        total = sums[0]
        self.precision.agree(self.world.largest)
        norm = self.optimizer.clip_and_norm(self.grad_clip) + self.precision.trouble()
        skip = torch.ones_like(total) if dry else self.guard.skip(total, norm, step)
        self.optimizer.step(skip)
        self.optimizer.zero_grad()
        self.precision.end_step()
        values = torch.cat((torch.stack((total, norm.to(total.dtype), skip)), sums[1:]))
        return StepMetrics(values, self.objective.extras, micro_batches[0].num_valid_step)

    def forward_backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        """The gradients of all micro-batches; their loss and extra sums, in one tensor.

        Of this process alone, unless the model is sharded. The loss is divided by what counts in all micro-batches on
        all processes, so neither packing nor accumulation changes it.
        """
        valid, names = micro_batches[0].num_valid_step, self.objective.extras
        sums = torch.zeros(1 + len(names), device=self.world.device)
        for index, batch in enumerate(micro_batches):
            if self.world.sharded:
                set_last_micro_batch(self.model, index == len(micro_batches) - 1)
            found = self.loss(batch)
            loss = found.sum / valid
            sums[0] += loss.detach()
            for place, name in enumerate(names, start=1):
                sums[place] += found.extra[name]
            if found.balance is not None:
                share = batch.num_valid / valid
                loss = loss + self.model.config.router_aux_loss_coef * share * found.balance
            loss.backward()
        return sums

    def forward_backward_dry(self, micro_batches: Sequence[Batch]) -> Tensor:
        """The same, and all processes agree on whether it fitted before any of them waits for another."""
        failure: torch.OutOfMemoryError | None = None
        sums = torch.zeros(1 + len(self.objective.extras), device=self.world.device)
        try:
            sums = self.forward_backward(micro_batches)
        except torch.OutOfMemoryError as error:
            if self.world.sharded:
                raise RunError(
                    f"out of memory while sharded ({str(error).split('.')[0]}); give a smaller --batch.micro_tokens"
                ) from None
            failure = error
        if not self.world.smallest(int(failure is None)):
            raise failure or torch.OutOfMemoryError("another process is out of memory")
        return sums
