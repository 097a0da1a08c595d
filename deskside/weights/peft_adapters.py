"""Directories of the PEFT library: their tensors, and models with them merged.

A directory has one low-rank pair A, B for each adapted module of transformers, and with DoRA the magnitudes m of its
rows. It may also have whole tensors that replace those of the base (modules_to_save, biases, tables of a larger
vocabulary) and rows of single tokens.

    LoRA:  W' = W + scale * B A                  Hu et al. 2021, arXiv 2106.09685
    DoRA:  W' = m / |W + scale * B A| * (...)    |.|: norm of each row; Liu et al. 2024, arXiv 2402.09353

A module of transformers may be several of our projections (GPT-2's c_attn), so the sums are made under its names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from deskside.config.model import ModelConfig
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.ops.logical import LogicalTensor, logical_tensors
from deskside.precision.dora import row_norms
from deskside.utils.errors import RunError, UsageError
from deskside.utils.hub import hub_model
from deskside.weights.hf import by_hf_name, hf_name, read_parts
from deskside.weights.hf_families import family_of
from deskside.weights.hf_layout import our_rows
from deskside.weights.peft_config import CONFIG, PREFIX, WEIGHTS, PeftConfig, is_peft, read_peft_config

NAME_IT = "name the base with --base, or beside --resume-from as the model"
_PART = re.compile(
    r"(?P<module>.+?)(\.token_adapter)?\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector|"
    r"trainable_tokens_delta)(\.default)?(\.weight)?"
)
_WRAPPER = re.compile(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)")


@dataclass(frozen=True)
class LowRank:
    """The adapter of one module. a: (rank, in); b: (out, rank); magnitude: (out,), of DoRA. All are float32."""

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None

    def merged(self, weight: Tensor) -> Tensor:
        """Return the adapted weight (out, in) in float32 on the device of `weight`."""
        device = weight.device
        weight = weight.float() + self.scale * (self.b.to(device) @ self.a.to(device))
        if self.magnitude is None:
            return weight
        return weight * (self.magnitude.to(device) / row_norms(weight))[:, None]

    def gain(self, weight: Tensor) -> Tensor:
        """Return the factor of each row of W + scale B A with DoRA, (out,) float32."""
        assert self.magnitude is not None
        sum_OI = replace(self, magnitude=None).merged(weight)
        return self.magnitude.to(weight.device) / row_norms(sum_OI)

    def rows(self, start: int, stop: int) -> "LowRank":
        """Return the adapter of these rows of the weight."""
        magnitude = None if self.magnitude is None else self.magnitude[start:stop]
        return replace(self, b=self.b[start:stop], magnitude=magnitude)


@dataclass(frozen=True)
class PeftAdapters:
    """The content of a directory. All names are those of transformers.

    Attributes:
        low_rank: By name of the module.
        experts: A and B as they are stored, for each adapted parameter of stacked experts, by name of the module.
        tensors: Whole tensors, by name.
        rows: Ids and rows of single tokens, by name of the table's module.
    """

    folder: Path
    config: PeftConfig
    low_rank: dict[str, LowRank]
    experts: dict[str, list[tuple[Tensor, Tensor]]]
    tensors: dict[str, Tensor]
    rows: dict[str, tuple[Tensor, Tensor]]


def read_peft(folder: Path) -> PeftAdapters:
    """Read a directory. Raises UsageError for what is not supported, and RunError for damaged or incomplete files."""
    config = read_peft_config(folder)
    file = folder / WEIGHTS
    if not file.is_file():
        raise UsageError(f"{folder}: has no {WEIGHTS}; save the adapters with safe_serialization=True")
    try:
        stored = load_file(file)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{file}: cannot be read: {error}") from None
    adapters = PeftAdapters(folder, config, {}, {}, {}, {})
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        name = name.removeprefix(PREFIX)
        if match := _PART.fullmatch(name):
            parts.setdefault(match["module"], {})[match["part"]] = tensor.float()
        elif ".original_module." not in name:  # the base's values, which PEFT stores beside resized tables
            adapters.tensors[_WRAPPER.sub("", name)] = tensor
    for module, found in parts.items():
        rows = found.pop("trainable_tokens_delta", None)
        if rows is not None:
            adapters.rows[module] = _token_ids(config, module, rows, file), rows
        plain = module.removesuffix(".base_layer")
        if found and any(f".{plain}.".endswith(f".{owner}.") for owner in _stacked_owners(config)):
            if found.keys() != {"lora_A", "lora_B"}:
                raise UsageError(f"{file}: {module} has more than A and B, which experts cannot have here")
            adapters.experts.setdefault(plain, []).append((found["lora_A"], found["lora_B"]))
        elif found:
            adapters.low_rank[plain] = _low_rank(config, plain, found, file)
    if not (adapters.low_rank or adapters.experts or adapters.tensors or adapters.rows):
        raise RunError(f"{file}: holds no adapters")
    return adapters


def base_of(folder: Path, config: PeftConfig) -> str:
    """Return the base model that the configuration in `folder` names, with its revision if it is on the hub.

    A path may be relative to the directory's parent. Raises UsageError if it names none.
    """
    name = config.base_model_name_or_path
    if not name:
        raise UsageError(f"{folder}: {CONFIG} names no base model; {NAME_IT}")
    beside = folder.resolve().parent / name
    if not Path(name).exists() and beside.exists():
        return str(beside)
    is_pinned = config.revision is None or "@" in name or hub_model(name) is None
    return name if is_pinned else f"{name}@{config.revision}"


def refuse_cycle(folder: Path, base: str) -> None:
    """Raise UsageError if adapters have themselves as their base, directly or through other adapters."""
    seen, current = {folder.resolve()}, Path(base)
    while is_peft(current):
        if current.resolve() in seen:
            raise UsageError(f"{folder}: names itself as its base model; {NAME_IT}")
        seen.add(current.resolve())
        current = Path(base_of(current, read_peft_config(current)))


@torch.no_grad()
def merge_peft(model: Transformer, adapters: PeftAdapters) -> Transformer:
    """Return the model with the adapters merged: the given one, changed in place, or a new one if its tables change.

    Sums are made in float32, and rounded once to the dtype of the weights. Raises UsageError if the model has no such
    modules, and RunError if their shapes differ.
    """
    was_tied = model.config.tie_word_embeddings
    model = _with_tables(model, adapters)
    family = family_of(model.config)
    by_name = by_hf_name(model, family)
    embed, head = _table_modules(model.config)
    for name, tensor in adapters.tensors.items():
        if name == f"{head}.weight" and model.config.tie_word_embeddings:
            continue  # the same table as the embedding's, see `_stay_tied`
        parts = _parts_of(by_name, name, adapters)
        read_parts(parts, tensor, model.config, family, f"{adapters.folder}: of the base model, {name}")
    tables = dict(adapters.rows)
    if was_tied and head in adapters.low_rank and embed in tables:
        # An adapter of the head is added to the table that both share, with its trained rows.
        tables.setdefault(head, tables[embed])
    for module, (ids, rows) in tables.items():
        (table,) = _parts_of(by_name, f"{module}.weight", adapters)
        if int(ids.max()) >= len(table.view) or rows.shape[1] != table.view.shape[1]:
            raise _misfit(adapters, module)
        table.view[ids] = rows.to(table.view)
    for module in adapters.low_rank:
        parts = _parts_of(by_name, f"{module}.weight", adapters)
        low_rank = in_our_rows(adapters, module, parts, model.config)
        weight = low_rank.merged(torch.cat([part.view for part in parts]))
        for part, values in zip(parts, weight.split([len(part.view) for part in parts]), strict=True):
            part.view.copy_(values)
    for module, pairs in adapters.experts.items():
        if f"{module}.0.up_proj.weight" not in by_name:
            raise UsageError(
                f"{adapters.folder}: adapters of {family.architecture}'s experts ({module}) are not supported; merge "
                "them with PEFT's merge_and_unload, and give the merged model"
            )
        stacked = {
            leaf: _parts_of(by_name, f"{module}.0.{projection}.weight", adapters)[0].parameter
            for leaf, projection in (("gate_up_proj", "up_proj"), ("down_proj", "down_proj"))
        }
        for a, b in pairs:
            _merge_experts(stacked, module, a, b, adapters)
    return model


def in_our_rows(
    adapters: PeftAdapters, module: str, parts: Sequence[LogicalTensor], config: ModelConfig
) -> LowRank:
    """Return a module's adapter with the rows of B in the order of its parts. Raises RunError if it does not fit."""
    low_rank, family = adapters.low_rank[module], family_of(config)
    shape = (sum(len(part.view) for part in parts), parts[0].view.shape[-1])
    if (low_rank.b.shape[0], low_rank.a.shape[1]) != shape:
        raise _misfit(adapters, module)
    magnitude = low_rank.magnitude
    if magnitude is not None:
        magnitude = our_rows(magnitude, parts, family, config)
    return replace(low_rank, b=our_rows(low_rank.b, parts, family, config), magnitude=magnitude)


def _merge_experts(
    stacked: Mapping[str, nn.Parameter], module: str, a: Tensor, b: Tensor, adapters: PeftAdapters
) -> None:
    """Add one pair to the parameter that it fits. PEFT stores A as (E rank, in), and B as (out, rank E)."""
    for leaf, parameter in stacked.items():
        experts, rows, columns = parameter.shape
        rank = adapters.config.rank(f"{module}.{leaf}")
        if a.shape == (experts * rank, columns) and b.shape == (rows, rank * experts):
            scale = adapters.config.scale(f"{module}.{leaf}")
            b_of_each = b.view(rows, rank, experts).permute(2, 0, 1)
            change = scale * (b_of_each @ a.view(experts, rank, columns))
            parameter.copy_(parameter.float() + change.to(parameter.device))
            return
    raise _misfit(adapters, module)


def _with_tables(model: Transformer, adapters: PeftAdapters) -> Transformer:
    """Return a model whose embedding and head can take those of the adapters: untied, or of a larger vocabulary."""
    modules = _table_modules(model.config)
    tied = model.config.tie_word_embeddings and _stay_tied(adapters, *modules)
    embed, head = (adapters.tensors.get(f"{module}.weight") for module in modules)
    vocabulary = next((len(table) for table in (embed, head) if table is not None), model.config.vocab_size)
    if (tied, vocabulary) == (model.config.tie_word_embeddings, model.config.vocab_size):
        return model
    if vocabulary != model.config.vocab_size and (embed is None or (head is None and not tied)):
        raise RunError(
            f"{adapters.folder}: has a vocabulary of {vocabulary} in only one of embedding and head"
        )
    changes = {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    config = ModelConfig.model_validate({**model.config.model_dump(), **changes})
    changed = allocate(config, model.embed.weight.device, model.embed.weight.dtype)
    old = {tensor.name: tensor.view for tensor in logical_tensors(model)}
    for tensor in logical_tensors(changed):
        values = old[tensor.name] if tensor.name in old else old["embed.weight"]
        # `merge_peft` writes whole tables if the vocabulary changes.
        rows = min(len(values), len(tensor.view))
        tensor.view[:rows] = values[:rows]
    return changed


def _table_modules(config: ModelConfig) -> tuple[str, str]:
    """Return transformers' names of the modules of the embedding and of the head."""
    family = family_of(config)
    embed, head = (hf_name(f"{table}.weight", family) for table in ("embed", "lm_head"))
    return embed.removesuffix(".weight"), head.removesuffix(".weight")


def _stay_tied(adapters: PeftAdapters, embed: str, head: str) -> bool:
    """Return False if an adapter of only one of two tied tables unties them, as in PEFT. embed, head: their modules."""
    config = adapters.config
    saved_embed, saved_head = (adapters.tensors.get(f"{module}.weight") for module in (embed, head))
    are_equal = saved_embed is not None and saved_head is not None and torch.equal(saved_embed, saved_head)
    has_own_head = saved_head is not None and not are_equal
    if has_own_head or head in adapters.low_rank or head in adapters.rows:
        return False
    is_saved = saved_embed is not None and embed.rpartition(".")[2] in (config.modules_to_save or ())
    is_adapted = embed in adapters.low_rank or (is_saved and not are_equal)
    return config.ensure_weight_tying or not is_adapted


def _low_rank(config: PeftConfig, module: str, found: dict[str, Tensor], file: Path) -> LowRank:
    if found.keys() == {"lora_embedding_A", "lora_embedding_B"} and not config.use_dora:
        # For a product with one-hot rows: A is (rank, entries), and B is (hidden, rank).
        a, b = found["lora_embedding_B"].T, found["lora_embedding_A"].T
    elif found.keys() == {"lora_A", "lora_B"} | ({"lora_magnitude_vector"} if config.use_dora else set()):
        a, b = found["lora_A"], found["lora_B"]
    else:
        raise UsageError(f"{file}: adapters of {module} that consist of {', '.join(found)} are not supported")
    magnitude = found.get("lora_magnitude_vector")
    ranks_fit = (a.ndim, b.ndim) == (2, 2) and a.shape[0] == b.shape[1] == config.rank(module)
    if not ranks_fit or (magnitude is not None and magnitude.shape != b.shape[:1]):
        raise RunError(
            f"{file}: the tensors of {module} do not have the shapes of rank {config.rank(module)}"
        )
    return LowRank(a, b, config.scale(module), magnitude)


def _stacked_owners(config: PeftConfig) -> set[str]:
    """Return the modules whose parameters have their own adapters: mlp.experts for mlp.experts.down_proj."""
    return {parameter.rpartition(".")[0] for parameter in config.target_parameters or ()}


def _token_ids(config: PeftConfig, module: str, rows: Tensor, file: Path) -> Tensor:
    """Return the ids of the trained rows of a table. The configuration has one list, or one for each table."""
    given = config.trainable_token_indices or ()
    if isinstance(given, dict):
        given = next((ids for name, ids in given.items() if f".{module}".endswith(f".{name}")), ())
    if rows.ndim != 2 or not len(given) == len(rows) > 0 or min(given, default=0) < 0:
        raise RunError(f"{file}: {module} has {len(rows)} rows of tokens, and {CONFIG} names {len(given)}")
    return torch.tensor(given, dtype=torch.int64)


def _parts_of(
    by_name: Mapping[str, list[LogicalTensor]], name: str, adapters: PeftAdapters
) -> list[LogicalTensor]:
    if name not in by_name:
        raise UsageError(f"{adapters.folder}: adapts {name}, which this base model does not have")
    return by_name[name]


def _misfit(adapters: PeftAdapters, name: str) -> RunError:
    return RunError(
        f"{adapters.folder}: {name} has another shape in this base model; give its own with --base"
    )
