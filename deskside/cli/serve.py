"""`deskside serve`: a model behind OpenAI's API, and a page to chat with it."""

import importlib.util
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro

from deskside.cli.parser import MAY_BE_EMPTY, parse
from deskside.engine.device import Device, device_of, dtype_of, say
from deskside.engine.engine import PAGE_SIZE, Engine
from deskside.engine.kv_budget import cache_tokens
from deskside.utils.errors import RunError, UsageError
from deskside.weights.load import Loaded, load_model

TOKEN_VARIABLE = "DESKSIDE_TOKEN"
CACHE_TOKENS = 65536  # at most, where nobody says how many


@dataclass
class Serve:
    """Serve a model: OpenAI's API under /v1, and a page to chat in.

    Only this machine can reach it; another --host needs a --token.

    Nothing is encrypted: put TLS in front of it on a network you do not trust.

    Example: deskside serve runs/go

    Example: DESKSIDE_TOKEN=... deskside serve runs/go --host 0.0.0.0
    """

    model: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(metavar="RUN|HF_DIR", help="a run, or a Hugging Face directory"),
    ]
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """0 takes one that is free."""
    token: Annotated[str | None, MAY_BE_EMPTY] = None
    """Clients have to know it. Better given as DESKSIDE_TOKEN: other users see command lines."""
    name: str | None = None
    """What the model is called in the API. Default: the run's or the directory's name."""
    max_batch: int = 16
    """Answers that are written at once."""
    concurrency: int = 64
    """Answers that run or wait at once; a client beyond hears 429."""
    max_tokens: int = 4096
    """Tokens of one answer at most."""
    cache_tokens: int | None = None
    """Tokens of prompts and answers in memory. Default: max-batch full contexts, up to 65536 and what is free."""
    body_bytes: int = 1 << 20
    """Of a request at most."""
    connections: int = 256
    """Open at once."""
    device: Device = "auto"
    """auto: cuda where there is one."""


def run(argv: Sequence[str]) -> int:
    """The command. Returns 0 when it was stopped; raises UsageError and RunError."""
    options = parse(Serve, argv, "deskside serve")
    for name in ("max_batch", "concurrency", "max_tokens", "body_bytes", "connections", "cache_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise UsageError("serve needs fastapi and uvicorn: pip install 'deskside[serve]'")
    from deskside.serve.address import is_loopback
    from deskside.serve.guard import Limits
    from deskside.serve.server import ServerOptions, serve

    token = _token(options)
    local = is_loopback(options.host)
    if not local and token is None:
        raise UsageError(
            f"--host {options.host}: whoever reaches this address could use the model; set {TOKEN_VARIABLE}, "
            "which clients then give as their API key"
        )
    limits = Limits(body_bytes=options.body_bytes, connections=options.connections)
    listening = _bind(options.host, options.port)
    with listening:
        device = device_of(options.device)
        loaded = load_model(options.model, device, dtype_of(device), say)
        engine = _engine(loaded, options)
        # With a token a page under a false name learns nothing: it does not know it.
        hosts = frozenset({"localhost", "127.0.0.1", "::1", options.host.lower()}) if local else None
        serving = ServerOptions(
            options.host,
            options.name or loaded.name,
            options.max_batch,
            options.concurrency,
            options.max_tokens,
            hosts,
            token,
            limits,
        )
        serve(loaded, engine, serving, listening)
    return 0


def _token(options: Serve) -> str | None:
    given = options.token if options.token is not None else os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return None
    where = "--token" if options.token is not None else TOKEN_VARIABLE
    if not given or not given.isascii() or not given.isprintable() or " " in given:
        raise UsageError(f"{where}: must be one word of ASCII letters, digits and signs")
    return given


def _bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: clients are refused until the model is there. Raises UsageError."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port: {port} is no port; give 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise UsageError(
            f"--host: {host} is no address: {error}; leave it out for this machine alone"
        ) from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"{host}, port {port}: cannot be listened on: {error.strerror}; give another --port or --host"
        ) from None
    return bound


def _engine(loaded: Loaded, options: Serve) -> Engine:
    context = loaded.config.max_position_embeddings
    tokens = options.cache_tokens
    if tokens is None:
        wanted = min(options.max_batch * -(-context // PAGE_SIZE) * PAGE_SIZE, CACHE_TOKENS)
        tokens = cache_tokens(loaded.model, wanted, PAGE_SIZE)
        if tokens < wanted:
            say(
                f"the card has room for a cache of {tokens:,} tokens beside the model, in place of {wanted:,}"
            )
    try:
        return Engine(
            loaded.model, max_batch=options.max_batch, max_tokens=tokens, tokenizer=loaded.tokenizer
        )
    except torch.OutOfMemoryError:
        raise RunError(
            f"a cache of {tokens:,} tokens does not fit in memory beside the model; give fewer with --cache-tokens"
        ) from None
