"""Types that several parts of the configuration share."""

from pathlib import Path

import pytest

from deskside.config import merge
from deskside.config.align import GrpoConfig, SftConfig


def test_a_tilde_is_the_home_directory_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert merge.build([{"data": {"path": "~/d/p"}}]).data.path == f"{tmp_path}/d/p"
    grpo = GrpoConfig(reward="~/my.py:reward", tools="~/my.py:add,page", template="~/chat.jinja")
    assert (grpo.reward, grpo.tools) == (f"{tmp_path}/my.py:reward", f"{tmp_path}/my.py:add,page")
    assert SftConfig(template="~/chat.jinja").template == grpo.template == f"{tmp_path}/chat.jinja"
    unchanged = "0.9*number+0.1*format"
    assert GrpoConfig(reward=unchanged).reward == unchanged
    assert merge.build([{"data": {"path": "d/~"}}]).data.path == "d/~"
