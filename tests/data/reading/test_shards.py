from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from deskside.data.reading.shards import EncodedDocument, open_table, open_tokens, publish, write_shard


@given(
    documents=st.lists(
        st.tuples(st.lists(st.integers(1, 299), max_size=20), st.integers(0, 3)), min_size=1, max_size=20
    ),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
@settings(max_examples=60, deadline=None)
def test_write_shard_round_trip(
    tmp_path_factory: pytest.TempPathFactory, documents: list, dtype: str
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    encoded = [EncodedDocument(np.array(ids, dtype=np.uint32), tag) for ids, tag in documents]
    token_bytes = np.arange(300, dtype=np.uint16)
    info = write_shard(
        folder, "x", encoded, eos_id=0, dtype=dtype, text_bytes=7, token_bytes=token_bytes, key="k"
    )
    # They are recorded before they are published.
    assert not {"x.bin", "x.idx.npy"} & {p.name for p in folder.iterdir()}
    publish(folder, info)
    expected = [0]
    starts = []
    for ids, _ in documents:
        starts.append(len(expected) - 1)
        expected += [*ids, 0]
    raw = np.frombuffer((folder / "x.bin").read_bytes(), dtype="<u2" if dtype == "uint16" else "<u4")
    assert raw.tolist() == expected == open_tokens(folder, info, dtype).tolist()
    table = open_table(folder, info)
    assert table["start"].tolist() == starts and table["tag"].tolist() == [t for _, t in documents]
    assert info.checksum == xxhash.xxh3_128_hexdigest((folder / "x.bin").read_bytes())
    assert info.token_text_bytes == sum(sum(ids) for ids, _ in documents)
    assert sum(c.documents for c in info.tags.values()) == len(documents)
    assert sum(c.tokens for c in info.tags.values()) == len(expected) - 1
    assert sorted(p.name for p in folder.iterdir()) == ["x.bin", "x.idx.npy"]
