"""Chat templates with tools: TRL's copies of published ones, and templates in Mistral's formats."""

from pathlib import Path

import trl

TRL = Path(trl.__file__).parent / "chat_templates"
_MISTRAL_START = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls is defined and m.tool_calls %}"
)
_MISTRAL_END = "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
MISTRAL = (
    _MISTRAL_START + "[TOOL_CALLS] [{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}" + _MISTRAL_END
)
MISTRAL_NAMED = (
    _MISTRAL_START + "{% for c in m.tool_calls %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    + _MISTRAL_END
)
LISTED = MISTRAL.replace("[TOOL_CALLS] [", "<|tool_call|>[").replace(
    "{% endfor %}]", "{% endfor %}]<|/tool_call|>"
)


def template(name: str) -> str:
    """Return a template by its name."""
    own = {"mistral": MISTRAL, "mistral_named": MISTRAL_NAMED, "listed": LISTED}
    return own.get(name) or (TRL / f"{name}.jinja").read_text("utf-8")
