"""Checkpoint files are complete or absent after a kill at any operation, and every flipped bit is detected."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.utils.errors import RunError
from deskside.weights import checkpoint as files
from deskside.weights.checkpoint_folder import OPTIMIZER, WEIGHTS, Checkpoint, Damaged, find

NAMES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]


def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a.weight": torch.randn(5, 7), "b": torch.randn(3, 4).t(), "step": torch.tensor(float(seed))}


def save(folder: Path, step: int, **state: Any) -> Checkpoint:
    return files.save(
        folder, step, {"model": tensors(step), "optimizer": tensors(step + 1)}, {"step": step, **state}
    )


def never(text: str) -> None:
    raise AssertionError(text)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    made = save(tmp_path, 7, note="café")
    assert made == files.newest_good(tmp_path, never) and made.path.name == "step-000000007"
    assert files.load_state(made) == {"step": 7, "note": "café"} and not made.sharded
    for name, seed in ((WEIGHTS, 7), (OPTIMIZER, 8)):
        loaded = files.load_tensors(made, name, torch.device("cpu"))
        assert loaded.keys() == tensors(seed).keys()
        for key, value in tensors(seed).items():
            assert torch.equal(loaded[key], value) and loaded[key].shape == value.shape


def test_found_newest_first_and_nothing_else(tmp_path: Path) -> None:
    assert find(tmp_path / "none") == [] and files.newest_good(tmp_path, never) is None
    for step in (5, 100, 20):
        save(tmp_path, step)
    (tmp_path / ".tmp-step-000000200").mkdir()
    (tmp_path / "damaged-step-000000300").mkdir()
    (tmp_path / "step-000000400").write_text("a file")
    assert [c.step for c in find(tmp_path)] == [100, 20, 5]


def test_prune_keeps_the_newest_and_the_permanent(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, permanent=step in (2, 4))
    files.prune(tmp_path, 2, lambda c: files.load_state(c)["permanent"])
    assert [c.step for c in find(tmp_path)] == [7, 6, 4, 2]
    files.prune(tmp_path, 1, lambda c: False)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000007"]


def test_clean_removes_what_was_interrupted(tmp_path: Path) -> None:
    made = save(tmp_path, 1)
    for name in (".tmp-step-000000002", ".tmp-old-step-000000000"):
        shutil.copytree(made.path, tmp_path / name)
    files.clean(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, attempt=1)
    assert files.load_state(save(tmp_path, 3, attempt=2))["attempt"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000003"]


class Killed(BaseException):
    """Replaces SIGKILL: nothing catches it, so nothing is cleaned up."""


OPERATIONS = [(os, "fsync"), (os, "replace"), (shutil, "rmtree"), (files, "save_file"), (Path, "write_text")]


def test_a_kill_at_any_operation_leaves_a_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves step 3 and prunes to one, killed before and after each disk operation in turn."""
    moments, finished = 0, False
    while not finished:
        folder = tmp_path / str(moments)
        for step in (1, 2):
            save(folder, step)
        left = moments

        def killing(operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                for happened in (False, True):
                    result = operation(*args, **kwargs) if happened else None
                    if left == 0:
                        raise Killed
                    left -= 1
                return result

            return run

        with monkeypatch.context() as patch:
            for module, name in OPERATIONS:
                patch.setattr(module, name, killing(getattr(module, name)))
            try:
                save(folder, 3)
                files.prune(folder, 1, lambda c: False)
                finished = True
            except Killed:
                pass
        good = files.newest_good(folder, never)
        assert good is not None and good.step in (2, 3)
        for found in find(folder):
            files.verify(found)
        assert torch.equal(
            files.load_tensors(good, WEIGHTS, torch.device("cpu"))["b"], tensors(good.step)["b"]
        )
        save(folder, 4)
        files.prune(folder, 1, lambda c: False)
        assert [p.name for p in folder.iterdir()] == ["step-000000004"]
        moments += 1
    assert moments > 20  # four files and two folders are synced to disk, two moments each, twice, and more


def test_a_refusing_disk_is_one_error_and_leaves_the_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((os, "fsync"), (os, "replace"), (Path, "write_text")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(RunError, match=r"step 2 could not be written.*No space left.*MiB free"):
                save(tmp_path, 2)
        assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]
        files.verify(find(tmp_path)[0])


def test_a_folder_that_cannot_be_created_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunError, match=r"step 1 could not be written.*Read-only"):
        save(tmp_path / "checkpoints", 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(tmp_path_factory.mktemp("whole"), 12)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_every_flipped_bit_and_every_cut_is_found(
    whole: Checkpoint, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    path = whole.path / name
    original = path.read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    if data.draw(st.booleans()):
        changed = bytearray(original)
        changed[position] ^= 1 << data.draw(st.integers(0, 7))
    else:
        changed = bytearray(original[:position])
    try:
        path.write_bytes(changed)
        files.verify(whole)
    except Damaged as damage:
        assert str(whole.path) in str(damage)
        assert name in str(damage) or name == "manifest.json"  # then another file may seem wrong
    else:
        # Only in the manifest may a flipped bit go unnoticed, if it changes nothing about the files.
        assert name == "manifest.json"
        assert json.loads(changed)["files"] == json.loads(original)["files"]
    finally:
        path.write_bytes(original)
    files.verify(whole)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema_version": 1, "files": []}',
        '{"schema_version": 1, "files": {"state.json": {}}}',
        '{"schema_version": 1, "files": {}}',
        '{"schema_version": 2, "files": {}}',
    ],
)
def test_manifests_that_say_nothing(text: str, tmp_path: Path) -> None:
    made = save(tmp_path, 1)
    (made.path / "manifest.json").write_text(text)
    with pytest.raises(Damaged, match=r"manifest\.json"):
        files.verify(made)


def test_the_newest_good_one_is_used_and_damaged_ones_are_named(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-000000004" / "model.safetensors").unlink()
    with (tmp_path / "step-000000003" / "state.json").open("a") as file:
        file.write(" ")
    told: list[str] = []
    good = files.newest_good(tmp_path, told.append)
    assert good is not None and good.step == 2
    assert ["step 4" in told[0], "model.safetensors" in told[0]] == [True, True]
    assert "step 3" in told[1] and "state.json" in told[1] and len(told) == 2

    moved = files.set_aside(tmp_path, newer_than=2)
    assert {p.name for p in moved} == {"damaged-step-000000003", "damaged-step-000000004"}
    assert [c.step for c in find(tmp_path)] == [2, 1]
    save(tmp_path, 3)
    assert len(files.set_aside(tmp_path, newer_than=2)) == 1  # the second of that name replaces the first


def test_all_damaged_is_an_error_that_names_them(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step).path / "optimizer.safetensors").write_bytes(b"")
    told: list[str] = []
    with pytest.raises(RunError, match=r"step-000000002, step-000000001 are damaged; restore"):
        files.newest_good(tmp_path, told.append)
    assert len(told) == 2
