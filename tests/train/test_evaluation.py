"""An evaluation leaves the weights of the run as they were, also if it fails."""

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deskside.config.run import RunConfig
from deskside.train.evaluation import Evaluator


def test_converted_weights_of_the_average_are_forgotten_after_an_error() -> None:
    """Otherwise the steps that follow would compute with them."""
    done: list[str] = []

    @contextlib.contextmanager
    def applied(blend: float, on_device: bool) -> Any:
        try:
            yield
        finally:
            done.append("restored")

    precision = SimpleNamespace(forget_weights=lambda: done.append("forgotten"))
    evaluator = SimpleNamespace(
        average=SimpleNamespace(updates=1, applied=applied),
        session=SimpleNamespace(config=RunConfig(), precision=precision),
    )
    with pytest.raises(RuntimeError), Evaluator.averaged(cast(Evaluator, evaluator)):
        raise RuntimeError
    assert done == ["forgotten", "restored", "forgotten"]
