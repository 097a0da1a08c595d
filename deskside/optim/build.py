"""One optimiser for a whole model: Muon for matrices and AdamW for the rest, or AdamW for everything.

The training step needs four things beyond an update: the learning rate from the schedule, the gradient norm, a way to
skip a bad step, and a state that goes into a checkpoint by name. None of them waits for the device.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deskside.budget.scaling import Scaling
from deskside.config.optim import AdamWConfig, MuonConfig
from deskside.optim.adamw import AdamW, AdamWGroup
from deskside.optim.groups import ParameterInfo, Role, classify
from deskside.optim.muon import Muon
from deskside.optim.offload import Streamer
from deskside.optim.sharded import gradient_of, is_sharded, local, sum_of_squares, sum_over_shards
from deskside.utils.errors import RunError, UsageError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

FUSED_DEVICES = ("cuda", "cpu", "xpu", "mps")


class Optimizer:
    """Muon and AdamW behind one interface. `set_progress` must be called before the first `step`."""

    def __init__(
        self,
        parameters: list[ParameterInfo],
        adamw: AdamW,
        muon: Muon | None = None,
        streamer: Streamer | None = None,
    ):
        self.parameters, self.adamw, self.muon, self.streamer = parameters, adamw, muon, streamer
        self._ready = False

    def set_progress(self, lr_factor: float, progress: float, step: int) -> None:
        """Sets what the next step uses: learning rates (peak x factor), Muon's momentum and weight decay.

        lr_factor: from `optim.schedule`, in [0, 1]; progress: share of the run done; step: steps done, from 0.
        """
        for group in self.adamw.groups:
            group.lr = group.peak_lr * lr_factor
        if self.muon is not None:
            self.muon.set_progress(lr_factor, progress, step)
        self._ready = True

    def step(self, skip: Tensor | None = None) -> None:
        """One update from the gradients, which it may overwrite.

        skip: None, or a float32 scalar on the parameters' device; where it is 1, no weight and no state changes, and
        the host does not wait to learn it. Raises RunError for a parameter without a gradient.
        """
        if not self._ready:
            raise RuntimeError("set_progress must be called before step: learning rates are still zero")
        with torch.no_grad():
            if self.muon is not None:
                self.muon.step(skip)
            self.adamw.step(skip)
        self.adamw.factor = None

    def zero_grad(self) -> None:
        """Frees all gradients."""
        self.adamw.factor = None
        for info in self.parameters:
            info.parameter.grad = None

    @torch.no_grad()
    def clip_and_norm(self, max_norm: float = 0.0) -> Tensor:
        """The norm of all gradients together, before clipping, as a float32 scalar on the device.

        With max_norm above 0, gradients are scaled down so that their norm is at most that: in place, or by the next
        `step` where it reads them. A norm that is not finite makes the clipped gradients not finite too; pass `skip` to
        `step` for such a batch.
        """
        gradients = [gradient_of(info) for info in self.parameters]
        squares = []
        plain = [g for g in gradients if not is_sharded(g)]
        if plain:
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
            self.adamw.factor = coefficient
            pairs = zip(self.parameters, gradients, strict=True)
            if here := [local(g) for info, g in pairs if not self.adamw.clips(info)]:
                torch._foreach_mul_(here, coefficient)
        return norm

    def lr_groups(self) -> dict[str, float]:
        """The learning rate of each group that the next step uses, the main one first."""
        found = {"matrix": self.muon.lr} if self.muon is not None else {}
        return found | {group.name: group.lr for group in self.adamw.groups}

    def state_dict_flat(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state as tensors under `kind/parameter name`, such as `exp_avg/layers.0.attn.qkv.weight`, and JSON data.

        Tensors of sharded parameters are DTensors, offloaded ones lie on the host. Most tensors are the state itself,
        not copies. Before the first step there is none, unless `create_state` was called
        (torch.distributed.checkpoint loads into what it finds).
        """
        if self.streamer is not None:
            self.streamer.wait()
        tensors: dict[str, Tensor] = {}
        for name, state in self.adamw.state.items():
            tensors.update({f"{key}/{name}": tensor for key, tensor in state.items()})
        if self.muon is not None:
            tensors.update({f"momentum/{name}": t for name, t in self.muon.momentum_of.items()})
            tensors.update({f"row_sizes/{name}": t for name, t in self.muon.row_sizes_of().items()})
        return tensors, {
            "optimizer": self._name(),
            "roles": {info.name: info.role for info in self.parameters},
        }

    def load_state_dict_flat(self, tensors: dict[str, Tensor], data: dict[str, Any]) -> None:
        """Restores what `state_dict_flat` gave, exactly. Raises RunError if it is another optimiser's or model's."""
        if data.get("optimizer") != self._name():
            raise RunError(
                f"the checkpoint holds the state of '{data.get('optimizer')}', this run uses '{self._name()}'"
            )
        if not tensors:
            return
        self.create_state()
        own, _ = self.state_dict_flat()
        for problem, names in (
            ("lacks", own.keys() - tensors.keys()),
            ("has unknown", tensors.keys() - own.keys()),
        ):
            if names:
                raise RunError(
                    f"the optimiser state {problem} '{min(names)}' ({len(names)} in all): another model's?"
                )
        with torch.no_grad():
            for key, held in own.items():
                given = tensors[key]
                if given.shape != held.shape or given.dtype != held.dtype:
                    raise RunError(
                        f"optimiser state '{key}' is {given.dtype} {tuple(given.shape)}, "
                        f"this model needs {held.dtype} {tuple(held.shape)}"
                    )
                kind, _, name = key.partition("/")
                if kind == "row_sizes" and self.muon is not None:
                    self.muon.set_row_sizes(name, given)
                else:
                    held.copy_(given)

    def create_state(self) -> None:
        """Creates the state that the first step would create."""
        self.adamw.create_state()
        if self.muon is not None:
            self.muon.create_state()

    def _name(self) -> str:
        return "adamw" if self.muon is None else "muon"


def build(
    model: nn.Module, config: AdamWConfig | MuonConfig, scaling: Scaling, fused: bool | None = None
) -> Optimizer:
    """The optimiser for a model's trainable parameters, with `scaling` applied where `config.scale` says so.

    AdamW decays matrices, head, embeddings and positions, never vectors (norms, biases, scalars). Under Muon only the
    matrices are decayed. Adapters take AdamW's rate and decay as they are, because `scaling` is about weights that are
    trained whole; so do single rows of a frozen table, without decay. fused: see `Muon` and `AdamW`. Raises UsageError
    for a parameter of unknown role or unusable device, and for sharded weights where the state's format or place needs
    whole ones.
    """
    parameters = classify(model)
    for info in parameters:
        device = local(info.parameter).device.type
        if device not in FUSED_DEVICES:
            raise UsageError(
                f"parameter '{info.name}' is on '{device}'; move the model to a CPU or GPU first"
            )
        if is_sharded(info.parameter) and (config.offload or config.states == "8bit"):
            option = "optim.offload" if config.offload else "optim.states: 8bit"
            raise UsageError(
                f"{option} works on whole weights, and parallel.mode shard splits them; use parallel.mode replicate"
                + ("" if config.offload else ", or optim.states bfloat16")
            )
    s = scaling if config.scale else Scaling(lr=1.0, embedding_lr=1.0, weight_decay=1.0)

    streamer = Streamer(local(parameters[0].parameter).device) if config.offload and parameters else None

    def of(*roles: Role) -> list[ParameterInfo]:
        return [info for info in parameters if info.role in roles]

    muon = None
    if isinstance(config, AdamWConfig):
        lr, decay = config.lr * s.embedding_lr, config.weight_decay * s.weight_decay
        groups = [
            AdamWGroup("weights", of("matrix", "head", "embedding", "position"), lr, decay),
            AdamWGroup("vectors", of("vector"), lr, 0.0),
            AdamWGroup("adapters", of("adapter"), config.lr, config.weight_decay),
            AdamWGroup("rows", of("rows"), config.lr, 0.0),
        ]
    else:
        if of("adapter", "rows"):
            raise UsageError(
                "muon is for whole matrices, adapters are trained by adamw; use --optim.name adamw"
            )
        groups = [
            AdamWGroup("embedding", of("embedding", "position"), config.embedding_lr * s.embedding_lr, 0.0),
            AdamWGroup("head", of("head"), config.head_lr * s.embedding_lr, 0.0),
            AdamWGroup("scalar", of("vector"), config.scalar_lr * s.lr, 0.0),
        ]
        muon = Muon(of("matrix"), config, streamer, fused)
        muon.peak_lr, muon.peak_weight_decay = config.lr * s.lr, config.weight_decay * s.weight_decay
    filled = [group for group in groups if group.parameters]
    adamw = AdamW(filled, config.betas, config.eps, config.states, streamer, fused)
    return Optimizer(parameters, adamw, muon, streamer)
