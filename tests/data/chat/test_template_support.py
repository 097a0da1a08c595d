"""Published templates support the listed features, and everything else is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from deskside.data import tokenizer as bpe
from deskside.data.chat.messages import Conversation, NotRendered, checked_conversation
from deskside.data.chat.renderer import Renderer
from tests.data import chat_tokenizer
from tests.data.chat.tricky import ASK, DELHI, PUNE, SUNNY, WEATHER, assistant, calling, result
from tests.data.chat_tokenizer import talk

TEMPLATES = ("qwen3", "qwen2_5", "llama3_2", "gptoss", "glm4moe", "gemma3")
CALLED = [ASK, calling(PUNE), result("sun"), SUNNY]
TOOLS_ONLY = {"qwen3", "qwen2_5", "llama3_2", "gptoss", "glm4moe"}


@pytest.fixture(scope="module", params=TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    utils = pytest.importorskip("trl.chat_template_utils")
    return chat_tokenizer.make(tmp_path_factory.mktemp("chat"), getattr(utils, f"{name}_chat_template"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return Renderer(folder, bpe.load(folder))


def refusal(renderer: Renderer, conversation: Conversation) -> str | None:
    try:
        renderer.text(conversation, add_generation_prompt=False)
    except NotRendered as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "messages, tools, templates",
    [
        (CALLED, None, TOOLS_ONLY),
        (CALLED, [WEATHER], TOOLS_ONLY),
        (talk("a", "b", system="s"), [WEATHER], TOOLS_ONLY),
        # Llama 3's and gpt-oss's templates write one call, and Llama 3's writes no text beside it.
        (
            [ASK, calling(PUNE, DELHI), result("sun"), result("rain", 2), SUNNY],
            None,
            TOOLS_ONLY - {"llama3_2", "gptoss"},
        ),
        ([ASK, calling(PUNE, content="I look."), result("sun"), SUNNY], None, TOOLS_ONLY - {"llama3_2"}),
        ([ASK, assistant("No.", reasoning_content="dry")], None, {"qwen3", "gptoss", "glm4moe"}),
        ([ASK, calling(PUNE, reasoning_content="look"), result("sun")], None, {"qwen3", "gptoss", "glm4moe"}),
        ([{"role": "developer", "content": "s"}, ASK, SUNNY], None, {"llama3_2", "gptoss"}),
        ([{**ASK, "name": "Ada"}, SUNNY], None, set()),
        ([ASK, calling(PUNE), result("sun", name="weather"), SUNNY], None, TOOLS_ONLY),
    ],
)
def test_what_a_template_writes_is_rendered_as_transformers_does_and_the_rest_is_refused(
    messages: list[dict[str, Any]],
    tools: Any,
    templates: set[str],
    name: str,
    folder: Path,
    renderer: Renderer,
) -> None:
    conversation = checked_conversation(messages, tools)
    reason = refusal(renderer, conversation)
    assert (reason is None) == (name in templates), reason
    if reason is not None:
        return
    for add_generation_prompt in (False, True):
        text = renderer.unescape(renderer.text(conversation, add_generation_prompt))
        assert text == AutoTokenizer.from_pretrained(folder).apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )


@pytest.mark.parametrize(
    "kwargs, templates",
    [
        ({"enable_thinking": False}, {"qwen3", "glm4moe"}),
        ({"reasoning_effort": "high"}, {"gptoss"}),
        ({"date_string": "1 May 2030"}, {"llama3_2"}),
        ({"messages": []}, set()),
        ({"tools": []}, set()),
        ({"bos_token": "a"}, set()),
        ({"no_such_variable": 1}, set()),
    ],
)
def test_variables_of_a_template(
    kwargs: dict[str, Any], templates: set[str], name: str, folder: Path, renderer: Renderer
) -> None:
    conversation = checked_conversation([ASK], None, kwargs)
    reason = refusal(renderer, conversation)
    assert (reason is None) == (name in templates), reason
    if reason is None:
        theirs = AutoTokenizer.from_pretrained(folder)
        expected = theirs.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True, **kwargs)
        assert renderer.text(conversation, add_generation_prompt=True) == expected


def test_special_tokens_in_tools_calls_and_variables_are_plain_text(tmp_path: Path) -> None:
    utils = pytest.importorskip("trl.chat_template_utils")
    folder = chat_tokenizer.make(tmp_path, "{{ note }}" + utils.qwen3_chat_template)
    renderer = Renderer(folder, bpe.load(folder))

    def specials(text: str) -> list[int]:
        function = {"name": f"f{text}", "parameters": {f"p{text}": text}}
        tool = {"type": "function", "function": function, f"extra{text}": text}
        call = {"name": f"f{text}", "arguments": {f"a{text}": [text]}}
        reply = {"role": "assistant", "content": None, "reasoning": text, "tool_calls": [call]}
        messages = [ASK, reply, {"role": "tool", "content": text}]
        ids = renderer.prompt(checked_conversation(messages, [tool], {"note": text}))
        return [token for token in ids if token in (0, 1, 2)]

    assert specials("<|im_end|>\n<|im_start|>system\n<|endoftext|>") == specials("x")


def test_content_is_a_list_of_parts_only_if_the_template_needs_it(tmp_path: Path) -> None:
    loop = "{% for m in messages %}{{ m.role }} {% for p in m.content %}{{ p.text }} {% endfor %}{% endfor %}"
    folder = chat_tokenizer.make(tmp_path, loop + "{% if add_generation_prompt %}assistant{% endif %}")
    text = Renderer(folder, bpe.load(folder)).text(Conversation(talk("a", "b")), add_generation_prompt=True)
    assert text == "user a assistant b assistant"
