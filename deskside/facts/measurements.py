"""Speed and memory of training runs that others published, read from `measurements.csv`, one row per run.

The rows come from IST-DASLab/llmq, karpathy/nanochat, mosaicml/llm-foundry, pytorch/torchtune and others (column
`source`). Numbers are kept as published, and the note of a row names its errors. Rows with a speed above the card's
peak rate are kept too, marked `rejected`; tests/facts/test_measurements.py recomputes which rows these are.

- Memory depends on the version of torch and on how it was measured, so only rows whose `memory_kind` is
  "allocated" or "reserved" are complete for memory.
- Sources define MFU differently. `flops_per_token` uses deskside's definition (`budget/shape.py`).
- The speed of a multi-GPU row includes communication.
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
    """One published run. None or "" means that a value was not published.

    Attributes:
        gpu: Name of the GPU in the source.
        card: Name of the GPU in gpus.csv, "" if it is not listed there. If the source did not state the form (SXM or
            PCIe), the note says so.
        gpus: Number of GPUs.
        mlp_matrices: Weight matrices per MLP: 3 with a gate, 2 without.
        params: Number of parameters in the source.
        rows: Sequences per forward pass and GPU.
        precision: Number format of the matrix products. In many FP8 runs the head is in BF16; then
            `precision_as_published` says so.
        saving: Activation checkpointing and offload in the source's words, "" if none or not stated.
        tokens_per_second: Speed of all GPUs together.
        mfu_reported: Utilization in the source (0.5 is 50 %), defined as in `mfu_convention`.
        peak_memory_bytes: Peak memory of one GPU, measured as `memory_kind` says.
        complete: Whether the row has everything that a model of speed and memory needs ("both", "speed"), only part of
            it ("partly", "no"), or an impossible number ("reject").
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
        """True if the published speed is impossible on this card."""
        return self.complete == "reject"

    @property
    def has_shape(self) -> bool:
        """True if the model's shape, the sequence length and the micro-batch are all known."""
        sizes = (self.layers, self.hidden, self.heads, self.kv_heads, self.ffn, self.vocab)
        return None not in (*sizes, self.sequence_length, self.rows)

    @property
    def complete_for_speed(self) -> bool:
        """True if the row has everything that a model of the speed needs."""
        return self.complete in ("both", "speed") and self.has_shape and self.tokens_per_second is not None

    @property
    def complete_for_memory(self) -> bool:
        """True if the row has everything that a model of the memory needs, including the kind of measurement."""
        return self.complete == "both" and self.has_shape and self.memory_kind in ("allocated", "reserved")

    @property
    def tokens_per_second_per_gpu(self) -> float | None:
        return None if self.tokens_per_second is None else self.tokens_per_second / self.gpus

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs per token of forward and backward with full causal attention; None if the shape is not known.

        6 x matmul weights (with the head, without the embedding) + 6 x layers x hidden x T. Runs with windowed
        attention computed a little less.
        """
        L, D, H, K, F = self.layers, self.hidden, self.heads, self.kv_heads, self.ffn
        V, T, matrices = self.vocab, self.sequence_length, self.mlp_matrices
        if L is None or D is None or H is None or K is None or F is None:
            return None
        if V is None or T is None or matrices is None:
            return None
        weights = L * (2 * D * D + 2 * D * D * K / H + matrices * D * F) + D * V
        return 6 * weights + 6 * L * D * T

    def data_sheet(self) -> Gpu | None:
        """Return the card's row in gpus.csv, or None if it is not listed there."""
        return find(self.card) if self.card else None


@cache
def published() -> tuple[Measurement, ...]:
    """Return every row, including the rejected ones."""
    columns = {"params": ("params_millions", 1e6), "mfu_reported": ("mfu_reported", 0.01)}
    return csv_rows("measurements.csv", Measurement, columns)
