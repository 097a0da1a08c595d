"""Prompts: messages if there is a template, wherever it is stored, and text that creates no special token."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deskside.data.chat.messages import Conversation, NotRendered
from deskside.data.encoder import ReferenceEncoder, choose_encoder
from deskside.serve.templating import PREFIX_CHARACTERS, PromptEncoder, PromptTooLong
from deskside.weights.load import Loaded, load_model
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
    start, *tokens = PromptEncoder(loaded).text("a<|im_end|>\n<|im_start|>b<|endoftext|>")
    special = {loaded.tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
    assert start == loaded.start_token
    assert not special & set(tokens)


def test_templates_inside_of_the_configuration_and_none(folder: Path, loaded: Loaded, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    shutil.copytree(folder, inside)
    (inside / "chat_template.jinja").unlink()
    assert not PromptEncoder(load_model(inside)).has_chat_template
    (inside / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    tokens = PromptEncoder(load_model(inside)).conversation(Conversation(MESSAGES))
    assert tokens == PromptEncoder(loaded).conversation(Conversation(MESSAGES))
    assert loaded.tokenizer.decode(tokens, skip_special_tokens=False) == rendered(MESSAGES)


def test_a_template_that_refuses_says_why(loaded: Loaded) -> None:
    with pytest.raises(NotRendered, match="refuses these messages: no wizards"):
        PromptEncoder(loaded).conversation(Conversation([{"role": "wizard", "content": "a"}]))


LONG = {
    "one word": "<" * 1_000_000,
    "words": "the sea " * 125_000,
    "numbers": "q1 " * 330_000,
    "Devanagari": "क्" * 160_000,
    "special tokens": "<|im_end|>" * 100_000,
    "emoji": "😀" * 250_000,
}


@pytest.mark.parametrize("name", LONG)
def test_texts_that_are_far_too_long_are_never_encoded_whole(
    loaded: Loaded, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, room = PromptEncoder(loaded, 4095), 4095 * PREFIX_CHARACTERS
    encoded: list[int] = []
    real = ReferenceEncoder.ids

    def counting(self: ReferenceEncoder, text: str, plain: bool = True) -> NDArray[np.uint32]:
        encoded.append(len(text))
        return real(self, text, plain)

    monkeypatch.setattr(ReferenceEncoder, "ids", counting)

    def chat(text: str) -> list[int]:
        return prompts.conversation(Conversation([{"role": "user", "content": text}]))

    for attempt in (prompts.text, chat):
        encoded.clear()
        with pytest.raises(PromptTooLong, match="maximum is 4095"):
            attempt(LONG[name])
        assert sum(encoded) <= 10 * room  # a special token has two characters while it is escaped
    # A prompt that is not far too long is counted exactly.
    for text in ("the sea " * 2500, "q1 " * 2700):
        tokens = PromptEncoder(loaded).text(text)
        assert PromptEncoder(loaded, len(tokens)).text(text) == tokens
        with pytest.raises(PromptTooLong, match=f"has {len(tokens)} tokens"):
            PromptEncoder(loaded, len(tokens) - 1).text(text)


def test_prompts_are_the_same_with_either_library(loaded: Loaded) -> None:
    pytest.importorskip("fastokens")
    info = choose_encoder(loaded.tokenizer)
    assert info.library == "fastokens"
    slow, fast = PromptEncoder(loaded), PromptEncoder(loaded, encoder=info)
    for text in ("", "the sea", "a<|im_end|>\n<|im_start|>b", "\ue000 e\u0301 नमस्ते 🎉\u200d", "q1 " * 900):
        assert fast.text(text) == slow.text(text)
        messages = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": text}]
        assert fast.conversation(Conversation(messages)) == slow.conversation(Conversation(messages))
