"""Compiles the grammars of requests in a thread, because large ones take seconds."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from deskside.engine.grammar import Grammar, Grammars
from deskside.serve.protocol import ApiError
from deskside.serve.structured import GrammarSource
from deskside.utils.errors import UsageError
from deskside.weights.load import Loaded


class GrammarThread:
    """Compiles grammars for the answers of a model. What depends on the tokenizer is made for the first one."""

    def __init__(self, loaded: Loaded):
        self._loaded = loaded
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def compile(self, source: GrammarSource) -> Grammar:
        """Compile a grammar. Raises ApiError if it is invalid or not supported."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, source)

    def _compile(self, source: GrammarSource) -> Grammar:
        loaded = self._loaded
        try:
            if self._grammars is None:
                self._grammars = Grammars(
                    loaded.tokenizer, loaded.config.vocab_size, sorted(loaded.eos_tokens)
                )
            return self._grammars.compile(source.kind, source.text)
        except UsageError as error:
            raise ApiError(400, f"{source.field}: {error}", param=source.field) from None
