"""Modelfiles: their Go template gives the text that transformers renders with the chat template."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from deskside.export.ollama import modelfile
from tests.data.chat_tokenizer import make

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
)
# Shaped like Llama 3's and Mistral's
HEADERS = (
    "<s>{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
INST = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'system' %}[SYS]{{ m.content }}[/SYS]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n\n</think>\n\n{% endif %}")
Talk = list[dict[str, str]]
TALKS: list[Talk] = [
    [{"role": "user", "content": "How are you?"}],
    [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "नमस्ते {x} $1"}],
    [
        {"role": "system", "content": "s"},
        *({"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")),
        {"role": "user", "content": "last"},
    ],
]


def in_go(template: str, messages: Talk) -> str:
    """Return the rendering by Go's text/template, for the four actions that the file uses."""
    system = next((m["content"] for m in messages if m["role"] == "system"), "")

    def branch(match: re.Match[str]) -> str:
        return match[1].replace("{{ .System }}", system) if system else match[2]

    text = re.sub(
        r"\{\{ if \.System \}\}(.*?)\{\{ else \}\}(.*?)\{\{ end \}\}", branch, template, count=1, flags=re.S
    )
    before, rest = text.split("{{ range .Messages }}")
    clauses = re.findall(r'\{\{ if eq \.Role "(\w+)" \}\}(.*?)\{\{ end \}\}', rest, re.S)
    after = rest[rest.rindex("{{ end }}") + len("{{ end }}") :]
    turns = [
        body.replace("{{ .Content }}", m["content"])
        for m in messages
        for role, body in clauses
        if role == m["role"]
    ]
    return before + "".join(turns) + after


def written(folder: Path, template: str | None, stops: Sequence[str] = ("<|im_end|>",)) -> tuple[str, bool]:
    chat = make(folder)
    if template is not None:
        (chat / "chat_template.jinja").write_text(template, "utf-8")
    return modelfile("m-Q4_K_M.gguf", chat, stops)


@pytest.mark.parametrize("template", [None, CHATML, DEFAULT_SYSTEM, HEADERS, INST, THINKING])
def test_conversations_are_rendered_alike(template: str | None, tmp_path: Path) -> None:
    text, whole = written(tmp_path, template)
    assert (
        whole and text.startswith("FROM ./m-Q4_K_M.gguf\n") and text.endswith('PARAMETER stop "<|im_end|>"\n')
    )
    found = re.search('TEMPLATE """(.*)"""', text, re.S)
    assert found is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path / "chat")
    for talk in TALKS:
        expected = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert in_go(found[1], talk) == expected


@pytest.mark.parametrize(
    "template",
    [
        # would stay at the date of the export
        CHATML.replace("{% for m", "{{ strftime_now('%d %b %Y') }}{% for m"),
        CHATML.replace("m['content']", "m['content'] | upper"),
        CHATML.replace("<|im_end|>\n", "{{ loop.index }}"),
        CHATML.replace(
            "{% for m",
            "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{% for m",
        ),
        CHATML.replace("<|im_end|>\n", '"""'),
    ],
)
def test_other_templates_are_left_to_ollama(template: str, tmp_path: Path) -> None:
    text, whole = written(tmp_path, template)
    assert not whole and "TEMPLATE" not in text and 'stop "<|im_end|>"' in text
