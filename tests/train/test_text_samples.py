"""Samples of a pretrained model."""

from pathlib import Path
from typing import Any

import pytest

from deskside.train import text_samples
from tests.train import tiny_run


def test_samples_of_a_limited_run_are_cut_off(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that needs a second per token, samples take a fiftieth of the length."""
    virtual = tiny_run.VirtualTime(monkeypatch, lambda step: 2.0)
    original, seen = text_samples.generate_events, []

    def slow(*arguments: Any, **given: Any) -> Any:
        for event in original(*arguments, **given):
            virtual.now += 1.0
            seen.append(event)
            yield event

    monkeypatch.setattr(text_samples, "generate_events", slow)
    config = tiny_run.config(data, schedule={"length": "100s"}, batch={"tokens": 256})
    summary = tiny_run.train(tmp_path, config).summary
    assert len(seen) == 2 and summary["samples"], "2 s of 100 s, which is a fiftieth"
