"""Where the optional packages with CuTe DSL kernels keep what they compile."""

import os

from deskside.utils.files import cache_folder


def keep_compiled_kernels() -> None:
    """Let the packages keep compiled kernels in the user's cache directory, unless their own environment variables say
    where.

    Call this before any of them is imported: FlashAttention-4 imports quack-kernels, which reads its variable then.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(cache_folder() / "flash-attn-4"))
    os.environ.setdefault("QUACK_CACHE_DIR", str(cache_folder() / "quack"))
