"""Bits per byte of any model on prepared data, by a rule that others can repeat without this project's code.

The validation documents follow each other in one stream of tokens, each after an end-of-text token. It is cut into rows
that share only the border token: a row's inputs are its tokens, its targets the tokens that follow them. Text that a
row begins in the middle of has no context from the row before. As in `bpb.py`, end-of-text tokens are no targets, and
bytes are those of the text. Training packs documents differently, so a run's own `val_bpb` differs slightly.

A model that is not this project's takes part as a function from inputs and targets to the sum of their losses.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from deskside.data import tokenizer as bpe
from deskside.data.reading import shards
from deskside.data.reading.rows import IGNORE
from deskside.data.reading.verify import checked_index
from deskside.evaluate.bpb import BitsPerByte
from deskside.utils.errors import UsageError

# (inputs_BT, targets_BT) int64 -> sum of -ln p over the targets that are not IGNORE
SummedLoss = Callable[[Tensor, Tensor], Tensor]
VAL = "val"


@dataclass(frozen=True)
class TokenStream:
    """The tokens of a split, in order. bytes_V: bytes of text of each token id, 0 for special tokens."""

    tokens: NDArray[np.int64]
    bytes_V: NDArray[np.int64]

    def rows(self, length: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, int64 of shape (rows, length). The last row is padded; special targets are IGNORE.

        Raises UsageError if the stream has no text.
        """
        count = -(-(len(self.tokens) - 1) // length)
        if count < 1 or not self.bytes_V[self.tokens[1:]].any():
            raise UsageError("the validation split holds no text to evaluate")
        inputs = np.full(count * length, self.tokens[0], dtype=np.int64)
        targets = np.full(count * length, IGNORE, dtype=np.int64)
        following = self.tokens[1:]
        inputs[: len(following)] = self.tokens[:-1]
        targets[: len(following)] = np.where(self.bytes_V[following] > 0, following, IGNORE)
        return torch.from_numpy(inputs).view(count, length), torch.from_numpy(targets).view(count, length)


def read_stream(data: str | Path, split: str = VAL) -> TokenStream:
    """Read a split of prepared text. Raises UsageError if there is none, RunError if it is damaged."""
    directory = Path(os.path.expanduser(data))
    index = checked_index(directory)
    if split not in index.splits:
        raise UsageError(f"{directory}: has no split {split!r}; it has {', '.join(sorted(index.splits))}")
    parts = []
    for shard in index.splits[split].shards:
        # A shard ends with an end-of-text token, with which the next one begins.
        parts.append(shards.open_tokens(directory, shard, index.dtype)[:-1])
    tokens = np.concatenate(parts).astype(np.int64)
    return TokenStream(tokens, bpe.token_bytes(bpe.load(directory)).astype(np.int64))


def stream_bpb(
    summed_loss: SummedLoss, stream: TokenStream, length: int, batch_rows: int, device: torch.device
) -> BitsPerByte:
    """Return the bits per byte of a model on a stream in rows of `length` tokens.

    Every batch has `batch_rows` rows, the last one after padding, so a compiled model sees one shape.
    """
    inputs_RT, targets_RT = stream.rows(length)
    padding = -len(inputs_RT) % batch_rows
    inputs_RT = F.pad(inputs_RT, (0, 0, 0, padding), value=int(stream.tokens[0]))
    targets_RT = F.pad(targets_RT, (0, 0, 0, padding), value=IGNORE)
    nats = 0.0
    with torch.no_grad():
        for inputs_BT, targets_BT in zip(
            inputs_RT.split(batch_rows), targets_RT.split(batch_rows), strict=True
        ):
            if bool((targets_BT != IGNORE).any()):
                nats += float(summed_loss(inputs_BT.to(device), targets_BT.to(device)).double())
    counted = targets_RT[targets_RT != IGNORE].numpy()
    return BitsPerByte(nats, int(stream.bytes_V[counted].sum()), len(counted))


def transformers_loss(folder: Path, length: int, device: torch.device) -> SummedLoss:
    """Return the summed loss of a Hugging Face model in float32, computed by transformers.

    Raises UsageError if the folder has no model or it takes fewer tokens than `length`.
    """
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder}: is not a Hugging Face model (no config.json)")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    longest = model.config.max_position_embeddings
    if length > longest:
        raise UsageError(f"{folder}: takes at most {longest} tokens, but rows of {length} are scored")
    model = model.to(device).eval()

    def summed_loss(inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
        return F.cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum"
        )

    return summed_loss
