"""The optimizer of a whole model: Muon for matrices and AdamW for the rest, or AdamW for everything.

Besides the update, it has what a training step needs: learning rates from the schedule, the gradient norm, steps that
can be skipped, and state by name for checkpoints. No call of a training step waits for the device.
"""

from collections.abc import Collection, Container, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deskside.budget.scaling import Scaling
from deskside.budget.step_spec import QUANTIZED_STATES
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.optim import adamw as adamw_module
from deskside.optim.adamw import AdamW, AdamWGroup
from deskside.optim.ema_nesterov import EmaNesterov
from deskside.optim.groups import ParameterInfo, Role, classify_parameters
from deskside.optim.muon import MOMENTUM_SCALES, Muon
from deskside.optim.offload import Streamer
from deskside.optim.owners import ALONE, Replicas, sum_over_ranks
from deskside.optim.sharded import gradient_of, is_sharded, local, sum_of_squares, sum_over_shards
from deskside.optim.tied import TiedTables
from deskside.utils.errors import RunError, UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FUSED_DEVICES = ("cuda", "cpu", "xpu", "mps")


class Optimizer:
    """Muon and AdamW behind one interface. `set_progress` must be called before the first `step`.

    separate: names of the parameters that `step` leaves out. `step_one` updates them one at a time, so that their
    gradients need not exist on the device together. owners: ranks by the name of the matrix that they update for all
    replicas; `step` needs no gradient of the other ranks' matrices. tables: an embedding that equals the head at first.
    ema: moves the weights ahead before the passes of a step.
    """

    def __init__(
        self,
        parameters: list[ParameterInfo],
        adamw: AdamW,
        muon: Muon | None = None,
        streamer: Streamer | None = None,
        separate: frozenset[str] = frozenset(),
        tables: TiedTables | None = None,
        ema: EmaNesterov | None = None,
    ):
        self.parameters, self.adamw, self.muon, self.streamer = parameters, adamw, muon, streamer
        self.separate, self.tables, self.ema = separate, tables, ema
        self.separate_parameters = [info for info in parameters if info.name in separate]
        self._together = [info for info in parameters if info.name not in separate]
        self.owners: Mapping[str, int] = {} if muon is None else muon.owners
        self._ready = False

    def set_progress(self, lr_factor: float, progress: float, step: int) -> None:
        """Set the learning rates (peak x factor) and Muon's momentum and weight decay for the next step.

        lr_factor: from `lr_schedule.lr_factor`, times that of `schedule.batch_lr`. progress: completed share of the
        run. step: number of completed steps.
        """
        decay_factor = 1.0
        if self.tables is not None:
            self.tables.set_progress(progress)
        if self.ema is not None:
            self.ema.set_progress(lr_factor, progress)
        if self.muon is not None:
            self.muon.set_progress(lr_factor, progress, step)
            decay_factor = self.muon.decay_factor(progress)
        for group in self.adamw.groups:
            group.lr = group.peak_lr * lr_factor
            group.weight_decay = group.peak_weight_decay * decay_factor
        self.adamw.rounding_step = step
        self._ready = True

    def step(self, skip: Tensor | None = None) -> None:
        """Update all parameters but the separate ones from their gradients, which may be overwritten.

        skip: None, or a float32 scalar on the parameters' device. If it is 1, no weight and no state changes; the host
        does not wait for its value. Raises RunError for a parameter without a gradient.
        """
        self._step(skip, {info.name for info in self._with_gradient()})
        if self.tables is not None:
            self.adamw.create_state((self.tables.embedding.name,))
            self.tables.copy(self.adamw.state)
        self._set_clip_coefficient(None)

    def _with_gradient(self) -> list[ParameterInfo]:
        """Return the parameters that `step` updates by their own gradient: not a tied embedding."""
        if self.tables is None or not self.tables.tied:
            return self._together
        self.tables.sum_gradients()
        return [info for info in self._together if info is not self.tables.embedding]

    def step_one(self, info: ParameterInfo, skip: Tensor | None) -> None:
        """Update one parameter from its gradient, as `step` would, and free the gradient.

        The gradient is clipped as the last `clip_and_norm` requires. Only for separate parameters.
        """
        coefficient = self.adamw.clip_coefficient
        if coefficient is not None and not self._clips_gradient(info):
            gradient_of(info).mul_(coefficient)
        self._step(skip, (info.name,))
        info.parameter.grad = None

    def _step(self, skip: Tensor | None, names: Container[str]) -> None:
        if not self._ready:
            raise RuntimeError("set_progress must be called before step: learning rates are still zero")
        with torch.no_grad():
            if self.muon is not None:
                self.muon.step(skip, names)
            self.adamw.step(skip, names)

    def zero_grad(self) -> None:
        """Free all gradients."""
        self._set_clip_coefficient(None)
        for info in self.parameters:
            info.parameter.grad = None

    @torch.no_grad()
    def clip_and_norm(self, max_norm: float = 0.0, separate_squares: Tensor | None = None) -> Tensor:
        """Return the norm of all gradients together, before clipping, as a float32 scalar on the device.

        If max_norm is above 0, the gradients are scaled down so that their norm is at most max_norm, either in place or
        by the next `step` or `step_one`. If the norm is not finite, the step must be skipped. All replicas call this,
        because only the owner of a matrix has its gradient.

        separate_squares: sum of the squares of the separate parameters' gradients, if there are any.
        """
        held = [info for info in self._with_gradient() if self.muon is None or self.muon.owns(info.name)]
        gradients = [gradient_of(info) for info in held]
        squares = [] if separate_squares is None else [separate_squares]
        owned = [gradient_of(info) for info in held if info.name in self.owners]
        if self.owners:
            nothing = torch.zeros((), device=self.parameters[0].parameter.device)
            squares.append(sum_over_ranks(sum_of_squares(owned) if owned else nothing))
        shared = [gradient_of(info) for info in held if info.name not in self.owners]
        if plain := [g for g in shared if not is_sharded(g)]:
            squares.append(sum_of_squares(plain))
        layouts: dict[Any, list[DTensor]] = {}
        for g in gradients:
            if is_sharded(g):
                layouts.setdefault((g.device_mesh, g.placements), []).append(g)
        for sharded in layouts.values():
            squares.append(sum_over_shards(sum_of_squares([g.to_local() for g in sharded]), sharded[0]))
        norm = torch.stack(squares).sum().sqrt()
        if max_norm > 0:
            coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            self._set_clip_coefficient(coefficient)
            pairs = zip(held, gradients, strict=True)
            if clipped_here := [local(g) for info, g in pairs if not self._clips_gradient(info)]:
                torch._foreach_mul_(clipped_here, coefficient)
        return norm

    def _clips_gradient(self, info: ParameterInfo) -> bool:
        """Return True if the update multiplies this parameter's gradient by the clip coefficient as it reads it."""
        return (self.muon is not None and info.role == "matrix") or self.adamw.clips_gradient(info)

    def _set_clip_coefficient(self, coefficient: Tensor | None) -> None:
        self.adamw.clip_coefficient = coefficient
        if self.muon is not None:
            self.muon.clip_coefficient = coefficient

    def wait_for_weights(self, names: Collection[str] | None = None) -> None:
        """Make the device wait until other ranks have updated these weights; None: all. Call it before a read."""
        if self.muon is not None:
            self.muon.new_weights.wait(names)

    def lr_groups(self) -> dict[str, float]:
        """Return the learning rate of each group for the next step, the main group first."""
        matrix = {"matrix": self.muon.lr} if self.muon is not None else {}
        return matrix | {group.name: group.lr for group in self.adamw.groups}

    def state_dict_flat(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state as tensors by `kind/parameter name` (`exp_avg/layers.0.attn.output.weight`), and JSON data.

        The moments and momentum of sharded parameters are DTensors, and offloaded ones are on the host. All tensors but
        `row_sizes` are the state itself, not copies. Before the first step there is no state, unless `create_state` was
        called. (It is called before loading with torch.distributed.checkpoint, which fills existing tensors.)

        All replicas call this. If they share the update, only rank 0 has the state of all matrices, with copies on the
        host of what other ranks own.
        """
        tensors = self._adamw_state() | self._ema_state()
        if self.muon is not None:
            tensors |= self.muon.state_on_rank_zero()
        return tensors, {
            "optimizer": self._name(),
            "roles": {info.name: info.role for info in self.parameters},
        }

    def _adamw_state(self) -> dict[str, Tensor]:
        if self.streamer is not None:
            self.streamer.wait()
        states = self.adamw.state.items()
        return {f"{key}/{name}": tensor for name, state in states for key, tensor in state.items()}

    def _ema_state(self) -> dict[str, Tensor]:
        return {} if self.ema is None else {f"ema/{name}": t for name, t in self.ema.averages.items()}

    def load_state_dict_flat(self, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
        """Restore the result of `state_dict_flat` exactly. Raises RunError if it is of another optimizer or model."""
        if data.get("optimizer") != self._name():
            raise RunError(
                f"the checkpoint contains the state of '{data.get('optimizer')}', and this run uses '{self._name()}'; "
                "resume with the optimizer of the checkpoint"
            )
        if not tensors:
            return
        self.create_state()
        current = self._adamw_state() | self._ema_state()
        expected = set(current)
        if self.muon is not None:
            current |= self.muon.state()
            expected |= self.muon.state_names()  # with what other ranks own
        for problem, names in (
            ("lacks", expected - tensors.keys()),
            ("has unknown", tensors.keys() - expected),
        ):
            if any(name.startswith(f"{MOMENTUM_SCALES}/") for name in names):
                raise RunError(
                    f"the optimizer state {problem} scales of Muon's momentum in 8 bits; resume with the optim.states, "
                    "and the version of deskside, that wrote the checkpoint"
                )
            if names:
                raise RunError(
                    f"the optimizer state {problem} '{min(names)}' ({len(names)} in all); is it of another model?"
                )
        with torch.no_grad():
            for key, tensor in current.items():
                loaded = tensors[key]
                if loaded.shape != tensor.shape or loaded.dtype != tensor.dtype:
                    raise RunError(
                        f"optimizer state '{key}' is {loaded.dtype} {tuple(loaded.shape)}, "
                        f"this model needs {tensor.dtype} {tuple(tensor.shape)}"
                    )
                kind, _, name = key.partition("/")
                if kind == "row_sizes" and self.muon is not None:
                    self.muon.set_row_mean_squares(name, loaded)
                else:
                    tensor.copy_(loaded)

    def create_state(self) -> None:
        """Create the state that the first step would create."""
        self.adamw.create_state()
        if self.muon is not None:
            self.muon.create_state()
        if self.ema is not None:
            self.ema.create_state()

    def _name(self) -> str:
        return "adamw" if self.muon is None else "muon"


def build(
    model: nn.Module,
    config: AdamWConfig | MuonConfig,
    scaling: Scaling,
    fused: bool | None = None,
    replicas: Replicas = ALONE,
    tied_until: float = 0.0,
) -> Optimizer:
    """Build the optimizer of a model's trainable parameters.

    AdamW decays matrices, head, embeddings and positions, but never vectors (norms, biases, scalars). With Muon,
    matrices decay; head, embeddings and positions decay only if `table_weight_decay` is set. Adapters and single rows
    of a frozen table use AdamW's learning rate unscaled, because `scaling` is for weights that train as a whole;
    adapters decay, single rows do not.

    Raises UsageError for a parameter of unknown role or on an unsupported device, for sharded weights with 8-bit,
    4-bit or offloaded state, for adapters or single rows with Muon, and for a rate of embeddings without embeddings.

    Args:
        scaling: Factors of learning rates and weight decay, applied if `config.scale` is set.
        fused: See `Muon` and `AdamW`.
        replicas: The processes that hold the same weights, and share Muon's update.
        tied_until: Progress until which the embedding equals the head (`schedule.tied_until`).
    """
    parameters = classify_parameters(model)
    for info in parameters:
        _check_parameter(info, config)
    separate: frozenset[str] = frozenset()
    if config.gradients != "device":
        separate = frozenset(info.name for info in parameters if info.parameter.numel() >= adamw_module.SMALL)
    adapted = any(info.role == "adapter" for info in parameters)
    # With an adapter, tables that train whole are not scaled either.
    if not config.scale or adapted:
        scaling = Scaling(lr=1.0, embedding_lr=1.0, weight_decay=1.0)
    streamer = Streamer(local(parameters[0].parameter).device) if config.offload and parameters else None

    def with_role(*roles: Role) -> list[ParameterInfo]:
        return [info for info in parameters if info.role in roles]

    muon = None
    if isinstance(config, AdamWConfig):
        lr, decay = config.lr * scaling.embedding_lr, config.weight_decay * scaling.weight_decay
        embedding, head = (
            1.0 if rate is None or adapted else rate / config.lr
            for rate in (config.embedding_lr, config.head_lr)
        )
        groups = [
            AdamWGroup("matrix", with_role("matrix"), lr, decay),
            # A step shrinks weights by rate * decay. At 100 times the rate, rare tokens would be forgotten in between.
            AdamWGroup("embedding", with_role("embedding", "position"), lr * embedding, decay / embedding),
            AdamWGroup("head", with_role("head"), lr * head, decay / head),
            AdamWGroup("vectors", with_role("vector"), lr, 0.0),
            AdamWGroup("adapters", with_role("adapter"), config.lr, config.weight_decay),
            AdamWGroup("rows", with_role("rows"), config.lr, 0.0),
        ]
    else:
        if with_role("adapter", "rows"):
            raise UsageError(
                "muon is for whole matrices, and adapters are trained by adamw; use --optim.name adamw"
            )
        embedding_lr = config.embedding_lr * scaling.embedding_lr
        decay = config.table_weight_decay * scaling.weight_decay
        groups = [
            AdamWGroup("embedding", with_role("embedding", "position"), embedding_lr, decay),
            AdamWGroup("head", with_role("head"), config.head_lr * scaling.embedding_lr, decay),
            AdamWGroup("scalar", with_role("vector"), config.scalar_lr * scaling.lr, 0.0),
        ]
        # With momentum in host memory, Muon computes float32 directions of all weights that it updates together.
        float32_directions = config.offload and not config.momentum_in_8_bits
        one_by_one = bool(separate) or (float32_directions and config.weights != "float32")
        muon = Muon(with_role("matrix"), config, streamer, fused, one_by_one, replicas)
        muon.peak_lr = config.lr * scaling.lr
        muon.peak_weight_decay = config.weight_decay * scaling.weight_decay
    groups = [group for group in groups if group.parameters]
    masters = isinstance(config, AdamWConfig) and config.master_weights
    cautious, residuals = config.cautious_weight_decay, config.weights == "24bit"
    adamw = AdamW(
        groups, config.betas, config.eps, config.states, streamer, fused, masters, cautious, residuals
    )
    tables = TiedTables(parameters, tied_until) if tied_until else None
    ema = EmaNesterov(parameters, config) if config.ema_nesterov else None
    return Optimizer(parameters, adamw, muon, streamer, separate, tables, ema)


def _check_parameter(info: ParameterInfo, config: AdamWConfig | MuonConfig) -> None:
    """Raise UsageError if the optimizer does not support this parameter's device or sharding."""
    device = local(info.parameter).device.type
    if device not in FUSED_DEVICES:
        raise UsageError(
            f"parameter '{info.name}' is on device '{device}'; move the model to a CPU or GPU first"
        )
    if is_sharded(info.parameter) and (config.offload or config.states in QUANTIZED_STATES):
        option = "optim.offload" if config.offload else f"optim.states: {config.states}"
        raise UsageError(
            f"{option} needs whole weights, and parallel.mode shard splits them; use parallel.mode replicate"
            + ("" if config.offload else ", or optim.states bfloat16")
        )
