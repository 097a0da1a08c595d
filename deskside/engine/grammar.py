"""Answers that follow a grammar: in each step, all tokens that may not come next get the logit -inf.

llguidance computes which ones (github.com/guidance-ai/llguidance). Of the well-maintained libraries, it is the one
whose wheels need no other package (xgrammar's require torch, triton and transformers) and fit all Python versions, and
it refuses what it does not support in a JSON schema instead of ignoring it. It computes a mask on the CPU and releases
the GIL.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deskside.engine.json_schema import OPTIONS, checked_schema
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, json_value

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

GrammarKind = Literal["json", "regex", "choice", "grammar", "lark"]
MASK_BITS = 32  # tokens per element of a mask
INNER = "@inner"  # a grammar that another one contains
COMPILED = 16  # compiled grammars that are kept; one may take many megabytes
MAX_ERROR_CHARACTERS = 300
MAX_CHARACTERS = 1 << 18  # of a grammar, and of the JSON schema of one function


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar, from `Grammars.compile`. Each answer gets its own matcher."""

    initial: "LLMatcher"

    def matcher(self) -> "LLMatcher":
        """Return a matcher for one answer, with no token consumed."""
        return self.initial.deep_copy()


class Grammars:
    """Compiles grammars for the answers of one model. Thread-safe.

    vocab_size: of the model; it may exceed the tokenizer's. eos_tokens: allowed where the grammar is complete. Raises
    UsageError without llguidance, and for a tokenizer without a token for each byte, which it does not support.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_tokens: Sequence[int]):
        try:
            from llguidance import LLParserLimits, LLTokenizer
        except ModuleNotFoundError:
            raise UsageError(
                "structured output needs the package llguidance; install it: pip install 'deskside[serve]'"
            ) from None
        eos = list(eos_tokens) or None
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=eos)
        except ValueError as error:
            raise UsageError(
                f"structured output is not available with this tokenizer: {str(error)[:MAX_ERROR_CHARACTERS]}"
            ) from None
        self._token_ids = tokenizer.get_vocab(with_added_tokens=True)
        self._limits = LLParserLimits(verbose_errors=False)
        self._compile = lru_cache(COMPILED)(self._compiled)

    def special_token(self, text: str) -> int | None:
        """Return the id of a text that is a special token, which the text of a grammar cannot contain, or None."""
        number = self._token_ids.get(text)
        return number if number is not None and self._tokenizer.is_special_token(number) else None

    def compile(self, kind: GrammarKind, text: str, outer: str | None = None) -> Grammar:
        """Compile a grammar. Raises UsageError for an invalid or unsupported one, with the reason.

        Args:
            kind: "json": a JSON schema. "regex": a regular expression in Rust's syntax that matches the whole answer.
                "choice": a JSON list of strings. "grammar": EBNF as in llama.cpp, or Lark. "lark": Lark with
                llguidance's extensions, such as `%json`.
            outer: A grammar in Lark that contains this one as `@inner`; None for only this one.
        """
        return self._compile(kind, text, outer)

    def _compiled(self, kind: GrammarKind, text: str, outer: str | None) -> Grammar:
        from llguidance import LLMatcher, grammar_from

        if len(text) > MAX_CHARACTERS and kind != "lark":
            raise _refused(kind, f"it has {len(text)} characters; the maximum is {MAX_CHARACTERS}")
        try:
            if kind == "json":
                source = LLMatcher.grammar_from_json_schema(checked_schema(text), overrides=OPTIONS)
            elif kind == "choice":
                # One terminal: alternatives of a rule are items of the parser, which has a maximum of 2,000.
                source = "start: CHOICE\nCHOICE: " + " | ".join(map(lark_literal, json_value(text)))
            else:
                source = grammar_from(kind, text)
        except ValueError as error:
            raise _refused(kind, str(error)) from None
        if outer is not None:
            source = _contained(source, outer)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        matcher.compute_bitmask()  # finds some errors only here, such as a rule that contains nothing but itself
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return Grammar(matcher)


def _contained(source: str, outer: str) -> str:
    """Return a grammar in which `outer`, in Lark, contains `source`, in Lark or llguidance's JSON."""
    if source.startswith("{"):
        try:
            inner = json_value(source, big_integers=True)["grammars"][0]
        except Unreadable as error:
            raise _refused("json", str(error)) from None
    else:
        inner = {"lark_grammar": source}
    return json.dumps({"grammars": [{"lark_grammar": outer}, {**inner, "name": INNER[1:]}]})


def _refused(kind: GrammarKind, reason: str) -> UsageError:
    name = {"json": "JSON schema", "choice": "list of choices", "lark": "grammar"}.get(kind, kind)
    return UsageError(f"the {name} is invalid or uses a feature that is not supported: {shown_error(reason)}")


def shown_error(reason: str) -> str:
    """Return an error of llguidance as one line of limited length."""
    if reason.startswith("panic:"):  # an assertion about its size, with a backtrace
        return "llguidance fails on it; make it smaller"
    return " ".join(reason.replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARACTERS]


def allowed_tokens(matcher: "LLMatcher") -> set[int]:
    """Return the tokens that a matcher allows next."""
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    return set(np.unpackbits(mask, bitorder="little").nonzero()[0].tolist())


def lark_literal(text: str) -> str:
    """Return a text as a string literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


class MaskBuilder:
    """Computes the masks of several rows in parallel."""

    def __init__(self, vocab_size: int):
        self._width = -(-vocab_size // MASK_BITS)
        self._executor: LLExecutor | None = None

    def masks(self, matchers: "Sequence[LLMatcher]") -> Tensor:
        """Return the tokens that each matcher allows next: int32 (B, ceil(V / 32)) on the host.

        Bit i of element j is token 32 j + i. A matcher that fails (`is_error`) allows only an end-of-text token.
        """
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor()
        mask_BW = np.empty((len(matchers), self._width), dtype=np.int32)
        jobs: list[Any] = [(matcher, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(self._executor, jobs, mask_BW)
        return torch.from_numpy(mask_BW)


def forbid(logits_BV: Tensor, allowed_BW: Tensor) -> Tensor:
    """Return the logits with -inf for the tokens that a mask does not allow. allowed_BW: see `MaskBuilder.masks`."""
    V = logits_BV.shape[1]
    bit_32 = torch.arange(MASK_BITS, dtype=torch.int32, device=logits_BV.device)
    allowed_BV = ((allowed_BW[:, :, None] >> bit_32) & 1).flatten(1)[:, :V].bool()
    return torch.where(allowed_BV, logits_BV, -torch.inf)
