"""Write prepared text as Megatron-LM's indexed datasets: train.bin and train.idx, val.bin and val.idx.

    python -m deskside.data.megatron data/corpus --out megatron

Megatron puts the end-of-text token E behind a document, where shards have it in front: `E text E text ... E`. So a
shard without its first token holds the same documents as Megatron writes them, `text E text E ...`, of equal lengths.

The layout of .idx, all little-endian (megatron/core/datasets/indexed_dataset.py of Megatron-LM):

    9 bytes   MMIDIDX\\0\\0
    uint64    version, 1
    uint8     type of the tokens in .bin: 8 is uint16, 4 is int32 (there is no uint32)
    uint64    S, number of sequences; here each document is one
    uint64    D, length of the table of documents
    int32[S]  tokens of each sequence
    int64[S]  where each begins in .bin, in bytes
    int64[D]  the first sequence of each document, then S
"""

import argparse
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from deskside.data.reading.index import Dtype, SplitInfo, read_index
from deskside.data.reading.shards import open_table, open_tokens
from deskside.utils.errors import RunError, UsageError
from deskside.utils.files import create_folder, replace_atomically, write_atomically
from deskside.utils.format import plural

MAGIC = b"MMIDIDX\0\0"
TYPES = {"uint16": ("<u2", 8), "uint32": ("<i4", 4)}  # dtype of our shards -> that of .bin, and its code
CHUNK = 1 << 22  # tokens that are copied at a time


def convert(data: Path, out: Path) -> dict[str, tuple[int, int]]:
    """Write all splits of the data set `data` to `out`, with its tokenizer. Return their documents and tokens by name.

    Raises UsageError for conversations, whose masks Megatron's format does not hold, and if `out` has such files or
    cannot be made, and RunError if the disk is full or the data are damaged; no partial data set is left behind.
    """
    index = read_index(data)
    if any(shard.mask is not None for split in index.splits.values() for shard in split.shards):
        raise UsageError(
            f"{data}: holds conversations, and Megatron's format has no mask; convert prepared text"
        )
    for name in index.splits:
        for file in (out / f"{name}.bin", out / f"{name}.idx"):
            if file.exists():
                raise UsageError(f"{out}: holds {file.name} already; give another --out")
    create_folder(out)
    written: dict[str, tuple[int, int]] = {}
    try:
        for name, split in index.splits.items():
            written[name] = convert_split(data, index.dtype, split, out / name)
        for file in (data / "tokenizer.json", data / "tokenizer_config.json"):
            if file.exists():
                write_atomically(out / file.name, file.read_bytes())
    except BaseException:  # a part of a data set would pass for the whole
        for name in index.splits:
            for suffix in (".bin", ".idx"):
                (out / f"{name}{suffix}").unlink(missing_ok=True)
        raise
    return written


def convert_split(data: Path, dtype: Dtype, split: SplitInfo, prefix: Path) -> tuple[int, int]:
    """Write PREFIX.bin and PREFIX.idx. Return the number of documents and of tokens. dtype: of the shards' tokens."""
    written, code = TYPES[dtype]
    lengths = []
    with replace_atomically(prefix.with_suffix(".bin")) as temporary, temporary.open("wb") as file:
        for shard in split.shards:
            tokens = open_tokens(data, shard, dtype)
            starts = open_table(data, shard)["start"]
            lengths.append(np.diff(np.append(starts, len(tokens) - 1)))
            for begin in range(1, len(tokens), CHUNK):
                file.write(np.asarray(tokens[begin : begin + CHUNK], written).tobytes())
    sizes = np.concatenate(lengths).astype(np.int64)
    ends = np.cumsum(sizes)
    count = len(sizes)
    with replace_atomically(prefix.with_suffix(".idx")) as temporary, temporary.open("wb") as file:
        file.write(MAGIC + struct.pack("<QBQQ", 1, code, count, count + 1))
        file.write(sizes.astype("<i4").tobytes())
        file.write(((ends - sizes) * np.dtype(written).itemsize).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    return count, int(ends[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code: 0, 1 for damaged data, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m deskside.data.megatron",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, help="directory written by deskside data prepare")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    try:
        for name, (documents, tokens) in convert(options.data, options.out).items():
            print(f"{options.out / name}.bin, .idx: {plural(documents, 'document')}, {tokens:,} tokens")
    except (UsageError, RunError) as error:
        print(f"deskside: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
