"""Training runs that others measured and published: training speed and memory, one row of `measurements.csv` per run.

The rows were read at their sources (IST-DASLab/llmq, karpathy/nanochat, mosaicml/llm-foundry, pytorch/torchtune and
others; column `source`). They are kept as published; the note of a row says what is wrong with it. Rows that no card
can have reached stay in the table, marked `rejected`, and a test finds exactly these.

Three cautions. Memory differs between versions of torch and between kinds of counting, so only a row that says how it
counted is complete for memory. Utilization as printed has many conventions; `flops_per_token` has ours
(`budget/shape.py`). Multi-GPU rows include communication.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

from deskside.facts.data_files import csv_rows
from deskside.facts.gpus import Gpu, find

Precision = Literal["bf16", "fp8", "mxfp8", "int8", "nf4"]
MemoryKind = Literal["allocated", "reserved", "process", "unclear", ""]
Complete = Literal["both", "speed", "partly", "no", "reject"]


@dataclass(frozen=True)
class Measurement:
    """One published run. None or "": not published.

    gpu: as published; card: the name in our table, "" when it is none of them (the note says when the form, such as
    SXM or PCIe, was not stated). layers ... vocab: the shape; mlp_matrices: 3 gated, 2 not; params: as published.
    rows: sequences of one forward pass on one GPU. precision: of the matrix products (of fp8 rows the head is often
    bf16: precision_as_published). saving: activation checkpointing and offload, in the source's words; "" none or
    not said. tokens_per_second: of the whole run. mfu_reported: a share, in the convention of the source.
    peak_memory_bytes: of one GPU, counted as memory_kind says.
    """

    gpu: str
    card: str
    gpus: int
    framework: str
    workload: str
    model: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    mlp_matrices: int | None
    vocab: int | None
    params: float | None
    sequence_length: int | None
    rows: int | None
    precision: Precision
    precision_as_published: str
    compiled: bool | None
    attention: str
    saving: str
    optimizer: str
    tokens_per_second: float | None
    mfu_reported: float | None
    mfu_convention: str
    peak_memory_bytes: int | None
    memory_kind: MemoryKind
    complete: Complete
    date: str
    source: str
    note: str

    @property
    def rejected(self) -> bool:
        """No card can have made it."""
        return self.complete == "reject"

    @property
    def shaped(self) -> bool:
        """Shape, sequence length and micro-batch are all known."""
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab)
        return None not in (*sizes, self.sequence_length, self.rows)

    @property
    def complete_for_speed(self) -> bool:
        """Everything is known that a model of the speed needs."""
        return self.complete in ("both", "speed") and self.shaped and self.tokens_per_second is not None

    @property
    def complete_for_memory(self) -> bool:
        """Everything is known that a model of the memory needs, the kind of counting included."""
        return self.complete == "both" and self.shaped and self.memory_kind in ("allocated", "reserved")

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        return None if self.tokens_per_second is None else self.tokens_per_second / self.gpus

    @property
    def flops_per_token(self) -> float | None:
        """Forward and backward, causal attention over the full sequence: 6 x matmul weights (head included, embedding
        not) + 6 x layers x hidden x T. Windowed runs did a little less. None when the shape is not known."""
        L, D, H, K, F = self.layers, self.hidden, self.heads, self.kv_heads, self.ffn
        V, T, mats = self.vocab, self.sequence_length, self.mlp_matrices
        if L is None or D is None or H is None or K is None or F is None:
            return None
        if V is None or T is None or mats is None:
            return None
        weights = L * (2 * D * D + 2 * D * D * K / H + mats * D * F) + D * V
        return 6 * weights + 6 * L * D * T

    def data_sheet(self) -> Gpu | None:
        """Return the card's row in our table."""
        return find(self.card) if self.card else None


@cache
def published() -> tuple[Measurement, ...]:
    """Return every row, the rejected ones included."""
    columns = {"params": ("params_millions", 1e6), "mfu_reported": ("mfu_reported", 0.01)}
    return csv_rows("measurements.csv", Measurement, columns)
