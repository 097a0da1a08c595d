"""Every stage trains with the backends that were fastest at its rows and window, and a resumed run keeps them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from deskside.kernels.attention import BACKENDS, AttentionContext, Requirements
from deskside.kernels.attention.choose import BackendChoice
from deskside.train import next_token
from deskside.train.prepare import attention_choice
from tests.train import tiny_run

STAGES = [
    {"until": 0.5, "sequence_length": 16, "window": 4},
    {"until": 0.8, "sequence_length": 16, "window": 4, "batch_tokens": 128},
    {"until": 1.0, "sequence_length": 32},
]
MODEL = {"window_pattern": "SL", "sliding_window": 8}
FASTEST = {(16, None): "chunked", (16, 4): "reference", (32, None): "sdpa", (32, 8): "chunked"}


class Watched:
    """Records choices from the table above, and which backend computed what: (name, tokens, window)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[tuple[int, int | None]] = []
        self.used: Counter[tuple[str, int, int | None]] = Counter()
        monkeypatch.setattr(attention_choice, "choose_cached", self.choose)
        monkeypatch.setattr(next_token, "sample_text", lambda *given: [])  # the engine uses its own attention
        for name in ("chunked", "reference", "sdpa"):
            object.__setattr__(BACKENDS[name], "function", self.counting(name, BACKENDS[name].function))

    def choose(self, need: Requirements, *given: Any) -> tuple[BackendChoice, str]:
        self.asked.append((need.tokens, need.window))
        name = FASTEST[need.tokens, need.window]
        return BackendChoice(name, {name: 1e-3}, {name: 1e-7}, {}, {}), "measured"

    def counting(self, name: str, function: Any) -> Any:
        def counted(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
            self.used[name, q.shape[1], context.window] += 1
            return function(q, k, v, context)

        return counted


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    plain = {name: backend.function for name, backend in BACKENDS.items()}
    yield Watched(monkeypatch)
    for name, function in plain.items():
        object.__setattr__(BACKENDS[name], "function", function)


def test_every_stage_has_its_own_backends(data: Path, tmp_path: Path, watched: Watched) -> None:
    config = tiny_run.config(
        data, model=MODEL, schedule={"length": "10 steps", "stages": STAGES}, compute={"attention": "auto"}
    )
    tiny_run.train(tmp_path, config)
    assert sorted(watched.asked, key=str) == sorted(FASTEST, key=str)  # each problem is tried once
    plan = tiny_run.plan(tmp_path / "run")
    assert plan["attention"]["full"]["name"] == "sdpa" and plan["attention"]["windowed"]["name"] == "chunked"
    (stage,) = plan["attention"]["stages"]
    assert (stage["sequence_length"], stage["window"]) == (16, 4)
    assert (stage["full"]["name"], stage["windowed"]["name"]) == ("chunked", "reference")
    used = {key for key in watched.used if key[1] in (16, 32)}
    assert used == {(name, tokens, window) for (tokens, window), name in FASTEST.items()}


@pytest.mark.parametrize("old", [False, True])
def test_what_was_recorded_is_read_back(old: bool) -> None:
    recorded: dict[str, Any] = {"full": {"name": "sdpa"}, "windowed": {"name": "chunked"}}
    if not old:
        names = {"full": {"name": "chunked"}, "windowed": {"name": "reference"}}
        recorded["stages"] = [{"sequence_length": 16, "window": 4, **names}]
    attention = attention_choice.recorded_attention(json.loads(json.dumps(recorded)))
    assert attention.at(32, None) == ("sdpa", "chunked")
    assert attention.at(16, 4) == (("sdpa", "chunked") if old else ("chunked", "reference"))


def test_stages_have_their_own_backends_of_shared_rows() -> None:
    def result(name: str, shared: str) -> dict[str, str]:
        return {"name": name, "shared_rows": shared}

    recorded: dict[str, Any] = {
        "full": result("cudnn", "gathered-cudnn"),
        "windowed": result("flash", "gathered-flash"),
        "stages": [{"sequence_length": 16, "window": 4, "full": result("flash", "gathered-flash")}],
    }
    attention = attention_choice.recorded_attention(recorded)
    assert attention.at(32, None) == ("cudnn", "flash") and attention.shared is not None
    assert attention.shared.at(32, None) == ("gathered-cudnn", "gathered-flash")
    assert attention.shared.at(16, 4) == ("gathered-flash", None)
    assert attention_choice.shared_row_names(recorded) == "gathered-cudnn, gathered-flash"
    assert attention_choice.shared_row_names({"full": {"name": "sdpa"}}) == ""
