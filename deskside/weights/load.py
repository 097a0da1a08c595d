"""Loading a model for inference: a run, a checkpoint, a Hugging Face directory, a hub name, or adapters of PEFT.

For a run, the newest checkpoint whose weights match their checksum is used; a warning names damaged ones. If
there is none, the final model that the run exported is used.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from tokenizers import Tokenizer
from torch import Tensor

from deskside.config.base import first_problem
from deskside.config.model import ModelConfig
from deskside.config.run import SCHEMA_VERSION
from deskside.data.tokenizer import CHAT_TOKENS, end_of_text, special_token_id
from deskside.data.tokenizer import load as load_tokenizer
from deskside.facts.checkpoint_names import hub_name_hint
from deskside.model.init import allocate
from deskside.model.transformer import Transformer
from deskside.precision.frozen import Format, quantize_for_generation
from deskside.run.continuing import resume_command
from deskside.run.record import read_brief
from deskside.utils import hub
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.parsing import read_json_object
from deskside.weights.checkpoint import (
    Weights,
    averaged,
    load_file_into,
    load_weights,
    newest_readable,
    verify_weights,
)
from deskside.weights.checkpoint_folder import CHECKPOINT_NAME, MANIFEST, Checkpoint, Damaged, find
from deskside.weights.hf import load_hf, read_eos_ids
from deskside.weights.merge_adapters import load_adapted_model, merged, run_config
from deskside.weights.peft_adapters import NAME_IT, PeftAdapters, base_of, merge_peft, read_peft, refuse_cycle
from deskside.weights.peft_config import is_peft

Kind = Literal["run", "checkpoint", "hf"]


@dataclass(frozen=True)
class Loaded:
    """A model with its tokenizer and origin.

    tokenizer_dir: contains tokenizer.json and possibly a chat template. start_token: the token that begins a text.
    eos_tokens: the tokens that end a text. run_dir, run (the content of run.json) and step: of the run or checkpoint;
    None or empty for a Hugging Face directory. step is also None for a run's exported model. adapters: the directory of
    PEFT adapters of the model. source: what was loaded, a path or hf:owner/name@commit. weights: as in `load_model`.
    """

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig
    kind: Kind
    tokenizer_dir: Path
    start_token: int
    eos_tokens: frozenset[int]
    run_dir: Path | None
    run: dict[str, Any]
    step: int | None
    adapters: Path | None = None
    source: str = ""
    weights: Weights | None = None

    @property
    def name(self) -> str:
        """The name of the run or of the directory."""
        return str(self.run.get("name") or hub.short_name(self.source))


def warn_if_unfinished(loaded: Loaded, warn: Callable[[str], None] = say) -> None:
    """Warn if the weights of a run are from a step before its end, unless the user named the checkpoint."""
    path = loaded.run_dir
    if loaded.kind != "run" or path is None or loaded.step is None or (path / "summary.json").exists():
        return
    total = read_brief(path).total_steps
    of_total = "" if total is None else f" of {total:,}"
    warn(f"warning: {path} has not finished: these are its weights of step {loaded.step:,}{of_total}")


def load_model(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    warn: Callable[[str], None] = say,
    base: str | Path | None = None,
    weights: Weights | None = None,
) -> Loaded:
    """Load a run, a checkpoint, a Hugging Face directory, a hub model (see `hub.find`), or PEFT adapters, merged.

    Args:
        dtype: Dtype of weights with two or more dimensions, and so of the activations; norms stay in float32. With
            bfloat16, the results are the same as in BF16 training, which casts the same weights when it uses them.
        warn: Called with a sentence about each damaged checkpoint that is skipped.
        base: The base model of PEFT adapters. If None, the one that their configuration names.
        weights: Of a run or checkpoint: "raw" for those of its step, "averaged" for their average over steps. If None,
            the average if there is one.

    Raises UsageError if there is no such model or it is not supported, and RunError if one of its files (or every
    checkpoint) is damaged.
    """
    found = hub.find(path, warn=warn)
    path = found.folder
    if not path.exists():
        run_dir = Path("runs") / path
        hint = hub_name_hint(path) or (
            "give a run (runs/NAME), a Hugging Face directory, or a name on its hub (owner/name)"
        )
        if run_dir.is_dir():
            hint = f"did you mean {run_dir}?"
        raise UsageError(f"{path}: no such directory; {hint}")
    if not path.is_dir():
        raise UsageError(f"{path}: is a file; give a run (runs/NAME) or a Hugging Face directory")
    if base is not None and not is_peft(path):
        raise UsageError(f"--base: is for PEFT adapters, and {path} has no adapter_config.json; leave it out")
    is_checkpoint = CHECKPOINT_NAME.fullmatch(path.resolve().name) and (path / MANIFEST).is_file()
    if weights is not None and (is_peft(path) or not ((path / "run.json").is_file() or is_checkpoint)):
        raise UsageError(f"--weights: is for runs and their checkpoints, and {path} is neither; leave it out")
    if is_peft(path):
        loaded = _from_peft(path, device, dtype, warn, base)
    elif (path / "run.json").is_file():
        loaded = _from_run(path, device, dtype, warn, weights)
    elif is_checkpoint:
        loaded = _from_checkpoint(path, device, dtype, weights)
    elif (path / "config.json").is_file():
        config, model = load_hf(path, device, dtype)
        loaded = _with_tokenizer(model, config, "hf", path, None, {}, None)
    else:
        raise UsageError(
            f"{path}: contains neither a run (run.json) nor a Hugging Face model (config.json); "
            "make a run with: deskside train PRESET"
        )
    _cast(loaded.model, dtype)
    loaded.model.eval()
    return replace(loaded, source=found.source, weights=weights)


def load_for_generation(
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Format | Literal["none"] = "none",
    warn: Callable[[str], None] = say,
    base: str | Path | None = None,
    weights: Weights | None = None,
) -> Loaded:
    """Load a model like `load_model`, with the weight matrices of its blocks in the format `quantize`.

    The weights are read into host memory and quantized one by one, because a GPU may have no room for them in `dtype`.
    Raises UsageError as `quantize_for_generation` does too.
    """
    if quantize == "none":
        return load_model(path, device, dtype, warn, base, weights)
    loaded = load_model(path, "cpu", dtype, warn, base, weights)
    quantize_for_generation(loaded.model, quantize, device)
    return loaded


def _from_run(
    run_dir: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    warn: Callable[[str], None],
    weights: Weights | None,
) -> Loaded:
    run, config = _read_run(run_dir)
    checkpoints = run_dir / "checkpoints"
    newest = newest_readable(
        checkpoints,
        lambda checkpoint: _read_weights(checkpoint, config, device, dtype, (run_dir, run), weights),
        warn,
    )
    if newest is not None:
        checkpoint, model = newest
        return _with_tokenizer(model, config, "run", run_dir, run_dir, run, checkpoint.step)
    exported = run_dir / "model"
    if (exported / "config.json").is_file() and weights is None:
        config, model = load_hf(exported, device, dtype)
        return _with_tokenizer(model, config, "run", exported, run_dir, run, None)
    if found := find(checkpoints):
        raise RunError(
            f"{run_dir}: all {len(found)} checkpoints are damaged; train again, or restore one of them"
        )
    raise UsageError(f"{run_dir}: has no checkpoint yet; make one with: {resume_command(run_dir)}")


def _from_checkpoint(
    path: Path, device: torch.device | str, dtype: torch.dtype, weights: Weights | None
) -> Loaded:
    run_dir = path.resolve().parent.parent
    if not (run_dir / "run.json").is_file():
        raise UsageError(
            f"{path}: this checkpoint is not inside a run (runs/NAME/checkpoints/{path.name}), "
            "so its configuration is unknown; put it back there"
        )
    run, config = _read_run(run_dir)
    match = CHECKPOINT_NAME.fullmatch(path.resolve().name)
    assert match is not None  # checked by the caller
    checkpoint = Checkpoint(path, int(match[1]))
    try:
        model = _read_weights(checkpoint, config, device, dtype, (run_dir, run), weights)
    except Damaged as damage:
        raise RunError(
            f"{damage}; use the run itself ({run_dir}), whose newest undamaged checkpoint is loaded"
        ) from None
    return _with_tokenizer(model, config, "checkpoint", run_dir, run_dir, run, checkpoint.step)


def load_base(
    path: str | Path, base: str | Path | None, warn: Callable[[str], None] = say
) -> tuple[Loaded, PeftAdapters]:
    """Load the base model of PEFT adapters on the CPU, with their tokenizer, not merged. Raises as `load_model`."""
    folder = hub.find(path, warn=warn).folder
    loaded, adapters = _read_with_base(folder, "cpu", torch.float32, warn, base)
    return _with_tokenizer_of(folder, loaded, loaded.model), adapters


def _from_peft(
    folder: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    warn: Callable[[str], None],
    base: str | Path | None,
) -> Loaded:
    """Load adapters merged into their base."""
    loaded, adapters = _read_with_base(folder, device, dtype, warn, base)
    return _with_tokenizer_of(folder, loaded, merge_peft(loaded.model, adapters))


def _read_with_base(
    folder: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    warn: Callable[[str], None],
    base: str | Path | None,
) -> tuple[Loaded, PeftAdapters]:
    adapters = read_peft(folder)
    source = str(base or base_of(folder, adapters.config))
    refuse_cycle(folder, source)
    try:
        return load_model(source, device, dtype, warn), adapters
    except UsageError as error:
        raise UsageError(f"{folder}: the base model cannot be loaded: {error}; {NAME_IT}") from None


def _with_tokenizer_of(folder: Path, base: Loaded, model: Transformer) -> Loaded:
    """Return `model` with the tokenizer beside its adapters in `folder`, or with that of the base if there is none."""
    tokenizer_dir = folder if (folder / "tokenizer.json").is_file() else base.tokenizer_dir
    own = _with_tokenizer(model, model.config, "hf", tokenizer_dir, None, {}, None)
    eos = own.eos_tokens | base.eos_tokens  # generation_config.json is in the base's directory
    return replace(own, eos_tokens=eos, adapters=folder, source=base.source)


def _with_tokenizer(
    model: Transformer,
    config: ModelConfig,
    kind: Kind,
    tokenizer_dir: Path,
    run_dir: Path | None,
    run: dict[str, Any],
    step: int | None,
) -> Loaded:
    tokenizer = load_tokenizer(tokenizer_dir)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= config.vocab_size:
        raise RunError(
            f"{tokenizer_dir / 'tokenizer.json'}: has token {highest}, above the model's vocabulary of "
            f"{config.vocab_size}; put the model's own tokenizer there"
        )
    end = end_of_text(tokenizer, tokenizer_dir)[1]
    eos = {end, *read_eos_ids(tokenizer_dir, config.vocab_size)}
    if (end_of_turn := tokenizer.token_to_id(CHAT_TOKENS[1])) is not None:
        eos.add(end_of_turn)
    begin = special_token_id(tokenizer, tokenizer_dir, "bos_token")
    return Loaded(
        model,
        tokenizer,
        config,
        kind,
        tokenizer_dir,
        end if begin is None else begin,
        frozenset(eos),
        run_dir,
        run,
        step,
    )


def _read_run(run_dir: Path) -> tuple[dict[str, Any], ModelConfig]:
    path = run_dir / "run.json"
    run = read_json_object(path)
    config = run.get("config")
    model_config = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model_config, dict):
        raise RunError(f"{path}: has no model configuration; restore it, or use another run")
    if run.get("schema_version") != SCHEMA_VERSION:
        raise RunError(
            f"{path}: has schema version {run.get('schema_version')}; this version of deskside reads {SCHEMA_VERSION}"
        )
    try:
        return run, ModelConfig.model_validate(model_config)
    except ValidationError as error:
        raise RunError(f"{path}: config.model.{first_problem(error)}; restore the file") from None


def _read_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    run: tuple[Path, dict[str, Any]],
    weights: Weights | None,
) -> Transformer:
    """Load a checkpoint into a new model, with adapters merged. run: its directory and the content of run.json.

    The tensors are read into host memory, because a GPU may have room for only one copy in `dtype`. Raises Damaged, or
    RunError if they do not fit the architecture.
    """
    run_dir, record = run
    if record["config"].get("adapter") is not None:
        adapted = load_adapted_model(run_dir, checkpoint, run_config(run_dir, record), "cpu", weights)
        return merged(adapted, device, dtype)
    verify_weights(checkpoint, weights)
    model = allocate(config, device, dtype)
    if checkpoint.sharded:
        from deskside.weights import sharded_files  # importing torch.distributed.checkpoint is slow

        host_model = allocate(config, "cpu", torch.float32)
        tensors: dict[str, Tensor] = {name: p.detach() for name, p in host_model.named_parameters()}
        group = "average" if averaged(checkpoint, weights) else "model"
        sharded_files.read(checkpoint, {group: tensors}, no_dist=True)
        load_weights(model, tensors)
        return model
    load_file_into(model, checkpoint, "cpu", weights=weights)
    return model


@torch.no_grad()
def _cast(model: Transformer, dtype: torch.dtype) -> None:
    """Cast weights with two or more dimensions to `dtype`, and disable all gradients."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim >= 2:
            parameter.data = parameter.data.to(dtype)
