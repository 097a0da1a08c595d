"""Initial weights of a run: load them, check that the data has the same tokenizer, and add vocabulary entries."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deskside.config.run import RunConfig
from deskside.data.chat.chat_template import CHAT_FILES
from deskside.data.chat.renderer import TEMPLATE
from deskside.data.tokenizer import load as load_tokenizer
from deskside.model.transformer import Transformer
from deskside.ops.logical import logical_tensors
from deskside.run.directory import RunDirectory, resolve_path
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import write_atomically
from deskside.utils.format import plural
from deskside.weights.checkpoint import load_weights
from deskside.weights.load import Loaded, load_base, load_model
from deskside.weights.peft_adapters import PeftAdapters
from deskside.weights.upcycle import upcycle


@dataclass(frozen=True)
class InitialWeights:
    """Initial weights of a run, by parameter name.

    source: the run or model directory that they come from. vocabulary: token -> id. fresh: ids of the tokens whose
    embeddings are reinitialized, see `resize_vocabulary`. dense: the run trains a mixture of experts that starts as
    this dense model, and `weights` are by logical name (see weights/upcycle.py). adapters: the adapters that training
    starts from; None for new ones.
    """

    source: str
    weights: dict[str, torch.Tensor]
    vocabulary: dict[str, int]
    fresh: tuple[int, ...] = ()
    dense: bool = False
    adapters: PeftAdapters | None = None

    @classmethod
    def of(cls, loaded: Loaded, source: str) -> "InitialWeights":
        return cls(source, _weights(loaded), loaded.tokenizer.get_vocab(with_added_tokens=True))

    @classmethod
    def of_dense(cls, loaded: Loaded, source: str) -> "InitialWeights":
        """Return the weights of a dense model for a mixture of experts that `check_upcycling` allows."""
        weights = {tensor.name: tensor.view for tensor in logical_tensors(loaded.model)}
        return cls(source, weights, loaded.tokenizer.get_vocab(with_added_tokens=True), dense=True)

    def load_into(self, model: Transformer) -> None:
        """Set the weights of an initialized model, in place. Raises RunError if names or shapes differ."""
        if self.dense:
            upcycle(model, self.weights)
        else:
            load_weights(model, self.weights)

    @classmethod
    def recorded(cls, run: RunDirectory, config: RunConfig) -> "InitialWeights | None":
        """Load the weights that a run was started from, as run.json records them; None for random weights.

        Raises RunError if they cannot be read any more.
        """
        facts = run.read_json("run.json")
        source = facts.get("init")
        if source is None:
            return None
        adapters, path = None, resolve_path(str(source), facts.get("directory"))
        try:
            if folder := facts.get("adapters"):
                loaded, adapters = load_base(Path(resolve_path(str(folder), facts.get("directory"))), path)
            else:
                loaded = load_model(path)
        except (UsageError, RunError) as error:
            raise RunError(
                f"{run.path}: was stopped before its first checkpoint, and its initial weights cannot be read "
                f"({error}); restore them, or delete {run.path} and start again with: {facts.get('command')}"
            ) from None
        if config.align is None:
            upcycled = config.model.num_experts > 0 and loaded.config.num_experts == 0
            return cls.of_dense(loaded, str(source)) if upcycled else cls.of(loaded, str(source))
        fresh = facts.get("fresh")
        if not isinstance(fresh, list) or not all(type(token) is int for token in fresh):
            raise RunError(
                f"{run.path}: was stopped before its first checkpoint by an older deskside, which did not record which "
                f"tokens are new; delete {run.path} and start again with: {facts.get('command')}"
            )
        return replace(cls.of_chat(loaded, str(source), config, fresh), adapters=adapters)

    @classmethod
    def of_chat(
        cls, loaded: Loaded, source: str, config: RunConfig, fresh: Sequence[int]
    ) -> "InitialWeights":
        """Return a model's weights, resized to the vocabulary of the run's chat data. fresh: see `InitialWeights`."""
        assert config.data.path is not None
        vocabulary = load_tokenizer(Path(config.data.path)).get_vocab(with_added_tokens=True)
        weights = resize_vocabulary(_weights(loaded), config.model.vocab_size, fresh)
        return cls(source, weights, vocabulary, tuple(fresh))

    def check_tokenizer(self, data: Path) -> None:
        """Raise UsageError if a token of the data has a different id, or none, in the vocabulary of these weights."""
        vocabulary = load_tokenizer(data).get_vocab(with_added_tokens=True)
        different = [token for token, id in vocabulary.items() if self.vocabulary.get(token) != id]
        if different:
            raise UsageError(
                f"--init {self.source}: has a different tokenizer from {data} (in "
                f"{plural(len(different), 'token')}); prepare the data with its tokenizer: deskside data prepare ... "
                f"--tokenizer {self.source}"
            )


def _weights(loaded: Loaded) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in loaded.model.named_parameters()}


def copy_tokenizer(data: Path, run: RunDirectory) -> None:
    """Copy the tokenizer of prepared data into the run, and the chat template and its settings for chat data.

    tokenizer.json is written last: a run without it copies everything again.
    """
    if (data / TEMPLATE).exists():
        for name in CHAT_FILES:
            write_atomically(run.path / name, (data / name).read_text("utf-8"))
    write_atomically(run.tokenizer, (data / "tokenizer.json").read_bytes().decode())


def resize_vocabulary(
    weights: dict[str, torch.Tensor], vocab_size: int, fresh: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the weights with at least `vocab_size` rows in the embedding and in an untied head.

    New rows and the rows of the tokens `fresh` are the mean of the other rows. A new token is then about as unlikely as
    an average one, and training has no large logit to correct (Hewitt 2021, "Initializing new word embeddings").
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
