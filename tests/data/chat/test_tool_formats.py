"""Detection of the tool call format of a chat template."""

from pathlib import Path

import pytest

from deskside.data import tokenizer as bpe
from deskside.data.chat.renderer import Renderer
from deskside.data.chat.tool_formats import ToolFormat, find_tool_format
from tests.data.chat.templates import template
from tests.data.chat_tokenizer import make

TAGGED = ToolFormat("<tool_call>", "</tool_call>")
FORMATS = {
    "qwen2_5": TAGGED,
    "qwen3": TAGGED,
    "qwen3_instruct_2507": TAGGED,
    "llama3_1": ToolFormat("", key="parameters"),
    "llama3_2": ToolFormat("", key="parameters"),
    "mistral": ToolFormat("[TOOL_CALLS]", listed=True),
    "mistral_named": ToolFormat("[TOOL_CALLS]", named="[ARGS]"),
    "listed": ToolFormat("<|tool_call|>", "<|/tool_call|>", listed=True),
    "gemma3": None,  # writes no calls
    "llama3": None,
    "qwen3_5_think": None,  # calls in XML
    "gptoss": None,
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path) -> None:
    folder = make(tmp_path)
    (folder / "chat_template.jinja").write_text(template(name), "utf-8")
    renderer = Renderer(folder, bpe.load(folder))
    found = find_tool_format(
        lambda conversation, prompt: renderer.unescape(renderer.text(conversation, prompt))
    )
    assert found == FORMATS[name]
