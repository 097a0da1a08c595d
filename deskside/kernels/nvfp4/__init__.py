"""NVFP4 on a GPU: the quantizer, the GEMM of emulated operands, and the native GEMMs, as Triton kernels.

Only operand.py is imported before a GPU (or a test) needs it, because Triton is not installed everywhere.
"""
