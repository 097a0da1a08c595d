"""The model card (README.md) of an export: training data, duration, quality, and limitations.

Facts about training come from the run directories (run/lineage.py). Missing ones are "not recorded".
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deskside import __version__
from deskside.data.chat.renderer import read_chat_template
from deskside.run.lineage import FROM_SCRATCH, RunStage, Warn, stages
from deskside.run.record import first_number, mapping, number
from deskside.utils import hub
from deskside.utils.errors import UsageError
from deskside.utils.format import count, duration
from deskside.weights.hf_families import family_of
from deskside.weights.load import Loaded

UNKNOWN = "not recorded"
MAX_SOURCES = 30  # rows in the table of data sources
# Share of tokens without a language tag, above which the tagged languages are not representative.
MAX_UNTAGGED = 0.1


def model_card(
    loaded: Loaded,
    form: str,
    dtype: str,
    warn: Warn,
    file: str | None = None,
    needs: str | None = None,
    where: str | None = None,
) -> str:
    """Return the text of the card.

    form: "hf", "gguf" or "peft". file: name of a single-file model. needs: a sentence about what the export requires.
    where: name of the hub repository that it is written for.
    """
    history = stages(loaded.run_dir, warn) if loaded.run_dir is not None else []
    # From a model whose own data is not recorded.
    continued = bool(history) and history[0].started_from not in (None, FROM_SCRATCH)
    base = history[0].hub_base if history else hub.owner_and_name(loaded.source)
    tags = [(source.lang, source.tokens) for stage in history for source in stage.sources]
    summary = history[-1].summary if history else {}
    measured = first_number(summary, "best_step", "steps")  # the step whose weights were measured
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"count": count, "upper_first": lambda text: text[0].upper() + text[1:]}
    return environment.get_template("card.md.jinja").render(
        loaded=loaded,
        form=form,
        dtype=dtype,
        file=file,
        needs=needs,
        version=__version__,
        parameters=sum(loaded.model.num_params().values()),
        has_chat_template=read_chat_template(loaded.tokenizer_dir) is not None,
        history=history,
        where=where or "DIR",
        base=base,
        continued=continued,
        languages=sorted({lang for lang, _ in tags if lang}),
        codes=[] if continued else _language_codes(tags),
        untagged=_untagged(tags),
        shape=_shape(loaded, dtype),
        source_rows=_source_rows,
        weights=_weights,
        facts=_facts,
        measures=_measures(history[-1]) if history else [],
        # Only if the measured weights are not the exported ones.
        measured_step=int(measured)
        if measured is not None and loaded.step not in (None, int(measured))
        else None,
        measured_average=loaded.weights == "raw" and _ends_with_average(summary),
        table=_table,
    )


def _ends_with_average(summary: dict[str, Any]) -> bool:
    """Return True if the final weights of a run, which were evaluated, have an average over steps in them."""
    average = mapping(summary.get("average"))
    return bool(number(average.get("updates")) and number(average.get("blend")))


def _untagged(tags: Sequence[tuple[str, int]]) -> float:
    """Return the share of tokens without a language tag."""
    return sum(tokens for lang, tokens in tags if not lang) / max(1, sum(tokens for _, tokens in tags))


def _language_codes(tags: Sequence[tuple[str, int]]) -> list[str]:
    """Return the ISO 639 codes for the hub's `language`: hi of hi, hin of FLORES's hin_Deva, none of others.

    Empty if the tagged part of the data is not representative.
    """
    if _untagged(tags) > MAX_UNTAGGED:
        return []
    codes = {re.split("[-_]", lang)[0].lower() for lang, _ in tags}
    return sorted(code for code in codes if re.fullmatch("[a-z]{2,3}", code))


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
        width = rows.index(("MLP width", f"{config.intermediate_size:,}"))
        rows[width] = ("experts", f"{used}, {config.moe_intermediate_size:,} wide")
    return rows


def _source_rows(stage: RunStage) -> list[tuple[str, ...]]:
    shown, rest = stage.sources[:MAX_SOURCES], stage.sources[MAX_SOURCES:]
    rows: list[tuple[str, ...]] = [
        (s.name or "(no tag)", s.lang or "-", f"{s.documents:,}", f"{s.tokens:,}", s.licence or UNKNOWN)
        for s in shown
    ]
    if rest:
        total = f"{sum(s.tokens for s in rest):,}"
        rows.append((f"{len(rest)} more", "-", f"{sum(s.documents for s in rest):,}", total, UNKNOWN))
    return rows


def _weights(stage: RunStage) -> str:
    weights = mapping(mapping(stage.config.get("data")).get("weights"))
    return ", ".join(f"{name} {value:g}" for name, value in weights.items())


def _facts(stage: RunStage) -> list[tuple[str, str]]:
    summary, config = stage.summary, stage.config
    optim, batch = mapping(config.get("optim")), mapping(config.get("batch"))
    schedule, adapter = mapping(config.get("schedule")), mapping(config.get("adapter"))
    status, rate = summary.get("status"), number(optim.get("lr"))
    precision = summary.get("precision") or mapping(stage.plan.get("precision")).get("chosen")
    emulated = (
        " (emulated: the numerics of the format, not its speed)" if summary.get("emulated") is True else ""
    )
    clock = {"wall": "wall clock, set-up included", "training": "training steps alone"}.get(
        str(summary.get("clock")), f"clock: {summary.get('clock')}"
    )
    software = [(name, stage.environment.get(name)) for name in ("deskside", "torch", "python")]

    def shown(value: object, form: Callable[[float], str]) -> str:
        known = number(value)
        return UNKNOWN if known is None else form(known)

    rows = [
        ("state", status if isinstance(status, str) else "not finished: the run has no summary"),
        ("begun", stage.created or UNKNOWN),
        ("started from", stage.started_from or UNKNOWN),
        ("tokens seen", shown(summary.get("tokens"), "{:,.0f}".format)),
        ("steps", shown(summary.get("steps"), "{:,.0f}".format)),
        ("time", shown(summary.get("seconds"), lambda seconds: f"{duration(seconds)} ({clock})")),
        ("energy", _energy(stage)),
        ("hardware", _hardware(mapping(stage.environment.get("gpu")), stage.environment)),
        ("precision of the matrix products", f"{precision}{emulated}" if precision else UNKNOWN),
        ("share of the measured matmul peak", shown(summary.get("mfu"), "{:.1%}".format)),
        ("peak memory", shown(summary.get("peak_memory_gib"), "{:.2f} GiB".format)),
        ("optimizer", f"{optim.get('name', UNKNOWN)}" + ("" if rate is None else f", lr {rate:g}")),
        ("schedule", str(schedule.get("name") or UNKNOWN)),
        ("sequence length", shown(batch.get("sequence_length"), "{:,.0f} tokens".format)),
        ("batch", shown(batch.get("tokens"), "{:,.0f} tokens a step".format)),
        ("seed", str(config.get("seed", UNKNOWN))),
        ("software", ", ".join(f"{name} {version}" for name, version in software if version) or UNKNOWN),
    ]
    if adapter:
        kind = "DoRA" if adapter.get("dora") else "LoRA"
        shape = f"{kind} of rank {adapter.get('rank')}, alpha {adapter.get('alpha')}"
        rows.insert(3, ("adapters", f"{shape}, on {adapter.get('base')} weights"))
    return rows


def _energy(stage: RunStage) -> str:
    energy = stage.energy
    if energy is None:
        return UNKNOWN
    size = energy.kilowatt_hours
    amount = f"{size:.3g} kWh" if size >= 0.1 else f"{size * 1000:.3g} Wh"
    part = "" if energy.steps == energy.logged else f" ({energy.steps:,} of {energy.logged:,} steps)"
    return f"{amount}, measured on one GPU during training steps{part}, excluding the rest of the machine"


def _hardware(gpu: dict[str, Any], environment: dict[str, Any]) -> str:
    if "name" in gpu:
        count = gpu.get("count")
        return f"{gpu['name']}" + (
            f" ({count} in the machine)" if isinstance(count, int) and count > 1 else ""
        )
    if "cpu" in environment:
        return f"{environment['cpu']}, CPU threads: {environment.get('torch_threads', UNKNOWN)} (no GPU)"
    return UNKNOWN


def _measures(stage: RunStage) -> list[tuple[str, str]]:
    """Return the final measurements of a stage."""
    summary = stage.summary
    labels = {
        "val_bpb": "bits per byte",
        "val_loss": "loss, nats per token",
        "val_tokens": "held-out tokens measured",
        "val_bytes": "held-out bytes measured",
        "val_share": "share of the held-out text measured",
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
    for language, values in mapping(summary.get("val_languages")).items():
        bpb = number(mapping(values).get("bpb"))
        rows.append((f"bits per byte of {language}", UNKNOWN if bpb is None else f"{bpb:.4f}"))
    for name, value in mapping(summary.get("tasks")).items():
        score = number(value.get("score") if isinstance(value, dict) else value)
        rows.append((f"task {name}", UNKNOWN if score is None else f"{score:.4f}"))
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"
