"""Answers with several turns: the model calls tools, gets their results, and continues.

An answer is one sequence of tokens: what the model sampled, the results as the chat template writes them, what the
model sampled next, and so on. As in TRL, the sampled tokens are kept as they are and never tokenized again, and the
results' tokens are not scored (`SampledAnswer.own`), so they have no part in the loss. The answer ends with a turn
without a call, after `max_turns` turns of results, or where the results would leave no room in `align.answer_tokens`.

A turn that was truncated calls nothing. What looks like a call but is none, such as one of a function that does not
exist, is text, with which the answer ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from deskside.align.sampler import SampledAnswer, Sampler
from deskside.align.tools import ToolResult, Tools
from deskside.data.chat.answer_parser import AnswerParser, ToolCall
from deskside.data.chat.messages import Conversation
from deskside.data.chat.renderer import Renderer
from deskside.data.chat.tool_formats import THINK, find_tool_format
from deskside.data.tokenizer import load as load_tokenizer
from deskside.utils.errors import UsageError
from deskside.utils.parsing import Unreadable, json_value

DEFAULT_TURNS = 4
MARK = "lastcallofthisturn"  # in the arguments of a call, to find the end of its turn in a rendered text
TURN_SEED = 64  # bits by which the number of a turn is shifted in a seed, so that each turn has its own random numbers


@dataclass
class _Transcript:
    """An answer that is being sampled. turn: the tokens of its last turn."""

    sampled: SampledAnswer
    turn: tuple[int, ...]
    calls: list[ToolCall] = field(default_factory=list)  # of the last turn


class ToolTurns:
    """Samples answers with tools.

    Args:
        folder: With the chat template and the tokenizer.
        ends: Ids of the end tokens.
        max_turns: Maximum number of turns that call tools.

    Raises UsageError if the template does not write calls, or not in a form that is known.
    """

    def __init__(self, tools: Tools, folder: Path, ends: frozenset[int], max_turns: int):
        self.tools, self.max_turns = tools, max_turns
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.renderer = Renderer(folder, load_tokenizer(folder))
        self.ends = [str(self.tokenizer.id_to_token(token)) for token in ends]
        self.format = find_tool_format(self.renderer.text)
        if self.format is None:
            raise UsageError(
                "align.tools: the model's chat template writes no tool calls, or in an unknown form; use another "
                "model, or --align.template FILE"
            )
        prompt = self.renderer.text(Conversation([{"role": "user", "content": MARK}]), True)
        self.thinks = prompt.rstrip().endswith(THINK)

    def sample(
        self,
        sampler: Sampler,
        prompts: Sequence[tuple[int, ...]],
        streams: Sequence[int],
        seed: int,
        temperature: float,
        tokens: int,
    ) -> list[SampledAnswer]:
        """Sample an answer of at most `tokens` tokens to each prompt, results included. See `Sampler.sample`."""
        first = sampler.sample(prompts, streams, seed, temperature, tokens)
        transcripts = [_Transcript(sampled, sampled.tokens) for sampled in first]
        open_ones = list(range(len(prompts)))
        for turn in range(1, self.max_turns + 1):
            open_ones = self._append_results(transcripts, open_ones, tokens)
            if not open_ones:
                break
            more = sampler.sample(
                [(*prompts[i], *transcripts[i].sampled.tokens) for i in open_ones],
                [streams[i] for i in open_ones],
                seed + (turn << TURN_SEED),
                temperature,
                [tokens - len(transcripts[i].sampled.tokens) for i in open_ones],
            )
            for i, sampled in zip(open_ones, more, strict=True):
                transcripts[i] = _Transcript(_joined(transcripts[i].sampled, sampled), sampled.tokens)
        return [transcript.sampled for transcript in transcripts]

    def _append_results(self, transcripts: list[_Transcript], open_ones: list[int], tokens: int) -> list[int]:
        """Run the calls of the last turns, and append the results. Return the indices of the answers that continue."""
        callers = []
        for i in open_ones:
            transcripts[i].calls = self.calls(transcripts[i].turn) if transcripts[i].sampled.ended else []
            if transcripts[i].calls:
                callers.append(i)
        results = iter(self.tools.run([call for i in callers for call in transcripts[i].calls]))
        going_on = []
        for i in callers:
            sampled, calls = transcripts[i].sampled, transcripts[i].calls
            found = [next(results) for _ in calls]
            ids = self.result_tokens(calls, found)
            transcripts[i].sampled = replace(
                sampled,
                tool_calls=sampled.tool_calls + len(calls),
                tool_failures=sampled.tool_failures + sum(result.failed for result in found),
            )
            if len(sampled.tokens) + len(ids) < tokens:
                answer = SampledAnswer(tuple(ids), (0.0,) * len(ids), True, (False,) * len(ids))
                transcripts[i].sampled = _joined(transcripts[i].sampled, answer)
                going_on.append(i)
        return going_on

    def calls(self, turn: Sequence[int]) -> list[ToolCall]:
        """Return the calls of a turn that has ended; none, as in TRL, if one is not complete.

        turn: with the end token.
        """
        text = self.tokenizer.decode(list(turn[:-1]), skip_special_tokens=False)
        parser = AnswerParser("must" if self.thinks else "may", self.format, list(self.tools.functions))
        calls = parser.parse(text).calls
        found = [calls[n] for n in sorted(calls)]
        return found if all(_is_object(call.arguments) for call in found) else []

    def result_tokens(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> list[int]:
        """Return the tokens that follow a turn with calls: their results, and the beginning of the next turn.

        They are cut out of a rendered conversation with calls of the same functions, after the end of their turn.
        Results cannot contain special tokens, as everything that the renderer gets. Raises UsageError if the template
        writes no end token after calls.
        """
        names = [call.name for call in calls]
        ids = [f"call{n:05d}" for n in range(len(calls))]  # Mistral's templates need nine letters or digits
        made: list[dict[str, Any]] = [
            {"id": i, "type": "function", "function": {"name": name, "arguments": {MARK: MARK}}}
            for i, name in zip(ids, names, strict=True)
        ]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": "", "tool_calls": made},
        ]
        for i, name, result in zip(ids, names, results, strict=True):
            messages.append({"role": "tool", "name": name, "tool_call_id": i, "content": result.text})
        marks = self.renderer.text(Conversation(messages[:2]), add_generation_prompt=False).count(MARK)
        text = self.renderer.text(Conversation(messages), add_generation_prompt=True)
        after_calls = 0  # after the last mark of the calls; a result may contain the same text
        for _ in range(marks):
            after_calls = text.index(MARK, after_calls) + len(MARK)
        ended = [at + len(end) for end in self.ends if (at := text.find(end, after_calls)) >= 0]
        if not ended:
            raise UsageError("align.tools: the model's chat template writes no end token after a tool call")
        return self.renderer.ids(text[min(ended) :])


def _is_object(text: str) -> bool:
    try:
        return isinstance(json_value(text), dict)
    except Unreadable:
        return False


def _joined(first: SampledAnswer, second: SampledAnswer) -> SampledAnswer:
    """Return the first answer with the tokens of the second appended; it has ended if the second has."""
    return replace(
        first,
        tokens=first.tokens + second.tokens,
        logprobs=first.logprobs + second.logprobs,
        own=first.is_own + second.is_own,
        ended=second.ended,
    )
