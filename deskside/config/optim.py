"""Optimizers and their settings.

The learning rates and the weight decay hold at the optimizer's reference point in `budget/scaling.py`. With `scale =
true` they are scaled to the hidden size, batch and horizon of the run.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from deskside.budget.step_spec import QUANTIZED_STATES, GradientPlace, StateFormat, WeightFormat
from deskside.config.base import Part

Beta = Annotated[float, Field(ge=0, lt=1)]
# bfloat16 has 8 significant bits: a moment that changes by less than 1/256 of its value in a step may never change. The
# same limit holds for Muon's momentum in 8 bits, for which it was not derived.
LARGEST_BFLOAT16_BETA = 0.995

States = Annotated[
    StateFormat,
    Field(
        description="format of the optimizer state: float32, bfloat16, 8bit (block-wise, arXiv 2110.02861) or 4bit "
        "(block-wise, arXiv 2309.01507); Muon's momentum has 8 bits in both (block-wise, arXiv 2509.23106)"
    ),
]
Weights = Annotated[
    WeightFormat,
    Field(
        description="format of the stored matrices and of their gradients: float32, or bfloat16, to which updates and "
        "sums of gradients are rounded stochastically (arXiv 2010.06192); 24bit: bfloat16, with 8 more bits of each "
        "weight for the update, which is rounded 256 times as finely (the idea of arXiv 2005.04680)"
    ),
]
Offload = Annotated[
    bool,
    Field(description="keep the optimizer state in host memory and stream it through the GPU at each step"),
]
Gradients = Annotated[
    GradientPlace,
    Field(
        description="where gradients wait for the update: device; host: in host memory, with the same results; "
        "released: nowhere, each weight is updated and its gradient freed during the backward pass (arXiv 2306.09782), "
        "which needs one pass per step and grad_clip 0"
    ),
]


DecayEpochs = Annotated[
    PositiveFloat | None,
    Field(
        description="epochs from which weight decay grows in proportion to the epochs of the run, so that its sum per "
        "epoch stays; 4 agrees with runs tuned for 11 and 15 epochs (plan/own_corpus.py); default: it depends on the "
        "tokens of the run alone"
    ),
]


# EMA-Nesterov
EmaNesterovFactor = Annotated[
    float,
    Field(
        ge=0,
        le=10,
        description="take gradients ahead of the weights, by this x learning rate / its peak along an average of their "
        "movement; 0 is off (EMA-Nesterov, arXiv 2605.25395; 0.6 for plain Muon: modded-nanogpt PR 308)",
    ),
]
EmaDecay = Annotated[
    float, Field(gt=0, lt=1, description="decay of ema_nesterov's average per step (modded-nanogpt PR 308)")
]
EmaStart = Annotated[
    float, Field(ge=0, lt=1, description="progress (0 to 1) from which ema_nesterov takes gradients ahead")
]
EmaUntil = Annotated[
    float, Field(gt=0, le=1, description="progress (0 to 1) until which ema_nesterov takes gradients ahead")
]


# The largest standard deviation at which embeddings begin by default, and that of AdamW: 124m after 40M tokens, three
# seeds: 1.4713 bits per byte; 1.4969 from 0.02 (docs/log.md, 2026-11-30).
EMBEDDING_STD = 1.0
TABLE_RATES = ("embedding_lr", "head_lr")  # rates of their own of the embedding and the output head


class AdamWConfig(Part):
    """AdamW for every parameter (Loshchilov and Hutter, arXiv 1711.05101)."""

    name: Literal["adamw"] = Field("adamw", description="which optimizer: adamw or muon")
    # 124m after 40M tokens: 1.5555 bits per byte; 1.7096 with 0.002 for everything (docs/log.md, 2026-11-24).
    lr: PositiveFloat = Field(1e-3, description="peak learning rate of every parameter without its own")
    embedding_lr: PositiveFloat | None = Field(
        0.1,
        description="peak learning rate of token and position embeddings that are not the head too; their decay per "
        "step stays that of the other weights; none: lr, also the default without scale",
    )
    # After 40M tokens: 1.4973 bits per byte; 1.6051 with the common rate (docs/log.md, 2026-11-28).
    head_lr: PositiveFloat | None = Field(
        0.008,
        description="peak learning rate of the output head; its decay per step stays that of the other weights; none: "
        "lr, also the default without scale",
    )
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay of the first and second moment")
    eps: PositiveFloat = Field(1e-8, description="added to the square root of the second moment")
    weight_decay: NonNegativeFloat = Field(
        0.1, description="decoupled decay of matrices, head and embeddings; vectors are never decayed"
    )
    cautious_weight_decay: bool = Field(
        False, description="decay only the weights that the update shrinks too (arXiv 2510.12402)"
    )
    grad_clip: NonNegativeFloat = Field(1.0, description="maximum global gradient norm; 0 disables clipping")
    scale: bool = Field(True, description="scale learning rate and decay to this model, batch and horizon")
    weight_decay_epochs: DecayEpochs = None
    ema_nesterov: EmaNesterovFactor = 0.0
    ema_nesterov_decay: EmaDecay = 0.99
    ema_nesterov_start: EmaStart = 0.16
    ema_nesterov_until: EmaUntil = 0.76
    master_weights: bool = Field(
        False,
        description="keep float32 copies of weights in bfloat16 with the states in host memory, and update these: no "
        "stochastic rounding; needs weights bfloat16 and offload",
    )
    weights: Weights = "float32"
    states: States = "float32"
    offload: Offload = False
    gradients: Gradients = "device"

    @model_validator(mode="after")
    def _check_state_and_clipping(self) -> Self:
        # The defaults hold for training from random weights.
        for name in TABLE_RATES:
            if not self.scale and name not in self.model_fields_set:
                object.__setattr__(self, name, None)
        _check_states(self.states, self.betas)
        _check_decay_epochs(self.weight_decay_epochs, self.scale)
        _check_clipping(self.gradients, self.grad_clip)
        _check_ema_nesterov(self)
        if self.master_weights and not (self.weights == "bfloat16" and self.offload):
            raise ValueError(
                "master_weights: are float32 copies of bfloat16 weights in host memory; add --optim.weights bfloat16 "
                "and --optim.offload true, or leave it out"
            )
        return self


class MuonConfig(Part):
    """Muon for block matrices (Jordan et al. 2024, kellerjordan.github.io), AdamW for everything else.

    Muon's momentum is stored in float32, bfloat16 or 8 bits, as `states` says; in 8 bits if it is 4bit.
    """

    name: Literal["muon"] = Field("muon", description="which optimizer: adamw or muon")
    lr: PositiveFloat = Field(0.04, description="peak learning rate of the block matrices (Muon)")
    embedding_lr: PositiveFloat = Field(
        0.1, description="peak learning rate of token and position embeddings (AdamW)"
    )
    head_lr: PositiveFloat = Field(0.008, description="peak learning rate of the output head (AdamW)")
    scalar_lr: PositiveFloat = Field(
        0.01, description="peak learning rate of norms, biases and scalars (AdamW)"
    )

    momentum: Beta = Field(0.95, description="Muon's momentum after its warm-up")
    momentum_start: Beta = Field(0.85, description="Muon's momentum at the first step")
    momentum_warmup_steps: NonNegativeInt = Field(
        300, description="steps from momentum_start to momentum; 0 disables the warm-up"
    )
    momentum_end: Beta | None = Field(
        None,
        description="Muon's momentum at the last step; default: it stays (0.85: modded-nanogpt PRs 300 and 321)",
    )
    momentum_cooldown: float = Field(
        0.05, gt=0, le=1, description="fraction of the run, at its end, over which momentum_end is reached"
    )
    nesterov: bool = Field(True, description="use Nesterov momentum")
    ns_steps: PositiveInt = Field(5, le=12, description="Newton-Schulz iterations")
    coefficients: Literal["polar_express", "quintic"] = Field(
        "polar_express",
        description="Newton-Schulz polynomials: one per iteration (arXiv 2505.16932), or one fixed quintic",
    )
    normalize: Literal["none", "neuron"] = Field(
        "neuron",
        description="neuron: divide each row of the update by its running RMS (NorMuon, arXiv 2510.05491)",
    )
    normalize_beta: Beta = Field(0.95, description="decay of the running RMS of normalize = neuron")

    row_floor: NonNegativeFloat = Field(
        0.0,
        description="length of each row of the update, before the learning rate, as a share of that of the row of the "
        "weight; shorter ones are lengthened; 0 is none (0.35 to 0.3825, with little or no weight decay: "
        "modded-nanogpt PRs 274 and 328)",
    )
    radial_brake: NonNegativeFloat | None = Field(
        None,
        le=1,
        description="factor of the part of an update that lengthens a matrix; its length then changes by this part "
        "alone (0.5: modded-nanogpt PR 294, without weight decay)",
    )

    weight_decay: NonNegativeFloat = Field(0.2, description="decoupled decay of the block matrices")
    weight_decay_schedule: Literal["constant", "linear to zero"] = Field(
        "linear to zero",
        description="change of both decays over the run, in addition to their product with the learning rate",
    )
    table_weight_decay: NonNegativeFloat = Field(
        0.0, description="decoupled decay of embeddings, positions and head (modded-nanogpt PR 172)"
    )
    cautious_weight_decay: bool = Field(
        True, description="decay only the weights that the update shrinks too (arXiv 2510.12402)"
    )

    betas: tuple[Beta, Beta] = Field(
        (0.8, 0.95), description="AdamW's betas for embeddings, head and vectors"
    )
    eps: PositiveFloat = Field(1e-10, description="AdamW's eps for embeddings, head and vectors")
    grad_clip: NonNegativeFloat = Field(0.0, description="maximum global gradient norm; 0 disables clipping")
    scale: bool = Field(True, description="scale learning rates and decay to this model, batch and horizon")
    weight_decay_epochs: DecayEpochs = None
    ema_nesterov: EmaNesterovFactor = 0.0
    ema_nesterov_decay: EmaDecay = 0.99
    ema_nesterov_start: EmaStart = 0.16
    ema_nesterov_until: EmaUntil = 0.76
    weights: Weights = "float32"
    states: States = "float32"
    offload: Offload = False
    gradients: Gradients = "device"

    @property
    def momentum_in_8_bits(self) -> bool:
        """True if Muon's momentum has 8 bits."""
        return self.states in QUANTIZED_STATES

    @property
    def uses_row_sums(self) -> bool:
        """True if an update depends on the length of the weights."""
        return self.row_floor > 0 or self.radial_brake is not None

    @model_validator(mode="after")
    def _check_state_and_clipping(self) -> Self:
        _check_states(self.states, self.betas)
        largest = max(self.momentum, self.momentum_start, self.momentum_end or 0.0)
        if self.states != "float32" and largest > LARGEST_BFLOAT16_BETA:
            raise ValueError(
                f"momentum: with states {self.states}, Muon's momentum is too coarse for the small changes of "
                f"{largest}; use states float32, or a momentum of at most {LARGEST_BFLOAT16_BETA}"
            )
        _check_decay_epochs(self.weight_decay_epochs, self.scale)
        _check_clipping(self.gradients, self.grad_clip)
        _check_ema_nesterov(self)
        return self


def _check_states(states: StateFormat, betas: tuple[float, float]) -> None:
    if states == "bfloat16" and max(betas) > LARGEST_BFLOAT16_BETA:
        raise ValueError(
            f"states: bfloat16 is too coarse for the small changes of a beta of {max(betas)}; use float32 or 8bit, or "
            f"betas of at most {LARGEST_BFLOAT16_BETA}"
        )


def _check_decay_epochs(epochs: float | None, scale: bool) -> None:
    if epochs is not None and not scale:
        raise ValueError("weight_decay_epochs: needs --optim.scale true; or set weight_decay itself")


def ema_updates_per_step(config: AdamWConfig | MuonConfig) -> float:
    """Return EMA-Nesterov's interpolations of all weights per step, of the average and of the move, over the run."""
    start, until = config.ema_nesterov_start, config.ema_nesterov_until
    return until + (until - start) if config.ema_nesterov else 0.0


def _check_ema_nesterov(config: AdamWConfig | MuonConfig) -> None:
    if config.ema_nesterov and config.weights != "float32":
        raise ValueError(
            "ema_nesterov: its moves are too small for bfloat16 weights, also those of 24bit; use --optim.weights "
            "float32"
        )
    if config.ema_nesterov and config.ema_nesterov_start >= config.ema_nesterov_until:
        raise ValueError(
            f"ema_nesterov_start: {config.ema_nesterov_start} is not before ema_nesterov_until "
            f"{config.ema_nesterov_until}"
        )


def _check_clipping(gradients: GradientPlace, grad_clip: float) -> None:
    if gradients == "released" and grad_clip:
        raise ValueError(
            "gradients: released updates weights before the norm of all gradients is known, so gradients cannot be "
            "clipped; add --optim.grad_clip 0, or use --optim.gradients host"
        )


OptimConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="name")]
