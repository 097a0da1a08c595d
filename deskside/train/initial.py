"""Weights that a run starts from (continued pretraining), and whether the data goes with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deskside.data.chat_template import CHAT_FILES
from deskside.data.renderer import TEMPLATE
from deskside.data.tokenizer import load as load_tokenizer
from deskside.errors import UsageError
from deskside.export.load import Loaded
from deskside.train.rundir import RunDirectory, write_atomically


@dataclass(frozen=True)
class Initial:
    """Weights by parameter name, with the vocabulary that they belong to. `fresh`: tokens that no training has seen."""

    source: str
    weights: dict[str, torch.Tensor]
    vocabulary: dict[str, int]
    fresh: tuple[int, ...] = ()

    @classmethod
    def of(cls, loaded: Loaded, source: str) -> "Initial":
        weights = {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}
        return cls(source, weights, loaded.tokenizer.get_vocab(with_added_tokens=True))

    def check_tokenizer(self, data: Path) -> None:
        """Raises UsageError unless the prepared data has the tokens of these weights."""
        tokens = load_tokenizer(data).get_vocab(with_added_tokens=True)
        odd = [token for token, number in tokens.items() if self.vocabulary.get(token) != number]
        if odd:
            raise UsageError(
                f"--init {self.source}: has another tokenizer than {data} ({len(odd)} tokens differ); prepare "
                f"the data with it: deskside data prepare ... --tokenizer {self.source}"
            )


def keep_tokenizer(data: Path, run: RunDirectory) -> None:
    """Copy the tokenizer of prepared data into the run, its own file last; of chat data all that chatting needs."""
    if (data / TEMPLATE).exists():
        for name in CHAT_FILES:
            write_atomically(run.path / name, (data / name).read_text("utf-8"))
    write_atomically(run.tokenizer, (data / "tokenizer.json").read_bytes().decode())


def grown(weights: dict[str, torch.Tensor], vocab_size: int, fresh: Sequence[int]) -> dict[str, torch.Tensor]:
    """The same weights for a vocabulary of `vocab_size`, where the tokens `fresh` begin as the mean of the others.

    Rows of a vocabulary stand in the embedding and in an untied head. A mean is what no training has to undo: the new
    token begins as unlikely as an average one (Hewitt 2021, "Initializing new word embeddings").
    """
    result = dict(weights)
    for name in ("embed.weight", "head.weight"):
        if name not in weights:
            continue
        old_VD = weights[name]
        rows = max(vocab_size, len(old_VD))
        new_VD = old_VD.new_zeros(rows, old_VD.shape[1])
        new_VD[: len(old_VD)] = old_VD
        known = torch.ones(len(old_VD), dtype=torch.bool)
        known[[n for n in fresh if n < len(old_VD)]] = False
        mean_D = old_VD[known].double().mean(0).to(old_VD.dtype)
        new_VD[len(old_VD) :] = mean_D
        new_VD[list(fresh)] = mean_D
        result[name] = new_VD
    return result
