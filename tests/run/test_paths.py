from pathlib import Path

import pytest

from deskside.config.run import RunConfig
from deskside.run.directory import resolve_path, with_resolved_paths


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where the run was begun, and where the person stands now."""
    begun, now = tmp_path / "begun", tmp_path / "now"
    for folder in (begun / "both", begun / "there", now / "both", now / "here"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(now)
    return begun, now


def test_a_path_counts_from_where_the_run_was_begun(trees: tuple[Path, Path]) -> None:
    begun, now = trees
    assert resolve_path("there", str(begun)) == str(begun / "there")
    assert resolve_path("both", str(begun)) == str(begun / "both")
    assert resolve_path("here", str(begun)) == "here"  # moved
    assert resolve_path("nowhere", str(begun)) == str(begun / "nowhere")
    for told in (None, 7, str(now)):  # older runs do not say
        assert resolve_path("both", told) == "both"
    assert resolve_path(str(now / "here"), str(begun)) == str(now / "here")


def test_a_reward_of_a_file_and_the_data(trees: tuple[Path, Path]) -> None:
    begun, _ = trees
    align = {"name": "grpo", "reward": "my.py:score"}
    config = RunConfig.model_validate({"data": {"path": "there", "document_mask": True}, "align": align})
    found = with_resolved_paths(config, {"directory": str(begun)})
    assert found.data.path == str(begun / "there") and found.data.document_mask
    assert found.align is not None and getattr(found.align, "reward", "") == f"{begun / 'my.py'}:score"
    assert with_resolved_paths(config, {}) == config
    named = config.model_copy(update={"align": None, "data": RunConfig().data})
    assert with_resolved_paths(named, {"directory": str(begun)}) == named
