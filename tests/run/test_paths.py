from pathlib import Path

import pytest

from deskside.config.run import RunConfig
from deskside.run.directory import resolve_path, with_resolved_paths


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the directory where the run was started, and the current directory."""
    start, current = tmp_path / "start", tmp_path / "current"
    for folder in (start / "both", start / "there", current / "both", current / "here"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(current)
    return start, current


def test_paths_are_resolved_from_the_start_directory(trees: tuple[Path, Path]) -> None:
    start, current = trees
    assert resolve_path("there", str(start)) == str(start / "there")
    assert resolve_path("both", str(start)) == str(start / "both")
    assert resolve_path("here", str(start)) == "here"  # moved
    assert resolve_path("nowhere", str(start)) == str(start / "nowhere")
    for directory in (None, 7, str(current)):  # older runs do not record their directory
        assert resolve_path("both", directory) == "both"
    assert resolve_path(str(current / "here"), str(start)) == str(current / "here")


def test_paths_of_reward_file_and_data_are_resolved(trees: tuple[Path, Path]) -> None:
    start, _ = trees
    align = {"name": "grpo", "reward": "my.py:score", "tools": "there/tools.py:search,add"}
    config = RunConfig.model_validate({"data": {"path": "there", "document_mask": True}, "align": align})
    resolved = with_resolved_paths(config, {"directory": str(start)})
    assert resolved.data.path == str(start / "there") and resolved.data.document_mask
    assert resolved.align is not None and getattr(resolved.align, "reward", "") == f"{start / 'my.py'}:score"
    assert getattr(resolved.align, "tools", "") == f"{start / 'there/tools.py'}:search,add"
    assert with_resolved_paths(config, {}) == config
    without_paths = config.model_copy(update={"align": None, "data": RunConfig().data})
    assert with_resolved_paths(without_paths, {"directory": str(start)}) == without_paths
