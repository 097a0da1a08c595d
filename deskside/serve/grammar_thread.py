"""Compiles the grammars of requests in a thread, because large ones take seconds."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from deskside.engine.grammar import Grammar, Grammars
from deskside.serve.answer_plan import AnswerPlan
from deskside.serve.protocol import ApiError
from deskside.utils.errors import UsageError
from deskside.weights.load import Loaded

# llguidance recurses into rules and $refs, at about 10 kB of stack each, and an overflow would end the process. This is
# enough for `MAX_CHARACTERS` of them, and takes no memory until it is used.
STACK_BYTES = 1 << 29


class GrammarThread:
    """Compiles grammars for the answers of a model. What depends on the tokenizer is made for the first one."""

    def __init__(self, loaded: Loaded):
        self._loaded = loaded
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")
        default = threading.stack_size(STACK_BYTES)
        try:
            self._thread.submit(int)  # starts the thread
        finally:
            threading.stack_size(default)

    async def compile(self, plan: AnswerPlan) -> Grammar | None:
        """Return the grammar of answers, if they have one. Raises ApiError if it is invalid or not supported."""
        if not plan.has_grammar:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, plan)

    def _compile(self, plan: AnswerPlan) -> Grammar:
        loaded = self._loaded
        if self._grammars is None:
            try:
                self._grammars = Grammars(
                    loaded.tokenizer, loaded.config.vocab_size, sorted(loaded.eos_tokens)
                )
            except UsageError as error:
                raise ApiError(400, str(error)) from None
        return plan.grammar(self._grammars)
