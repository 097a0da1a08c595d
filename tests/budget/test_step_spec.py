"""Invalid step specifications are refused."""

import pytest

from deskside.budget.step_spec import StepSpec


@pytest.mark.parametrize(
    ("sequence_length", "tokens", "micro_tokens", "gpus"),
    [(1024, 4096, 0, 1), (1024, 4096, 100, 1), (1024, 3000, 2048, 1), (1024, 4096, 2048, 3)],
)
def test_wrong_work_is_refused(sequence_length: int, tokens: int, micro_tokens: int, gpus: int) -> None:
    with pytest.raises(ValueError, match=r"tokens"):
        StepSpec(sequence_length, tokens, micro_tokens, gpus=gpus)
