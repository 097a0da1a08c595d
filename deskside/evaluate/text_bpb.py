"""Bits per byte of a loaded model on its run's validation data, on other prepared data, or on a text."""

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from deskside.config.base import DATA_NOUNS, DataKind, first_problem
from deskside.config.run import RunConfig
from deskside.data.corpus.bad_input import BadInputLog
from deskside.data.corpus.documents import iter_documents
from deskside.data.corpus.sources import Source
from deskside.data.reading.rows import PackedDataset
from deskside.data.reading.tags import UNKNOWN_LANGUAGE
from deskside.evaluate.bpb import BitsPerByte, evaluate_dataset, evaluate_text
from deskside.kernels.attention import AttentionContext, Requirements
from deskside.kernels.attention.cached_choice import choose_cached
from deskside.run.directory import with_resolved_paths
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import fingerprint
from deskside.utils.progress import ProgressBar
from deskside.utils.trials import TrialCache
from deskside.weights.load import Loaded

BPB_KINDS: tuple[DataKind, ...] = ("text", "conversations")  # kinds of training data that have bits per byte
# For a model without a run: that of most presets, so that results are comparable.
HF_SEQUENCE_LENGTH = 2048


@dataclass(frozen=True)
class TextBpb:
    """Bits per byte of a source, evaluated in rows of `length` tokens.

    baselines: bits per byte of simple models on the same data, None if unknown; empty for a text file.
    """

    result: BitsPerByte
    baselines: dict[str, float | None]
    source: str
    length: int


def measure(
    loaded: Loaded,
    config: RunConfig | None,
    device: torch.device,
    *,
    text: str | None,
    data: str | None,
    sequence_length: int | None,
    batch_tokens: int,
) -> TextBpb:
    """Measure bits per byte of a text file, of prepared data, or of the run's validation data if both are None.

    Args:
        config: The configuration of the model's run; None without a run.
        sequence_length: Tokens per row; None for the run's, or up to HF_SEQUENCE_LENGTH without a run.
        batch_tokens: Tokens per forward pass.

    Raises UsageError for an invalid length, and for data that is unreadable or was prepared with a different tokenizer.
    """
    length = sequence_length
    if length is None:
        if config is not None:
            length = config.batch.sequence_length
        else:
            length = min(loaded.config.max_position_embeddings, HF_SEQUENCE_LENGTH)
    if not 2 <= length <= loaded.config.max_position_embeddings:
        raise UsageError(
            f"--sequence-length {length}: this model takes 2 to {loaded.config.max_position_embeddings} tokens"
        )
    if text is not None:
        attention = _attention(loaded, length, batch_tokens, False, device)
        strict = BadInputLog("refuse", remedy="Fix it, or leave it out.")
        result = evaluate_text(
            loaded.model,
            loaded.tokenizer,
            loaded.start_token,
            (
                (document.lang or UNKNOWN_LANGUAGE, document.text)
                for document in iter_documents(Source.parse(text), strict)
            ),
            sequence_length=length,
            batch_tokens=batch_tokens,
            attention=attention,
        )
        return TextBpb(result, {}, text, length)
    masked = config.data.document_mask if config else False
    dataset = _dataset(loaded, config, data, length)
    attention = _attention(loaded, length, batch_tokens, masked, device)
    with ProgressBar("evaluate", dataset.num_tokens, "tokens") as bar:
        result = evaluate_dataset(
            loaded.model,
            dataset,
            micro_rows=max(1, min(batch_tokens // length, dataset.num_rows)),
            attention=attention,
            document_mask=masked,
            tick=bar.advance,
        )
    split = dataset.index.splits["val"]
    baselines = {"gzip_bpb": split.gzip_bpb, "unigram_bpb": split.unigram_bpb}
    return TextBpb(result, baselines, str(dataset.directory), length)


def run_config(loaded: Loaded) -> RunConfig | None:
    """Return the configuration of the model's run; None without a run."""
    if loaded.run_dir is None:
        return None
    try:
        return with_resolved_paths(RunConfig.model_validate(loaded.run["config"]), loaded.run)
    except ValidationError as error:
        raise RunError(
            f"{loaded.run_dir / 'run.json'}: config.{first_problem(error)}; restore the file"
        ) from None


def has_own_data(config: RunConfig | None) -> bool:
    """Return True if the run's own validation data has bits per byte. If it has other data, print the reason."""
    if config is None or config.data.path is None:
        return False
    try:
        _own_data(config)
    except UsageError as error:
        say(f"no bits per byte: {error}")
        return False
    return True


def _own_data(config: RunConfig | None) -> str:
    """Return the path of the run's data. Raises UsageError if it has no bits per byte, or does not exist."""
    path = config.data.path if config else None
    if config is not None and config.data_kind not in BPB_KINDS:
        raise UsageError(
            f"this run was trained on {DATA_NOUNS[config.data_kind]}, which have no bits per byte; give --tasks NAME, "
            "--text FILE or --data DIR (prepared text)"
        )
    if path is None:
        raise UsageError("this model has no validation data; give --text FILE or --data DIR")
    if not Path(path).is_dir():
        raise UsageError(
            f"{path}: the run's data no longer exists; give --data DIR (prepared data) or --text FILE"
        )
    return str(path)


def _attention(
    loaded: Loaded, length: int, batch_tokens: int, documents: bool, device: torch.device
) -> AttentionContext:
    """Choose the fastest correct attention backends for this shape, for full and for windowed layers.

    documents: whether attention is masked between documents.
    """
    config = loaded.config
    windows = {config.layer_window(layer) for layer in range(config.num_hidden_layers)}
    names: dict[bool, str] = {}
    cache = TrialCache()
    for window in windows:
        batch, dtype = max(1, min(4, batch_tokens // length)), loaded.model.activation_dtype
        need = Requirements.of_model(config, batch, length, dtype, device, window=window, documents=documents)
        names[window is not None] = choose_cached(need, cache)[0].name
    full = names.get(False, names.get(True, "reference"))
    return AttentionContext(backend=full, window_backend=names.get(True))


def _dataset(loaded: Loaded, config: RunConfig | None, data: str | None, length: int) -> PackedDataset:
    """Open the validation split of `data` or of the run's data. Raises UsageError if the tokenizer differs."""
    path = data or _own_data(config)
    dataset = PackedDataset(path, split="val", sequence_length=length)
    if dataset.index.tokenizer.checksum != fingerprint(loaded.tokenizer_dir / "tokenizer.json")[1]:
        raise UsageError(
            f"{path}: was prepared with a different tokenizer from the model's; give the text itself with --text FILE"
        )
    return dataset
