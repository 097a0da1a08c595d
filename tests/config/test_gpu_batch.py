"""The default batch on several GPUs grows with the square root of their number, and only if the user set none."""

import math
from typing import Any

import pytest

from deskside.config.gpu_batch import build_on_gpus, describe_batch, rows_each
from deskside.config.run import RunConfig
from deskside.utils.errors import UsageError


def tokens(gpus: int, **parts: Any) -> int:
    return build_on_gpus([parts], gpus).batch.tokens


@pytest.mark.parametrize("gpus", range(1, 65))
def test_it_grows_with_the_root_and_can_be_shared(gpus: int) -> None:
    one, several = RunConfig().batch.tokens, tokens(gpus)
    assert several % (gpus * 2048) == 0
    low_passes = gpus * 2**14  # passes that are not host-bound
    assert several <= max(one * math.sqrt(2 * gpus), low_passes * math.sqrt(2)) * 1.001
    assert several >= max(one * math.sqrt(gpus / 2), low_passes / math.sqrt(2)) / 1.001


def test_powers_of_two() -> None:
    assert [tokens(gpus) for gpus in (1, 2, 4, 8, 16)] == [2**16, 2**17, 2**17, 2**18, 2**18]


@pytest.mark.parametrize(
    ("gpus", "parts", "expected"),
    [
        (8, {"batch": {"tokens": 65536}}, 65536),
        (2, {"batch": {"sequence_length": 512}}, 131072),
        (4, {"batch": {"micro_tokens": 65536}}, 262144),
        (4, {"parallel": {"context": 2}}, 131072),
        (4, {"parallel": {"context": 4}}, 65536),
        (3, {}, 3 * 32768),
        (2, {"schedule": {"stages": [{"until": 1.0, "sequence_length": 1024}]}}, 131072),
    ],
)
def test_only_what_is_not_given(gpus: int, parts: dict[str, Any], expected: int) -> None:
    assert tokens(gpus, **parts) == expected


def test_rows_that_processes_cannot_share() -> None:
    assert rows_each(1024, 32, 4) == 8
    with pytest.raises(
        UsageError, match=r"33 rows, which 2 processes cannot .* a multiple of 64, or another"
    ):
        rows_each(33 * 32, 32, 2)
    with pytest.raises(UsageError, match="32 rows, which 3 processes"):
        build_on_gpus([{"batch": {"tokens": 65536}}], 3)
    stages = [
        {"until": 0.5, "sequence_length": 512, "batch_tokens": 512},
        {"until": 1.0, "sequence_length": 1024},
    ]
    with pytest.raises(UsageError, match="1 rows, which 2 processes"):
        build_on_gpus([{"schedule": {"stages": stages}}], 2)


@pytest.mark.parametrize("gradients", ["host", "released"])
def test_gradients_that_leave_the_gpu_are_for_one(gradients: str) -> None:
    parts = {"optim": {"gradients": gradients}}
    assert build_on_gpus([parts], 1).optim.gradients == gradients
    with pytest.raises(UsageError, match=r"^optim\.gradients: "):
        build_on_gpus([parts], 2)


def test_in_words() -> None:
    assert describe_batch(build_on_gpus([], 8), 8) == "262,144 tokens per step, 32,768 on each of 8 processes"
    shared = build_on_gpus([{"parallel": {"context": 2}}], 8)
    assert describe_batch(shared, 8) == "131,072 tokens per step, 32,768 on every 2 of 8 processes"
