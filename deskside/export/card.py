"""The model card (README.md) of an export: training data, duration, quality, and limitations.

It states only facts from run directories (run/lineage.py), and writes "not recorded" for missing ones, so that
every number in it was measured.
"""

import json
from collections.abc import Sequence
from typing import Any

from deskside import __version__
from deskside.data.chat.renderer import own_template
from deskside.run.lineage import RunStage, Warn, stages
from deskside.run.record import mapping, number
from deskside.utils.errors import UsageError
from deskside.weights.hf_families import family_of
from deskside.weights.load import Loaded

UNKNOWN = "not recorded"
MOST_SOURCES = 30


def model_card(
    loaded: Loaded, form: str, dtype: str, warn: Warn, file: str | None = None, needs: str | None = None
) -> str:
    """Return the card. form: hf, gguf or peft. file: the name of a single-file model. needs: a sentence on what can
    load it.
    """
    history = stages(loaded.run_dir, warn) if loaded.run_dir is not None else []
    chats = own_template(loaded.tokenizer_dir) is not None
    parts = [
        _front(history, form),
        f"# {loaded.name}\n",
        _what(loaded, history, form, dtype, chats),
        "## Use\n",
        _use(form, chats, file),
        *([f"{needs}\n"] if needs else []),
        "## Model\n",
        _table(("property", "value"), _shape(loaded, dtype)),
        "## Data\n",
        *_data(history),
        "## Training\n",
        *_training(history),
        "## Evaluation\n",
        _evaluation(loaded, history),
        "## Licence\n",
        "Of the weights: not recorded. Whoever publishes them chooses it, within what the licences of the data "
        "allow.\n",
        "## Limits\n",
        _limits(loaded, history, chats),
    ]
    return "\n".join(parts)


MOST_UNTAGGED = 0.1  # share of tokens; above it the tagged languages would not represent the data


def _front(history: Sequence[RunStage], form: str) -> str:
    """Return the metadata header that model hubs read."""
    languages = _languages(history) if _untagged(history) <= MOST_UNTAGGED else []
    lines = ["---", f"library_name: {'transformers' if form == 'hf' else form}"]
    lines += ["pipeline_tag: text-generation", "license: unknown", "tags:", "- deskside"]
    # Quoted, because YAML reads the language `no` as false.
    lines += ["language:", *(f"- {json.dumps(name)}" for name in languages)] if languages else []
    return "\n".join([*lines, "---", ""])


def _what(loaded: Loaded, history: Sequence[RunStage], form: str, dtype: str, chats: bool) -> str:
    count = sum(loaded.model.num_params().values())
    kind = "answers in conversations" if chats else "continues text"
    origin = (
        f"It is the model of the run `{history[-1].name}`"
        + (f" at step {loaded.step:,}" if loaded.step is not None else "")
        if history
        else f"It was a Hugging Face directory (`{loaded.name}`), and nothing on its training came with it"
    )
    what = {"hf": "Hugging Face", "gguf": "GGUF", "peft": "PEFT"}[form]
    return (
        f"A decoder-only language model of {_count(count)} parameters that {kind}. {origin}, written in {what} form "
        f"with {dtype} weights by deskside {__version__}.\n"
    )


def _use(form: str, chats: bool, file: str | None) -> str:
    if form == "gguf":
        return f"```\nllama-server -m {file}\n```\n"
    if form == "peft":
        return (
            "```python\nfrom peft import PeftModel\n\n"
            'model = PeftModel.from_pretrained(base, "DIR")  # base: the model that the adapters were trained on\n```\n'
        )
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("DIR")',
        'model = AutoModelForCausalLM.from_pretrained("DIR")',
    ]
    if chats:
        lines += [
            'messages = [{"role": "user", "content": "Hello!"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
    else:
        # Every training document begins with this token.
        lines += [
            'inputs = tokenizer(tokenizer.bos_token + "Once upon a time", return_tensors="pt")',
        ]
    lines += ["print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"]
    return "\n".join(["```python", *lines, "```", ""])


def _shape(loaded: Loaded, dtype: str) -> list[tuple[str, str]]:
    config = loaded.config
    try:
        architecture = family_of(config).architecture
    except UsageError:
        architecture = UNKNOWN
    rows = [
        ("architecture", architecture),
        ("parameters", f"{sum(loaded.model.num_params().values()):,}"),
        ("layers", f"{config.num_hidden_layers}"),
        ("hidden size", f"{config.hidden_size:,}"),
        ("heads", f"{config.num_attention_heads} query, {config.num_key_value_heads} key-value"),
        ("head dimension", f"{config.head_dim}"),
        ("MLP width", f"{config.intermediate_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest sequence", f"{config.max_position_embeddings:,} tokens"),
        ("weights", dtype),
    ]
    if config.num_experts:
        used = f"{config.num_experts_per_tok} of {config.num_experts} for each token"
        rows[6] = ("experts", f"{used}, {config.moe_intermediate_size:,} wide")
    return rows


def _data(history: Sequence[RunStage]) -> list[str]:
    if not history:
        return [f"{_upper(UNKNOWN)}.\n"]
    parts = []
    for stage in history:
        parts.append(f"### {_upper(stage.objective)}: `{stage.name}`\n")
        if stage.specs:
            parts.append("Named as " + ", ".join(f"`{spec}`" for spec in stage.specs) + ".\n")
        if not stage.sources:
            why = "what it was made of" if stage.specs else "what it was trained on"
            parts.append(f"{_upper(why)} is {UNKNOWN}.\n")
            continue
        shown, rest = stage.sources[:MOST_SOURCES], stage.sources[MOST_SOURCES:]
        rows = [
            (s.name or "(no tag)", s.lang or "-", f"{s.documents:,}", f"{s.tokens:,}", s.licence or UNKNOWN)
            for s in shown
        ]
        if rest:
            total = f"{sum(s.tokens for s in rest):,}"
            rows.append((f"{len(rest)} more", "-", f"{sum(s.documents for s in rest):,}", total, UNKNOWN))
        parts.append(_table(("source", "language", "documents", "tokens", "licence"), rows))
        weights = mapping(mapping(stage.config.get("data")).get("weights"))
        if weights:
            mix = ", ".join(f"{name} {value:g}" for name, value in weights.items())
            parts.append(f"They were mixed with the weights {mix}.\n")
    return parts


def _training(history: Sequence[RunStage]) -> list[str]:
    if not history:
        return [f"{_upper(UNKNOWN)}.\n"]
    parts = []
    for stage in history:
        parts.append(f"### {_upper(stage.objective)}: `{stage.name}`\n")
        parts.append(_table(("fact", "value"), _facts(stage)))
    return parts


def _facts(stage: RunStage) -> list[tuple[str, str]]:
    summary, config = stage.summary, stage.config
    seconds, tokens, steps = (number(summary.get(key)) for key in ("seconds", "tokens", "steps"))
    optim, batch = mapping(config.get("optim")), mapping(config.get("batch"))
    schedule, adapter = mapping(config.get("schedule")), mapping(config.get("adapter"))
    gpu = mapping(stage.environment.get("gpu"))
    precision = summary.get("precision") or mapping(stage.plan.get("precision")).get("chosen")
    emulated = " (emulated: its numbers, not its speed)" if summary.get("emulated") is True else ""
    clock = {"wall": "wall clock, set-up included", "training": "training steps alone"}.get(
        str(summary.get("clock")), f"clock: {summary.get('clock')}"
    )
    mfu, memory = number(summary.get("mfu")), number(summary.get("peak_memory_gib"))
    rows = [
        ("state", _state(stage)),
        ("begun", stage.created or UNKNOWN),
        ("started from", stage.began_from or UNKNOWN),
        ("tokens seen", UNKNOWN if tokens is None else f"{tokens:,.0f}"),
        ("steps", UNKNOWN if steps is None else f"{steps:,.0f}"),
        ("time", UNKNOWN if seconds is None else f"{_hours(seconds)} ({clock})"),
        ("energy", _energy(stage)),
        ("hardware", _hardware(gpu, stage.environment)),
        ("precision of the matrix products", f"{precision}{emulated}" if precision else UNKNOWN),
        ("share of the measured matmul peak", UNKNOWN if mfu is None else f"{mfu:.1%}"),
        ("peak memory", UNKNOWN if memory is None else f"{memory:.2f} GiB"),
        ("optimiser", _optimiser(optim)),
        ("schedule", str(schedule.get("name") or UNKNOWN)),
        ("sequence length", _number_of(batch, "sequence_length", " tokens")),
        ("batch", _number_of(batch, "tokens", " tokens a step")),
        ("seed", str(config.get("seed", UNKNOWN))),
        ("software", _software(stage)),
    ]
    if adapter:
        base = f"on {adapter.get('base')} weights, merged here"
        rows.insert(
            3, ("adapters", f"LoRA of rank {adapter.get('rank')}, alpha {adapter.get('alpha')}, {base}")
        )
    return rows


def _optimiser(optim: dict[str, Any]) -> str:
    rate = number(optim.get("lr"))
    return f"{optim.get('name', UNKNOWN)}" + ("" if rate is None else f", lr {rate:g}")


def _state(stage: RunStage) -> str:
    status = stage.summary.get("status")
    return str(status) if isinstance(status, str) else "not finished: there is no summary of it"


def _energy(stage: RunStage) -> str:
    energy = stage.energy
    if energy is None:
        return UNKNOWN
    size = energy.kilowatt_hours
    amount = f"{size:.3g} kWh" if size >= 0.1 else f"{size * 1000:.3g} Wh"
    part = "" if energy.steps == energy.logged else f", of {energy.steps:,} of {energy.logged:,} steps"
    return f"{amount}, measured on one GPU during training steps{part}; the rest of the machine is not in it"


def _hardware(gpu: dict[str, Any], environment: dict[str, Any]) -> str:
    if "name" in gpu:
        count = gpu.get("count")
        return f"{gpu['name']}" + (
            f" ({count} in the machine)" if isinstance(count, int) and count > 1 else ""
        )
    if "cpu" in environment:
        return f"{environment['cpu']}, CPU threads: {environment.get('torch_threads', UNKNOWN)} (no GPU)"
    return UNKNOWN


def _software(stage: RunStage) -> str:
    named = [(n, stage.environment.get(n)) for n in ("deskside", "torch", "python")]
    return ", ".join(f"{name} {version}" for name, version in named if version) or UNKNOWN


def _evaluation(loaded: Loaded, history: Sequence[RunStage]) -> str:
    """Return the final measurements of the last stage."""
    if not history or not history[-1].summary:
        return f"{_upper(UNKNOWN)}. Measure it with: `deskside eval`\n"
    summary = history[-1].summary
    labels = {
        "val_bpb": "bits per byte",
        "val_loss": "loss, nats per token",
        "val_tokens": "held-out tokens measured",
        "val_bytes": "held-out bytes measured",
        "gzip_bpb": "for comparison: bits per byte of gzip",
        "unigram_bpb": "for comparison: bits per byte of token frequencies",
    }
    skipped = {"schema_version", "steps", "tokens", "seconds", "tokens_per_second", "mfu", "parameters"}
    rows = []
    for key in [*labels, *sorted(summary.keys() - labels.keys() - skipped)]:
        value = number(summary.get(key))
        if value is not None and not key.startswith(("peak_", "budget_")):
            text = f"{value:,.0f}" if float(value).is_integer() else f"{value:.4f}"
            rows.append((labels.get(key, key.replace("_", " ")), text))
    for name, value in mapping(summary.get("tasks")).items():
        score = number(value.get("score") if isinstance(value, dict) else value)
        rows.append((f"task {name}", UNKNOWN if score is None else f"{score:.4f}"))
    if not rows:
        return f"{_upper(UNKNOWN)}. Measure it with: `deskside eval`\n"
    last = number(summary.get("steps"))
    other = loaded.step is not None and last is not None and int(last) != loaded.step
    note = (
        f"Measured at step {int(last or 0):,}, these weights are of step {loaded.step:,}.\n" if other else ""
    )
    return "On what the last stage held out, at the end of training.\n\n" + (
        _table(("measure", "value"), rows) + (f"\n{note}" if note else "")
    )


def _languages(history: Sequence[RunStage]) -> list[str]:
    return sorted({s.lang for stage in history for s in stage.sources if s.lang})


def _untagged(history: Sequence[RunStage]) -> float:
    """Return the share of the training tokens whose language is not known."""
    tokens = [(s.lang, s.tokens) for stage in history for s in stage.sources]
    return sum(count for lang, count in tokens if not lang) / max(1, sum(count for _, count in tokens))


def _limits(loaded: Loaded, history: Sequence[RunStage], chats: bool) -> str:
    languages = _languages(history)
    lines = [
        f"It reads at most {loaded.config.max_position_embeddings:,} tokens at once.",
        "It states false things fluently; nothing here checks what it says.",
        "It was not examined for bias, safety or memorised text: no such evaluation is recorded.",
    ]
    if not chats:
        lines.append("It continues text and was not taught to follow instructions.")
    if languages:
        untagged = _untagged(history)
        rest = (
            "expect little of others"
            if untagged <= MOST_UNTAGGED
            else f"{untagged:.0%} of it has no language tag"
        )
        lines.append(f"Languages of its data that were tagged: {', '.join(languages)}; {rest}.")
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _number_of(values: dict[str, Any], key: str, unit: str) -> str:
    value = number(values.get(key))
    return UNKNOWN if value is None else f"{value:,.0f}{unit}"


def _hours(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _count(number_: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number_ >= size:
            return f"{number_ / size:.3g}{unit}"
    return str(number_)


def _upper(text: str) -> str:
    return text[0].upper() + text[1:]
