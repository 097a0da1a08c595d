"""Work of adapters over frozen weights.

A frozen weight has no gradient, which saves a third of its products (`step.py`). An adapter adds 4 reads or writes of
the inputs and outputs of its projection, forward and backward together. These numbers were counted by hand and not
measured yet.
"""

from deskside.budget.adapters import adapter_params, head_trains, projection_sizes, scaled_rows
from deskside.budget.operators.operator import Operator
from deskside.budget.operators.products import unquantized_format
from deskside.budget.sizes import Sizes

MAGNITUDE_PASSES = 7  # over the outputs that DoRA scales: two in the forward, five in the backward


def adapter_operators(s: Sizes, activation_bytes: float) -> list[Operator]:
    """Return the products and the memory traffic of adapters, and the gradient of a head that trains with them."""
    if s.spec.adapter is None:
        return []
    sizes = [projection_sizes(s.shape)[name] for name in s.spec.adapter.targets]
    channels = sum((size.rows + size.columns) * size.per_token for size in sizes)
    active = s.leaf("adapter parameters per token", adapter_params(s.shape, s.spec.adapter, active=True))
    traffic = (
        4.0
        * s.tokens
        * s.layers
        * s.leaf("channels into and out of the adapters", channels)
        * activation_bytes
    )
    operators = [
        Operator("adapters", "matmul", 6.0 * s.tokens * active, runs_as=unquantized_format(s.spec)),
        Operator("adapters' inputs and outputs", "traffic", traffic),
    ]
    if s.spec.adapter.dora:
        # The norm multiplies A with the weight as if its rows were tokens, so its time is that of reading the weight.
        rows = s.leaf("rows with a magnitude", scaled_rows(s.shape, s.spec.adapter))
        scaling = MAGNITUDE_PASSES * s.tokens * s.layers * rows * activation_bytes
        operators += [
            Operator("magnitudes", "traffic", scaling),
            Operator("norms of DoRA", "weights", 2.0 * s.block_weights * s.passes),
        ]
    if head_trains(s.shape, s.spec.adapter):
        flops = 2.0 * s.tokens * s.hidden * s.vocabulary
        operators.append(Operator("gradient of the head", "head", flops, runs_as=unquantized_format(s.spec)))
    return operators
