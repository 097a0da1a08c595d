"""A small tokenizer for conversations, and templates that behave like published ones."""

from pathlib import Path
from typing import Any

from deskside.data import tokenizer as bpe
from deskside.data.chat import chat_template

TEXT = [
    "The river ran under a stone bridge while old ships waited for morning light.\n\nWhat is two plus two? It is four.",
    "नमस्ते, आज मौसम कैसा है? बहुत अच्छा है।\n\nவணக்கம், எப்படி இருக்கிறீர்கள்?",
    "system user assistant\n\nI do not know.\n",
] * 3
# Marks the assistant's turns with {% generation %}, as in templates made for training.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Only the last answer begins with an empty thought, as in Qwen3's template.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The text before a reply depends on the number of messages, so no rendering is a prefix of another.
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
    """Make a tokenizer for conversations and return its folder."""
    plain, out = folder / "plain", folder / "chat"
    bpe.save(bpe.train(TEXT, 420), plain)
    chat_template.make_chat_tokenizer(plain, out, template)
    return out


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return messages with these contents, alternating between user and assistant."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return start + [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
