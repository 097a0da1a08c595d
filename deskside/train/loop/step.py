"""One optimizer step: forward and backward of all micro-batches, checks, update. Its metrics are read later."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from deskside.data.reading.loader import Batch
from deskside.kernels.attention import AttentionContext, ContextRanks, Requirements, gathered
from deskside.model.block import Block
from deskside.ops.moe import RouterStatistics
from deskside.optim.build import Optimizer
from deskside.optim.groups import classify_parameters
from deskside.train.loop.gradient_buckets import GradientBuckets
from deskside.train.loop.gradient_sums import GradientSums
from deskside.train.loop.graph_pool import GraphPool
from deskside.train.loop.graph_support import check_attention
from deskside.train.loop.graphed_pass import GraphedPass, TargetCount
from deskside.train.loop.host_gradients import HostGradients
from deskside.train.loop.released_gradients import ReleasedGradients
from deskside.train.loop.routers import Routers
from deskside.train.loop.train_context import TrainContext
from deskside.train.objective import Loss
from deskside.train.parallel import set_gradient_sync
from deskside.utils.errors import RunError


class DeviceEvent:
    """The time at which the device reaches this point: a CUDA event on a GPU, ``time.perf_counter()`` on a CPU.

    The host runs ahead of the GPU, so a host timer would measure when work is launched, not when it runs.
    """

    def __init__(self, device: torch.device):
        self._event: torch.cuda.Event | None = None
        self._host_time = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
        else:  # on a CPU, work has finished when its call returns
            self._host_time = time.perf_counter()

    def synchronize(self) -> None:
        """Block until all work recorded before this event has finished."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, start: "DeviceEvent") -> float:
        """Return the seconds between `start` and this event. Blocks until this event has completed."""
        if self._event is None:
            return self._host_time - start._host_time
        assert start._event is not None
        self._event.synchronize()
        return float(start._event.elapsed_time(self._event)) / 1e3


class StepMetrics:
    """Loss, gradient norm and metrics of one step, copied from the device to the host asynchronously.

    On a GPU the copy is queued right behind the step. Reading it waits for this step, but not for the next one, which
    may be running already. `end` is the time at which the device finished the step.
    """

    def __init__(self, values: Tensor, metric_names: Sequence[str] = (), count: int = 0):
        """values: loss, gradient norm, 1.0 if skipped, then one sum per metric name, then the routers' sums
        (`Routers.num_sums`). count: targets in the step."""
        self._metric_names, self.count = tuple(metric_names), count
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
        self.end = DeviceEvent(values.device)

    def read(self) -> tuple[float, float, bool]:
        """Wait for the step. Return its loss, its gradient norm, and whether it was skipped."""
        loss, norm, skipped = self._values_on_host()[:3]
        return loss, norm, bool(skipped)

    def metric_sums(self) -> dict[str, float]:
        """Wait for the step. Return the sums of the objective's metrics by name."""
        values = self._values_on_host()[3 : 3 + len(self._metric_names)]
        return dict(zip(self._metric_names, values, strict=True))

    def router_sums(self) -> list[float]:
        """Wait for the step. Return the routers' sums; empty for a model without experts."""
        return self._values_on_host()[3 + len(self._metric_names) :]

    def _values_on_host(self) -> list[float]:
        self.end.synchronize()
        numbers: list[float] = self._values.tolist()
        return numbers


class Stepper:
    """Runs single optimizer steps, without a clock, checkpoints or logging.

    event: called with a line about every captured pass (`compute.cuda_graph`). Raises UsageError if the passes of this
    run cannot be captured.
    """

    def __init__(
        self, context: TrainContext, optimizer: Optimizer, event: Callable[[str], None] = lambda line: None
    ):
        self.context, self.optimizer = context, optimizer
        self.config, self.world, self.guard = context.config, context.world, context.guard
        self.model, self.precision, self.objective = context.model, context.precision, context.objective
        self.precision_config, self.grad_clip = context.config.precision, context.config.optim.grad_clip
        self.routers = Routers(self.model)
        self.gradient_sums = GradientSums(self.model, optimizer.separate)
        # Created after `gradient_sums`, so that it takes the sums over passes.
        self.buckets = GradientBuckets(
            classify_parameters(self.model),
            self.world,
            optimizer.owners,
            getattr(torch, context.config.parallel.gradient_dtype),
            2**20 * context.config.parallel.bucket_mib,
        )
        self.overlaps_weights = self._wait_before_reading()
        self.separate_gradients: HostGradients | ReleasedGradients | None = None
        if optimizer.separate:
            host = context.config.optim.gradients == "host"
            kind = HostGradients if host else ReleasedGradients
            self.separate_gradients = kind(optimizer, self.world.device)
        self.window: int | None = None
        self.event = event
        self.graphed: GraphedPass | None = None
        if context.config.compute.cuda_graph == "on":
            self.use_graphs(event)

    def use_graphs(
        self, event: Callable[[str], None], new_pool: Callable[[torch.device], GraphPool] | None = None
    ) -> None:
        """Replay the passes of later steps from graphs. Raises UsageError if an attention backend does not allow it.

        Arguments: see `GraphedPass`.
        """
        check_attention(self.context.attention)
        self.graphed = GraphedPass(
            [info.parameter for info in self.optimizer.parameters],
            self.precision,
            self._pass,
            lambda: (self.window, self.objective.pass_state()),
            self.wait_for_weights,
            len(self._new_sums()),
            event,
            new_pool,
        )

    def leave_graphs(self) -> None:
        """Run the passes of later steps without graphs."""
        self.release_graphs()
        self.graphed = None

    def release_graphs(self) -> None:
        """Free the memory of captured passes and of their gradients. A later step may capture its pass again."""
        if self.graphed is not None:
            self.graphed.release()

    def _wait_before_reading(self) -> bool:
        """Make each sublayer wait, just before its forward, for those of its matrices that other ranks update.

        Return False if that is not possible, so that each step must end with the wait: a compiled forward cannot
        contain it, and an objective may read weights without the model's forward.
        """
        if not self.optimizer.owners or self.context.is_compiled or self.objective.reads_weights:
            return False
        for layer, block in enumerate(self.model.layers):
            for part, sublayer in block.named_children():
                prefix = f"layers.{layer}.{part}."
                names = [name for name in self.optimizer.owners if name.startswith(prefix)]
                # Through `self`, because a run replaces the optimizer of its dry steps.
                sublayer.register_forward_pre_hook(lambda *_, names=names: self.wait_for_weights(names))
        return True

    def wait_for_weights(self, names: Collection[str] | None = None) -> None:
        """Make the device wait until other ranks have updated these weights; None: all weights. Call it before weights
        are overwritten, or read by anything but the model's forward."""
        self.optimizer.wait_for_weights(names)

    def set_progress(self, lr_factor: float, progress: float, step: int) -> None:
        """Set learning rate, number format and loss weights of the next step. step: number of completed steps."""
        self.optimizer.set_progress(lr_factor, progress, step)
        self.objective.set_progress(progress)
        formats = self.precision_config
        in_bf16 = step < formats.warmup_steps or (
            formats.bf16_from is not None and progress >= formats.bf16_from
        )
        self.precision.set_active(not in_bf16)

    def set_window(self, window: int | None) -> None:
        """Set the attention window of all windowed layers; None restores the model's own window."""
        self.window = window
        for block in self.model.layers:
            assert isinstance(block, Block)
            if block.attn.window is not None:
                block.attn.window = window or self.model.config.sliding_window

    @contextlib.contextmanager
    def final_window(self) -> Iterator[None]:
        """Context manager in which the model has its own window, as after the run, and not that of a stage."""
        window = self.window
        self.set_window(None)
        try:
            yield
        finally:
            self.set_window(window)

    def loss(self, batch: Batch) -> Loss:
        """Return the objective's loss of a micro-batch, or of this process's part of it if processes share rows."""
        if self.world.context is not None:
            return self._loss_of_part(batch, self.world.context)
        return self.objective.loss(self.model, batch, self._attention(batch), self.config.compute)

    def _attention(self, batch: Batch) -> AttentionContext:
        """Return the attention of whole rows."""
        tokens = batch.tokens_BT.shape[1]
        full, windowed = self.context.attention.at(tokens, self.window)
        return AttentionContext(
            cu_seqlens=batch.cu_seqlens, max_seqlen=tokens, backend=full, window_backend=windowed
        )

    def _loss_of_part(self, batch: Batch, ranks: ContextRanks) -> Loss:
        """Return the loss over this process's tokens, with the statistics of the routers over whole rows."""
        positions_BT, future_BTK = batch.positions_BT, batch.future_targets_BTK
        if positions_BT is None:
            positions_BT = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)[None]
        part = replace(
            batch,
            tokens_BT=ranks.local(batch.tokens_BT),
            targets_BT=ranks.local(batch.targets_BT),
            positions_BT=ranks.local(positions_BT),
            future_targets_BTK=None if future_BTK is None else ranks.local(future_BTK),
        )
        full, windowed = self._shared_backends(batch.tokens_BT)
        context = AttentionContext(
            cu_seqlens=batch.cu_seqlens, backend=full, window_backend=windowed, ranks=ranks
        )
        loss = self.objective.loss(self.model, part, context, self.config.compute)
        if loss.router is None:
            return loss
        values_LR = ranks.sum_with_own_gradient(loss.router.values_LR)
        return replace(loss, router=RouterStatistics(values_LR, loss.router.tokens * ranks.size))

    def _shared_backends(self, tokens_BT: Tensor) -> tuple[str, str | None]:
        """Return the attention backends (full, windowed) of shared rows. tokens_BT: of whole rows."""
        shared = self.context.attention.shared
        if shared is not None:
            return shared.at(tokens_BT.shape[1], self.window)
        (batch, tokens), dtype = tokens_BT.shape, self.model.activation_dtype
        need = Requirements.of_model(self.model.config, batch, tokens, dtype, tokens_BT.device)
        return gathered.backend_for(need, {}), None

    def run(self, micro_batches: Sequence[Batch], step: int, dry: bool = False) -> StepMetrics:
        """Run step number `step` (from 1). A dry step computes everything but changes no weight.

        If one process runs out of memory in a dry step, all of them raise an error, see `fits_on_all`.
        """
        num_valid = micro_batches[0].num_valid_step
        if not dry:
            self.begin_step(step, len(micro_batches))
            return self.update(self.forward_backward(micro_batches), step, num_valid)
        with self.fits_on_all():
            self.begin_step(step, len(micro_batches), dry)
            sums = self.forward_backward_dry(micro_batches)
        with self.fits_on_all():
            return self.update(sums, step, num_valid, dry)

    @contextlib.contextmanager
    def fits_on_all(self) -> Iterator[None]:
        """Context manager around a part of a dry step. If one process runs out of memory, all raise
        torch.OutOfMemoryError at the end of the part.

        With a sharded model or shared rows, that process raises RunError, because the others already wait for it.
        """
        failure: torch.OutOfMemoryError | None = None
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.world.waits_within_passes:
                reason = str(error).split(".")[0]
                raise RunError(
                    f"out of memory with a sharded model or shared rows ({reason}); give a smaller "
                    "--batch.micro_tokens, or --compute.activation_checkpointing block"
                ) from None
            failure = error
        if not self.world.all_reduce_min(int(failure is None)):
            raise failure or torch.OutOfMemoryError("another process is out of memory")

    def average_weights(self, step: int, progress: float) -> None:
        """Add the weights after step number `step` to their average, if due. progress: at the start of the step."""
        average = self.context.average
        if average is not None and average.due(step, progress):
            self.wait_for_weights()
            average.update(progress)

    def begin_step(self, step: int, passes: int, dry: bool = False) -> None:
        """Prepare for the passes of step number `step`. A dry step only allocates what the preparation needs."""
        if (ema := self.optimizer.ema) is not None:
            self.wait_for_weights()
            if dry:
                ema.create_state()
            else:
                ema.move()  # before `precision` forgets the converted weights
        self.precision.begin_step(step)
        if self.graphed is not None:
            self.graphed.begin_step(dry)
        if self.context.dropout is not None:
            self.context.dropout.begin_step(step)
        self.gradient_sums.begin_step(step)
        self.buckets.begin_step(overlap=not dry)
        if self.separate_gradients is not None:
            limit = 0.0 if dry else self.guard.finite_limit(step)
            self.separate_gradients.begin_step(self.optimizer, passes, step, limit)

    def update(self, sums: Tensor, step: int, num_valid: int, dry: bool = False) -> StepMetrics:
        """Update the weights after all passes of a step, or end a dry step.

        sums: of `forward_backward`. num_valid: targets in the step.
        """
        self.buckets.finish()
        self.world.all_reduce_sum(sums)
        total = sums[0]
        self.precision.scales.all_reduce_amax(self.world.all_reduce_max)
        separate = self.separate_gradients
        squares = None if separate is None else separate.squares()
        norm = self.optimizer.clip_and_norm(self.grad_clip, squares) + self.precision.scales.zero_or_nan()
        skip = torch.ones_like(total) if dry else self.guard.skip(total, norm, step)
        if separate is not None:
            separate.update(skip)
        self.optimizer.step(skip)
        self.optimizer.zero_grad()
        if dry or not self.overlaps_weights:
            self.wait_for_weights()
        self.routers.update_biases(sums[1 + len(self.objective.metric_names) :], skip)
        self.precision.end_step()
        values = torch.cat((torch.stack((total, norm.to(total.dtype), skip)), sums[1:]))
        return StepMetrics(values, self.objective.metric_names, num_valid)

    def forward_backward(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Accumulate the gradients of all micro-batches. Return the loss, the metric sums and the routers' sums of this
        process, (1 + M + `Routers.num_sums`,).

        The loss is divided by the number of targets in all micro-batches of all processes, so it depends neither on
        packing nor on gradient accumulation. With a sharded model, the gradients are summed over all processes.
        """
        graphed, dropout = self.graphed, self.context.dropout
        sums = self._new_sums() if graphed is None else graphed.begin_passes()
        self.gradient_sums.begin_passes(len(micro_batches))
        # The loader gives each process the next part of the step's rows.
        token = self.world.reader * sum(batch.tokens_BT.numel() for batch in micro_batches)
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            self.buckets.begin_pass(is_last and graphed is None)  # a replay runs no hooks
            if self.world.sharded:
                set_gradient_sync(self.model, is_last)
            if graphed is not None:
                graphed.run(batch)
                continue
            with contextlib.nullcontext() if dropout is None else dropout.passing(token):
                self._pass(batch, sums)
            token += batch.tokens_BT.numel()
        if graphed is not None:
            graphed.end_passes()
            return sums.clone()  # the next step overwrites them
        if self.world.context is not None:  # each process has the routers' sums of the whole rows
            sums[1 + len(self.objective.metric_names) :] /= self.world.context.size
        return sums

    def _evaluate_dry(self, batch: Batch) -> None:
        """Run the forward of an evaluation. The converted weights stay, as those of a captured pass do."""
        kept = [converted.cached for converted in self.precision.cached_weights()]
        with torch.no_grad(), self.precision.high_precision():
            self.model.token_losses(
                batch.tokens_BT, batch.targets_BT, self._attention(batch), batch.positions_BT
            )
        del kept

    def _pass(self, batch: Batch, sums: Tensor, count: TargetCount | None = None) -> None:
        """Forward and backward of one micro-batch. Its loss and its other sums are added to `sums`.

        count: the number of targets of the step; None: the batch's `num_valid_step`.
        """
        num_valid_step, names = batch.num_valid_step, self.objective.metric_names
        batch_loss = self.loss(batch)
        loss = batch_loss.sum / num_valid_step if count is None else count.divide(batch_loss.sum)
        sums[0] += loss.detach()
        for i, name in enumerate(names, start=1):
            sums[i] += batch_loss.metric_sums[name]
        if batch_loss.router is not None:
            share = batch.num_valid / num_valid_step
            loss = loss + self.routers.loss(batch_loss.router, share, sums[1 + len(names) :])
        if self.separate_gradients is not None:
            self.separate_gradients.begin_backward(loss)
        loss.backward()
        self.gradient_sums.end_pass()
        if self.separate_gradients is not None:
            self.separate_gradients.end_pass()

    def _new_sums(self) -> Tensor:
        size = 1 + len(self.objective.metric_names) + self.routers.num_sums
        return torch.zeros(size, device=self.world.device)

    def forward_backward_dry(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Run `forward_backward`, and allocate what would later be needed beside its gradients."""
        sums = self.forward_backward(micro_batches)
        if self.graphed is not None:
            if self.graphed.is_reserved:
                self._evaluate_dry(micro_batches[0])
            self.buckets.rehearse()  # graphs keep the gradients that are copied into shared buckets
        return sums
