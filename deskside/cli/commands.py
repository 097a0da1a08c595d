"""The commands of deskside. Each is a module that is imported when the command is requested."""

# command -> (module, function, description)
COMMANDS: dict[str, tuple[str, str, str]] = {
    name: (f"deskside.cli.{name.replace('-', '_')}", "run", about)
    for name, about in {
        "doctor": "check this machine: what works, how fast, and what to fix",
        "probe": "measure training speed and memory here, for the planner",
        "plan": "which model fits and finishes: memory, time, loss, cost",
        "go": "the full pipeline within a time budget, from doctor to report",
        "train": "pretrain a model from a preset, a TOML file or given weights",
        "data": "prepare, verify and show datasets",
        "sft": "fine-tune a model on conversations",
        "dpo": "train a model on preference pairs",
        "kto": "train a model on answers labelled good or bad",
        "grpo": "reinforcement learning with verifiable rewards",
        "import-config": "translate a configuration of axolotl or unsloth",
        "eval": "bits per byte and evaluation tasks",
        "chat": "chat with a model in the terminal",
        "serve": "serve a model with the OpenAI API and a chat page",
        "export": "convert a model: Hugging Face, GGUF, PEFT",
        "study": "compare configurations fairly, with error bars",
        "search": "find better settings for this machine and text within some hours",
        "report": "write the report of a run or a study",
        "runs": "list runs and studies, or compare runs, in the terminal",
        "dashboard": "browse studies and runs live in a browser",
        "presets": "list the model presets with their parameter counts",
        "models": "Hugging Face families, their checkpoints, memory to fine-tune",
        "facts": "measurements that owners of other cards shared",
        "records": "lowest bits per byte in 5 and 60 minutes; repeat one",
        "completion": "shell completion for bash, zsh and fish",
    }.items()
}
