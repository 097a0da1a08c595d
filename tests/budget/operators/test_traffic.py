"""The memory traffic of activations, against counting by hand."""

from deskside.config.model import ModelConfig
from tests.budget.operators.small_step import SMALL, TOKENS, amount, operators


def test_dropout_reads_and_writes_its_tensors_twice() -> None:
    """Once in the forward and once in the backward, and once more for blocks that are recomputed and not fused."""
    shape, tensor = ModelConfig(**SMALL), 2 * TOKENS * SMALL["hidden_size"]
    places = 2 * SMALL["num_hidden_layers"] + 1
    for options, more in (({}, 0), ({"activation_checkpointing": "block"}, places - 1)):
        with_dropout, without = (operators(shape, dropout=d, **options) for d in (True, False))
        assert (
            amount(with_dropout, "traffic") - amount(without, "traffic") == (4 * places + 2 * more) * tensor
        )
    fused = {"copies": "step", "activation_checkpointing": "block"}
    added = [o for o in operators(shape, dropout=True, **fused) if o.name == "dropout"]
    assert sum(o.amount for o in added) == 4 * places * tensor
