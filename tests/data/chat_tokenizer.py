"""A small tokenizer for conversations, and templates that behave like published ones."""

from pathlib import Path
from typing import Any

from deskside.data import tokenizer
from deskside.data.chat import chat_template

TEXT = [
    "The river ran under a stone bridge while old ships waited for morning light.\n\nWhat is two plus two? It is four.",
    "नमस्ते, आज मौसम कैसा है? बहुत अच्छा है।\n\nவணக்கம், எப்படி இருக்கிறீர்கள்?",
    "system user assistant\n\nI do not know.\n",
] * 3
# {% generation %} around what an assistant says, as in templates made for training.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The newest answer begins with an empty thought that older ones lose: as Qwen3's does.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What stands before a reply depends on how many messages follow: nothing is a prefix of anything.
COUNTING = (
    "{{ messages | length }}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
# No special token ends a turn.
PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(folder: Path, template: str | None = None) -> Path:
    """A folder with a tokenizer for conversations."""
    plain, out = folder / "plain", folder / "chat"
    tokenizer.save(tokenizer.train(TEXT, 420), plain)
    chat_template.make_chat_tokenizer(plain, out, template)
    return out


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages by user and assistant in turn."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return start + [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
