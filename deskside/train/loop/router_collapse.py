"""Warning that the routers of a mixture of experts have collapsed: they send nearly all tokens to the same few experts.

The other experts then learn nothing, and the model is hardly more than a dense one. A layer has collapsed if as many
experts as a token has get more than `LARGEST_SHARE` of the choices. In 13 measured runs of 12 layers and 8 experts that
had not collapsed, at most two layers looked like this at a time, all but a few of them in the first steps; in one that
had, nine to twelve did from step 100 on (docs/experts.md).
"""

from typing import Any

from deskside.config.model import ModelConfig
from deskside.train.loop.callbacks import Watch

LARGEST_SHARE = 0.9
LAYERS_SHARE = 0.5  # of the layers that have collapsed
ROWS = 5  # consecutive rows of metrics.jsonl with the load by layer


class RouterCollapseWatch(Watch):
    """Training callback that warns once when the routers have collapsed."""

    def __init__(self, config: ModelConfig):
        self._config = config
        self._rows = 0  # consecutive ones with collapsed layers
        self._warned = False

    def on_step(self, row: dict[str, Any], total_steps: int) -> None:
        if "experts" not in row or self._warned:
            return
        layers = row["experts"]["load"]
        chosen = self._config.num_experts_per_tok
        collapsed = sum(sum(sorted(load)[-chosen:]) > LARGEST_SHARE for load in layers)
        self._rows = self._rows + 1 if collapsed >= LAYERS_SHARE * len(layers) else 0
        if self._rows < ROWS:
            return
        self._warned = True
        self.warn(
            f"the routers have collapsed: in {collapsed} of {len(layers)} layers, {chosen} of "
            f"{self._config.num_experts} experts get more than {LARGEST_SHARE:.0%} of the choices, so the others "
            f"learn nothing; start again with {self._remedy()}"
        )

    def _remedy(self) -> str:
        """Return an option with a value that balances more than the present one."""
        config = self._config
        if config.router_bias_update_rate:
            return f"--model.router_bias_update_rate {10 * config.router_bias_update_rate:g}"
        return f"--model.router_aux_loss_coef {max(0.01, 10 * config.router_aux_loss_coef):g}"
