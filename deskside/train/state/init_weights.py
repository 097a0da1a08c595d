"""Weights that a run starts from (continued pretraining), and whether the data goes with them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deskside.config.run import RunConfig
from deskside.data.chat.chat_template import CHAT_FILES
from deskside.data.chat.renderer import TEMPLATE
from deskside.data.tokenizer import load as load_tokenizer
from deskside.run.directory import RunDirectory, resolve_path
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically
from deskside.weights.load import Loaded, load_model


@dataclass(frozen=True)
class InitialWeights:
    """Weights by parameter name, with the vocabulary that they belong to. `fresh`: tokens that no training has seen."""

    source: str
    weights: dict[str, torch.Tensor]
    vocabulary: dict[str, int]
    fresh: tuple[int, ...] = ()

    @classmethod
    def of(cls, loaded: Loaded, source: str) -> "InitialWeights":
        return cls(source, _weights(loaded), loaded.tokenizer.get_vocab(with_added_tokens=True))

    @classmethod
    def recorded(cls, run: RunDirectory, config: RunConfig) -> "InitialWeights | None":
        """Return what run.json says that a run was started from; None for random weights.

        Raises RunError where that cannot be read any more.
        """
        facts = run.read_json("run.json")
        source = facts.get("init")
        if source is None:
            return None
        try:
            loaded = load_model(resolve_path(str(source), facts.get("directory")))
        except (UsageError, RunError) as error:
            raise RunError(
                f"{run.path}: was stopped before its first checkpoint, and what it was started from cannot be read "
                f"({error}); put that back, or delete {run.path} and start again with: {facts.get('command')}"
            ) from None
        if config.align is None:
            return cls.of(loaded, str(source))
        fresh = facts.get("fresh")
        if not isinstance(fresh, list) or not all(type(token) is int for token in fresh):
            raise RunError(
                f"{run.path}: was stopped before its first checkpoint by an older deskside, which did not record which "
                f"tokens are new; delete {run.path} and start again with: {facts.get('command')}"
            )
        return cls.of_chat(loaded, str(source), config, fresh)

    @classmethod
    def of_chat(
        cls, loaded: Loaded, source: str, config: RunConfig, fresh: Sequence[int]
    ) -> "InitialWeights":
        """Return a model's weights with the vocabulary of the run's chat data. fresh: tokens that the model lacks."""
        assert config.data.path is not None
        tokens = load_tokenizer(Path(config.data.path)).get_vocab(with_added_tokens=True)
        weights = grown(_weights(loaded), config.model.vocab_size, fresh)
        return cls(source, weights, tokens, tuple(fresh))

    def check_tokenizer(self, data: Path) -> None:
        """Raises UsageError unless the prepared data has the tokens of these weights."""
        tokens = load_tokenizer(data).get_vocab(with_added_tokens=True)
        odd = [token for token, number in tokens.items() if self.vocabulary.get(token) != number]
        if odd:
            raise UsageError(
                f"--init {self.source}: has another tokenizer than {data} ({len(odd)} tokens differ); prepare "
                f"the data with it: deskside data prepare ... --tokenizer {self.source}"
            )


def _weights(loaded: Loaded) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}


def keep_tokenizer(data: Path, run: RunDirectory) -> None:
    """Copy the tokenizer of prepared data into the run, its own file last; of chat data all that chatting needs."""
    if (data / TEMPLATE).exists():
        for name in CHAT_FILES:
            write_atomically(run.path / name, (data / name).read_text("utf-8"))
    write_atomically(run.tokenizer, (data / "tokenizer.json").read_bytes().decode())


def grown(weights: dict[str, torch.Tensor], vocab_size: int, fresh: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return the weights with a vocabulary of `vocab_size`, where the tokens `fresh` start as the mean of the others.

    This changes the rows of the embedding and of an untied head. With the mean, a new token starts about as unlikely as
    an average one, so training has no large logit to undo (Hewitt 2021, "Initializing new word embeddings").
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
