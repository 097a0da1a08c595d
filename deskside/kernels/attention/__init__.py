"""Attention kernels behind one interface; importing this package registers them and runs nothing."""

from deskside.kernels.attention import fa4, flex, gathered, reference, sdpa, varlen
from deskside.kernels.attention.choose import BackendChoice, choose
from deskside.kernels.attention.context import (
    BACKENDS,
    PLAIN,
    AttentionBackend,
    AttentionContext,
    FwdBwd,
    Requirements,
    backend_named,
    document_ids,
    document_positions,
    prepare,
)
from deskside.kernels.attention.manual_backward import SavedAttention, attention_backward, attention_forward
from deskside.kernels.attention.ranks import ContextRanks
from deskside.kernels.attention.reference import decode_attention

__all__ = [
    "AttentionContext",
    "ContextRanks",
    "Requirements",
    "AttentionBackend",
    "FwdBwd",
    "BACKENDS",
    "PLAIN",
    "backend_named",
    "prepare",
    "choose",
    "BackendChoice",
    "decode_attention",
    "attention_forward",
    "attention_backward",
    "SavedAttention",
    "document_ids",
    "document_positions",
    "fa4",
    "flex",
    "gathered",
    "reference",
    "sdpa",
    "varlen",
]
