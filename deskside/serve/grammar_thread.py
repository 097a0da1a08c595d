"""Compiles the grammars of requests in a thread, because large ones take seconds."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from deskside.engine.grammar import Grammar, Grammars
from deskside.serve.answer_plan import AnswerPlan
from deskside.serve.protocol import ApiError
from deskside.utils.errors import UsageError
from deskside.weights.load import Loaded


class GrammarThread:
    """Compiles grammars for the answers of a model. What depends on the tokenizer is made for the first one."""

    def __init__(self, loaded: Loaded):
        self._loaded = loaded
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, "grammars")

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
