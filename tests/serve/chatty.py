"""A run with a chat template, and servers of it."""

import shutil
from pathlib import Path

import torch

from deskside.data.tokenizer import load
from tests.serve.made_run import MadeRun, make, save

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}"
    "{% if m.content == 'divide by zero' %}{{ 1 / 0 }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_chatty(folder: Path) -> tuple[MadeRun, Path]:
    """Make a run without a chat template. Return it, and the path of a copy with a chat template."""
    made = make(folder)
    chatty = folder / "chatty"
    shutil.copytree(made.path, chatty)
    (chatty / "chat_template.jinja").write_text(TEMPLATE)
    (chatty / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return made, chatty


def never_end(made: MadeRun, path: Path) -> Path:
    """Give the run at `path`, which is `made` or a copy of it, weights that say "a" for ever. Return the path."""
    said = load(made.path).token_to_id("a")
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "attn.output" in name or "mlp.output" in name:
                parameter.zero_()  # every block adds nothing, so the hidden state is the embedding
        made.model.embed.weight.fill_(1.0)
        made.model.head.weight.zero_()
        made.model.head.weight[said] = 1.0
    save(path, 30, made.model)
    return path


def make_endless(folder: Path) -> Path:
    """Return the path of a run with a chat template whose model never ends its answer."""
    return never_end(*make_chatty(folder))


def rendered(messages: list[dict[str, str]]) -> str:
    """Return the template's rendering of messages, written by hand."""
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n"
