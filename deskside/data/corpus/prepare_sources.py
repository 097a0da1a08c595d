"""Preparation of the data that a configuration describes: `data.sources`, for presets with a text of their own."""

from __future__ import annotations

from collections.abc import Callable

from deskside.config.run import RunConfig
from deskside.data.corpus.analyze import CorpusOptions
from deskside.data.corpus.prepare import prepare
from deskside.data.reading.index_file import is_prepared


def prepare_sources(config: RunConfig, say: Callable[[str], None]) -> None:
    """Prepare `data.path` from `data.sources`, unless it is prepared or there are none. Raises as `prepare`."""
    data = config.data
    if data.path is None or not data.sources or is_prepared(data.path):
        return
    say(f"preparing {', '.join(data.sources)} into {data.path}")
    options = CorpusOptions(
        vocab_size=config.model.vocab_size, val_fraction=data.val_fraction, seed=config.seed
    )
    prepare(list(data.sources), data.path, options)
