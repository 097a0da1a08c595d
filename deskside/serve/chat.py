"""Chat in the terminal.

A chat model has a chat template next to its tokenizer, and each line that the user types becomes a message. A model
without one continues text: each line is appended to the text so far, and an empty line continues it as it is.

`ChatSession` is independent of the terminal; `converse` reads and prints its messages. The engine is kept between
messages unless it needs a larger KV cache, so usually only the new part of a prompt is computed.
"""

import contextlib
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from deskside.data.chat import messages
from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.requests import Reason, Request
from deskside.engine.sampling import Sampling
from deskside.serve.templating import PromptEncoder
from deskside.utils.console import say
from deskside.utils.errors import UsageError
from deskside.utils.signals import Interrupted
from deskside.weights.load import Loaded

HELP = """/reset       forget the conversation
/save FILE   write the conversation to a new file
/help        this list
/quit        leave (so does Ctrl-D; Ctrl-C stops an answer, twice leaves)"""
FIRST_CACHE = 2048  # KV cache size in tokens, doubled until the next answer fits; at most the model's context
PLAIN_NOTICE = (
    "This model has no chat template: it continues your text. An empty line continues without new text."
)


@dataclass(frozen=True)
class ChatOptions:
    """Options of a chat. seed: None picks a random one."""

    sampling: Sampling
    max_new_tokens: int
    seed: int | None
    system: str | None


class ChatSession:
    """The messages so far, or the text of a model without a chat template, and the generation of the next answer."""

    def __init__(self, loaded: Loaded, options: ChatOptions):
        self.loaded, self.options = loaded, options
        self._prompts = PromptEncoder(loaded)
        if options.system is not None and self.plain:
            raise UsageError(
                "--system: this model has no chat template, so it has no system message; leave it out"
            )
        self._seed = int.from_bytes(os.urandom(4)) if options.seed is None else options.seed
        # Why the last answer ended; None if it is running or was interrupted.
        self.reason: Reason | None = None
        self.truncated = False  # the last prompt left out the beginning of the conversation
        self._engine: Engine | None = None
        self._cache_tokens = 0  # size of the engine's KV cache
        self.reset()

    @property
    def plain(self) -> bool:
        """True if the model has no chat template and continues text."""
        return not self._prompts.has_chat_template

    def reset(self) -> None:
        """Delete the conversation except the system message."""
        self._answers = 0
        self._text = ""
        system = self.options.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def reply(self, user_text: str) -> Generator[str, None, None]:
        """Yield the answer to the user's text in pieces. The pieces that were read are added to the conversation."""
        if self.plain:
            text = self._text + (f"\n{user_text}" if self._text and user_text else user_text)
            prompt = self._text_prompt(text)
            self._text = text
        else:
            self._messages.append({"role": "user", "content": user_text})
            try:
                prompt = self._message_prompt()
            except UsageError:  # too long, or refused by the chat template
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
        """Yield the continuation of a prompt, in pieces of text."""
        options = self.options
        request = Request(
            tuple(prompt),
            options.max_new_tokens,
            options.sampling,
            self._seed + self._answers,
            eos_tokens=self.loaded.eos_tokens,
            continues_text=self.plain,
        )
        engine = self._engine_for(len(prompt) + options.max_new_tokens)
        number = engine.submit(request)
        try:
            for event in engine.events():
                self.reason = event.reason
                if event.text:
                    yield event.text
        except GeneratorExit:  # between two steps, so the engine can be used again
            self._engine = None  # in case another exception interrupts the lines below
            engine.cancel(number)
            for _ in engine.events():
                pass
            self._engine = engine
            raise
        except BaseException:  # Ctrl-C within a step leaves the engine in an undefined state
            self._engine = None
            raise

    def _engine_for(self, tokens: int) -> Engine:
        """Return the engine, or a new one with a larger, empty cache if it has no room for this many tokens."""
        limit = self.loaded.config.max_position_embeddings
        tokens = -(-min(tokens, limit) // PAGE_SIZE) * PAGE_SIZE
        if self._engine is None or tokens > self._cache_tokens:
            size = max(FIRST_CACHE, self._cache_tokens)
            while size < tokens:
                size *= 2
            self._engine = None  # frees its memory before the new one allocates
            self._cache_tokens = max(tokens, min(size, -(-limit // PAGE_SIZE) * PAGE_SIZE))
            self._engine = Engine(
                self.loaded.model, max_batch=1, max_tokens=self._cache_tokens, tokenizer=self.loaded.tokenizer
            )
        return self._engine

    def transcript(self) -> str:
        """Return the whole conversation as text."""
        if self.plain:
            return self._text + "\n"
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self._messages) + "\n"

    @property
    def _room(self) -> int:
        """Maximum prompt length in tokens that leaves room for an answer."""
        positions = self.loaded.config.max_position_embeddings
        return max(1, positions - min(self.options.max_new_tokens, positions // 2))

    def _text_prompt(self, text: str) -> list[int]:
        start, *tokens = self._prompts.text(text)
        self.truncated = len(tokens) + 1 > self._room
        newest = tokens[len(tokens) - self._room + 1 :] if self.truncated else tokens
        return [start, *newest]

    def _message_prompt(self) -> list[int]:
        """Return the prompt of the system message and the newest exchanges that fit.

        Raises UsageError if not even the last message fits, or the chat template refuses the messages.
        """
        kept = list(self._messages)
        first = 1 if kept[0]["role"] == "system" else 0
        self.truncated = False
        while len(tokens := self._prompts.conversation(messages.Conversation(kept))) > self._room:
            if len(kept) - first <= 1:
                raise UsageError(
                    f"the prompt has {len(tokens)} tokens, but only {self._room} fit beside an answer; "
                    "make the message shorter"
                )
            del kept[first : first + 2]
            self.truncated = True
        return tokens


def converse(loaded: Loaded, options: ChatOptions, prompt: str | None) -> int:
    """Answer `prompt`, or each line of standard input if it is None. Return the exit code.

    Raises UsageError for a message that cannot be answered, unless the user can type another one.
    """
    conversation = ChatSession(loaded, options)
    if prompt is not None:
        interrupted = _answer(conversation, prompt)
        return 130 if interrupted else 0
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):  # enables line editing in input(), if available
            import readline  # noqa: F401
        step = "" if loaded.step is None else f", step {loaded.step}"
        say(f"{loaded.name}{step}. /help lists the commands.")
    if conversation.plain:
        say(PLAIN_NOTICE)
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
            say("press Ctrl-C again to quit")
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
            say(str(error))  # the user can type another message


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _answer(conversation: ChatSession, user_text: str) -> bool:
    """Print the answer while it is generated. Return True if Ctrl-C interrupted it.

    Raises UsageError if the message is too long, or the chat template or tokenizer refuses it.
    """
    reply = conversation.reply(user_text)
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
    if conversation.truncated and sys.stdin.isatty():
        say("(the conversation exceeds the model's context length: its beginning was left out)")
    return stopped


def _command(conversation: ChatSession, line: str) -> bool:
    """Run a command that starts with a slash. Return False to quit."""
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name == "/quit":
        return False
    if name == "/reset":
        conversation.reset()
        say("(the conversation was reset)")
    elif name == "/save" and argument:
        try:
            with Path(argument).expanduser().open("x", encoding="utf-8") as file:
                file.write(conversation.transcript())
            say(f"saved to {argument}")
        except FileExistsError:
            say(f"{argument}: exists already; give a new name")
        except (
            OSError,
            ValueError,
            RuntimeError,
        ) as error:  # ValueError: a zero byte. RuntimeError: an unknown ~user
            reason = error.strerror if isinstance(error, OSError) else error
            say(f"{argument}: cannot be written: {reason}")
    elif name == "/save":
        say("/save needs a file name: /save FILE")
    elif name == "/help":
        say(HELP)
    else:
        say(f"{name}: there is no such command\n{HELP}")
    return True
