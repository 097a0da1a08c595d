"""The files that stand beside a tokenizer when it is one for conversations."""

TEMPLATE = "chat_template.jinja"
CHAT_FILES = ("tokenizer_config.json", TEMPLATE, "generation_config.json")
