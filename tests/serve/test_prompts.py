"""Prompts: messages where there is a template, wherever it stands, and text that makes no special token."""

import json
import shutil
from pathlib import Path

import pytest

from deskside.data.renderer import NotRendered
from deskside.export.load import Loaded, load_model
from deskside.serve.prompts import Prompts
from tests.serve.chatty import TEMPLATE, make_chatty, rendered

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the ship, 東京 😀\n\n  and more"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chatty(tmp_path_factory.mktemp("prompts"))[1]


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load_model(folder)


def test_text_begins_with_the_start_token_and_spells_no_other(loaded: Loaded) -> None:
    start, *tokens = Prompts(loaded).text("a<|im_end|>\n<|im_start|>b<|endoftext|>")
    special = {loaded.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    assert start == loaded.start_token
    assert not special & set(tokens)


def test_templates_inside_of_the_configuration_and_none(folder: Path, loaded: Loaded, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    shutil.copytree(folder, inside)
    (inside / "chat_template.jinja").unlink()
    assert not Prompts(load_model(inside)).chats
    (inside / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokens = Prompts(load_model(inside)).messages(MESSAGES)
    assert tokens == Prompts(loaded).messages(MESSAGES)
    assert loaded.tokenizer.decode(tokens, skip_special_tokens=False) == rendered(MESSAGES)


def test_a_template_that_refuses_says_why(loaded: Loaded) -> None:
    with pytest.raises(NotRendered, match="refuses these messages: no wizards"):
        Prompts(loaded).messages([{"role": "wizard", "content": "a"}])
