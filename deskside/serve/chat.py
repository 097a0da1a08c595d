"""Chat in the terminal.

A chat model has a chat template beside its tokenizer; what is typed then becomes messages. A model without one only
continues text: what is typed is added to the text so far, on a new line, and an empty line continues it.

`Conversation` holds what was said and knows no terminal; `converse` is the terminal around it. One engine lives as long
as the conversation, so of each prompt only what is new since the last one is computed.
"""

import contextlib
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.requests import Reason, Request
from deskside.engine.sampling import Sampling
from deskside.serve.templating import Prompts
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.signals import Interrupted
from deskside.weights.load import Loaded

HELP = """/reset       forget the conversation
/save FILE   write the conversation to a new file
/help        this list
/quit        leave (so does Ctrl-D; Ctrl-C stops an answer, twice leaves)"""
FIRST_CACHE = 2048  # tokens; doubled whenever a conversation outgrows it
PLAIN = "This model has no chat template: it continues your text. An empty line lets it go on."


@dataclass(frozen=True)
class ChatOptions:
    """Options of a chat. A seed of None is replaced by a new one each time."""

    sampling: Sampling
    max_new_tokens: int
    seed: int | None
    system: str | None


class Conversation:
    """A conversation and its next answer."""

    def __init__(self, loaded: Loaded, options: ChatOptions):
        self.loaded, self.options = loaded, options
        self._prompts = Prompts(loaded)
        if options.system is not None and self.plain:
            raise UsageError(
                "--system: this model has no chat template, so it has no system message; leave it out"
            )
        self._seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
        self.reason: Reason | None = None  # why the last answer ended; None while it runs or was stopped
        self.forgotten = False  # whether the last answer could not see the beginning
        self._engine: Engine | None = None
        self._holds = 0  # tokens that the engine's cache has room for
        self.reset()

    @property
    def plain(self) -> bool:
        """True if the model has no chat template and continues text."""
        return not self._prompts.chats

    def reset(self) -> None:
        """Delete the conversation except the system message."""
        self._answers = 0
        self._text = ""
        system = self.options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def reply(self, said: str) -> Generator[str, None, None]:
        """Yield the answer in whole characters. Only what was read becomes part of the conversation."""
        if self.plain:
            self._text += f"\n{said}" if self._text and said else said
            prompt = self._text_prompt()
        else:
            self._messages.append({"role": "user", "content": said})
            try:
                prompt = self._message_prompt()
            except UsageError:  # as if it had not been said
                self._messages.pop()
                raise
        self.reason = None
        pieces: list[str] = []
        self._answers += 1
        try:
            with contextlib.closing(self._generate(prompt)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    yield piece
        finally:
            if self.plain:
                self._text += "".join(pieces)
            else:
                self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _generate(self, prompt: list[int]) -> Generator[str, None, None]:
        """Continue a prompt. The part of it that is in the cache is not computed again."""
        options = self.options
        request = Request(
            tuple(prompt),
            options.max_new_tokens,
            options.sampling,
            self._seed + self._answers,
            eos_tokens=self.loaded.eos_tokens,
        )
        engine = self._engine_for(len(prompt) + options.max_new_tokens)
        number = engine.submit(request)
        try:
            for event in engine.events():
                self.reason = event.reason
                if event.text:
                    yield event.text
        except GeneratorExit:  # between two steps: the engine is sound
            self._engine = None  # until it is at rest
            engine.cancel(number)
            for _ in engine.events():
                pass
            self._engine = engine
            raise
        except BaseException:  # Ctrl-C in the middle of a step, which may have left anything behind
            self._engine = None
            raise

    def _engine_for(self, tokens: int) -> Engine:
        """Return an engine with room for this many tokens. A larger one starts with an empty cache."""
        limit = self.loaded.config.max_position_embeddings
        tokens = -(-min(tokens, limit) // PAGE_SIZE) * PAGE_SIZE
        if self._engine is None or tokens > self._holds:
            size = max(FIRST_CACHE, self._holds)
            while size < tokens:
                size *= 2
            self._engine = None  # gives its memory back before the new one takes more
            self._holds = max(tokens, min(size, -(-limit // PAGE_SIZE) * PAGE_SIZE))
            self._engine = Engine(
                self.loaded.model, max_batch=1, max_tokens=self._holds, tokenizer=self.loaded.tokenizer
            )
        return self._engine

    def transcript(self) -> str:
        """Return the whole conversation as text."""
        if self.plain:
            return self._text + "\n"
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self._messages) + "\n"

    @property
    def _room(self) -> int:
        """Maximum tokens of a prompt that leave room for an answer."""
        positions = self.loaded.config.max_position_embeddings
        return max(1, positions - min(self.options.max_new_tokens, positions // 2))

    def _text_prompt(self) -> list[int]:
        start, *tokens = self._prompts.text(self._text)
        self.forgotten = len(tokens) + 1 > self._room
        newest = tokens[len(tokens) - self._room + 1 :] if self.forgotten else tokens
        return [start, *newest]

    def _message_prompt(self) -> list[int]:
        """Return the newest exchanges that fit, and the system message."""
        kept = list(self._messages)
        first = 1 if kept[0]["role"] == "system" else 0
        self.forgotten = False
        while len(tokens := self._prompts.messages(kept)) > self._room:
            if len(kept) - first <= 1:
                raise UsageError(
                    f"this message is {len(tokens)} tokens and the model sees {self._room}; make it shorter"
                )
            del kept[first : first + 2]
            self.forgotten = True
        return tokens


def converse(loaded: Loaded, options: ChatOptions, prompt: str | None) -> int:
    """Answer `prompt`, or hold a conversation over standard input. Returns the exit code.

    Raises UsageError for a message that cannot be answered, unless a person can write another one.
    """
    conversation = Conversation(loaded, options)
    if prompt is not None:
        interrupted = _answer(conversation, prompt)
        return 130 if interrupted else 0
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # line editing, where Python has it
            import readline  # noqa: F401
        at = "" if loaded.step is None else f", step {loaded.step}"
        say(f"{loaded.name}{at}. /help lists the commands.")
    if conversation.plain:
        say(PLAIN)
    interrupted = False
    while True:
        try:
            line = input("> ") if terminal else _next_line()
        except EOFError:
            if terminal:
                print()
            return 0
        except Interrupted:
            raise
        except KeyboardInterrupt:
            print()
            if interrupted or not terminal:
                return 0
            interrupted = True
            say("Ctrl-C again leaves.")
            continue
        interrupted = False
        if line.startswith("/"):
            if not _command(conversation, line):
                return 0
            continue
        try:
            interrupted = _answer(conversation, line)
        except UsageError as error:
            if not terminal:
                raise
            say(str(error))  # a person can write another message


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _answer(conversation: Conversation, said: str) -> bool:
    """Print the answer while it is generated. Returns whether Ctrl-C stopped it. Raises UsageError as the template."""
    reply = conversation.reply(said)
    stopped = False
    try:
        for piece in reply:
            sys.stdout.write(piece)
            sys.stdout.flush()
    except Interrupted:
        raise
    except KeyboardInterrupt:
        stopped = True
    finally:
        reply.close()
    print(flush=True)
    if stopped:
        say("(stopped)")
    elif conversation.reason == "length" and sys.stdin.isatty():
        say(f"(stopped after {conversation.options.max_new_tokens} tokens or at the model's last position)")
    if conversation.forgotten and sys.stdin.isatty():
        say("(the conversation is longer than the model can see: its beginning was left out)")
    return stopped


def _command(conversation: Conversation, line: str) -> bool:
    """Run a /command. Returns False to quit."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name == "/quit":
        return False
    if name == "/reset":
        conversation.reset()
        say("(forgotten)")
    elif name == "/save" and rest:
        try:
            with Path(rest).expanduser().open("x", encoding="utf-8") as file:
                file.write(conversation.transcript())
            say(f"saved to {rest}")
        except FileExistsError:
            say(f"{rest}: is there already; give a new name")
        except (OSError, ValueError, RuntimeError) as error:  # a zero byte, an unknown ~user
            reason = error.strerror if isinstance(error, OSError) else error
            say(f"{rest}: cannot be written: {reason}")
    elif name == "/save":
        say("/save FILE: which file?")
    elif name == "/help":
        say(HELP)
    else:
        say(f"{name}: there is no such command\n{HELP}")
    return True
