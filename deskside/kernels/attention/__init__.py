"""Attention kernels behind one interface; importing this package registers them and runs nothing."""

from deskside.kernels.attention import flex, reference, sdpa, varlen
from deskside.kernels.attention.choose import Choice, choose
from deskside.kernels.attention.context import (
    BACKENDS,
    AttentionContext,
    Backend,
    Requirements,
    backend_named,
    document_ids,
    document_positions,
    prepare,
)
from deskside.kernels.attention.reference import decode_attention

__all__ = [
    "AttentionContext",
    "Requirements",
    "Backend",
    "BACKENDS",
    "backend_named",
    "prepare",
    "choose",
    "Choice",
    "decode_attention",
    "document_ids",
    "document_positions",
    "flex",
    "reference",
    "sdpa",
    "varlen",
]
