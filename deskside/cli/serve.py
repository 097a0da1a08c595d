"""`deskside serve`: an HTTP server with the OpenAI API and a chat page."""

import importlib.util
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deskside.cli.options import Command, option
from deskside.cli.shared_options import QUANTIZE_HELP, ModelOption, Quantize, addresses, is_loopback
from deskside.config.sections import Device
from deskside.utils.console import say
from deskside.utils.errors import RunError, UsageError
from deskside.utils.quick_start import quick_imports

if TYPE_CHECKING:
    from deskside.engine.engine import Engine
    from deskside.precision.row_adapters import RowChoice
    from deskside.weights.load import Loaded
    from deskside.weights.peft_adapters import PeftAdapters

KEY_VARIABLE = "DESKSIDE_API_KEY"
CACHE_TOKENS = 65536  # maximum of the default of --cache-tokens


@dataclass(kw_only=True)
class ServeOptions(ModelOption):
    """Serve a model with the OpenAI API under /v1 and a chat page.

    By default, only this machine can reach the server. A --host that others can reach needs an --api-key.

    docs/serve.md lists the endpoints and fields of the API. After SIGTERM or Ctrl-C, running answers finish and new
    ones get HTTP 503; a second one stops at once.

    Connections are not encrypted. In a network that you do not trust, put a TLS proxy in front of the server.

    Examples:
      deskside serve runs/go
      deskside serve models/Qwen3-0.6B --adapter polite=adapters/polite short=adapters/short
      DESKSIDE_API_KEY=... deskside serve runs/go --host 0.0.0.0
    """

    host: str = option("address to listen on", "127.0.0.1")
    port: int = option("port; 0 picks a free one", 8000)
    api_key: str | None = option(
        f"key that clients must send, or several with commas; safer in {KEY_VARIABLE}, because other users can see "
        "command lines",
        None,
        may_be_empty=True,
    )
    adapter: tuple[str, ...] = option(
        "PEFT adapters of the model, served beside it under names of their own", (), metavar="NAME=DIR"
    )
    name: str | None = option("model name in the API; default: the name of the run or directory", None)
    max_batch: int = option("maximum batch size", 16)
    concurrency: int | None = option(
        "maximum running and queued answers; further requests get HTTP 429; default: 4 times --max-batch",
        None,
    )
    max_tokens: int = option("maximum tokens per answer", 4096)
    cache_tokens: int | None = option(
        "KV cache size in tokens; default: --max-batch full contexts, at most 65536 and what fits into memory",
        None,
    )
    body_bytes: int = option("maximum size of a request body", 1 << 20)
    connections: int = option("maximum open connections", 256)
    drain_seconds: float = option("time that running answers get to finish when the server is stopped", 60.0)
    device: Device = option("auto uses cuda if it is available", "auto")
    quantize: Quantize = option(QUANTIZE_HELP, "none")


COMMAND = Command("serve", ServeOptions)


def run(argv: Sequence[str]) -> int:
    """Run `deskside serve` until it is stopped; returns 0. Raises UsageError and RunError."""
    options = COMMAND.parse(argv)
    for name in ("max_batch", "concurrency", "max_tokens", "body_bytes", "connections", "cache_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if not 0 <= options.drain_seconds < math.inf:
        raise UsageError(f"--drain-seconds {options.drain_seconds:g}: give 0 or more seconds")
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client")):
        raise UsageError(
            "serve needs starlette, uvicorn and prometheus-client: pip install 'deskside[serve]'"
        )
    with quick_imports():
        from deskside.engine.device import select_device, select_dtype
        from deskside.serve.request_guard import ClientLimits
        from deskside.serve.server import ServerOptions, serve
        from deskside.weights.load import load_for_generation
        from deskside.weights.served_adapters import attach_by_row

    keys = _api_keys(options)
    local = is_loopback(options.host)
    if not local and not keys:
        raise UsageError(
            f"--host {options.host}: anyone who can reach this address could use the model; set {KEY_VARIABLE} to "
            "a key for your clients"
        )
    adapters = _adapters(options)
    limits = ClientLimits(body_bytes=options.body_bytes, connections=options.connections)
    listening = _bind(options.host, options.port)
    with listening:
        device = select_device(options.device)
        loaded = load_for_generation(
            options.source, device, select_dtype(device), options.quantize, say, options.base, options.weights
        )
        name = options.name or loaded.name
        if name in adapters:
            raise UsageError(f"--adapter {name}: is the name of the model; give one of them another name")
        choice = attach_by_row(loaded.model, list(adapters.values())) if adapters else None
        engine = _engine(loaded, options, choice)
        # Against DNS rebinding, where a web page makes its own host name resolve to 127.0.0.1. On other hosts, the
        # key protects the server.
        hosts = frozenset({"localhost", "127.0.0.1", "::1", options.host.lower()}) if local else None
        serving = ServerOptions(
            options.host,
            name,
            options.max_batch,
            options.concurrency or 4 * options.max_batch,
            options.max_tokens,
            hosts,
            keys,
            limits,
            options.drain_seconds,
            tuple(adapters),
        )
        serve(loaded, engine, serving, listening)
    return 0


def _adapters(options: ServeOptions) -> "dict[str, PeftAdapters]":
    """Return the adapters of --adapter by name. Raises UsageError and RunError."""
    from deskside.utils import hub
    from deskside.weights.peft_adapters import read_peft

    adapters: dict[str, PeftAdapters] = {}
    for given in options.adapter:
        name, _, folder = given.partition("=")
        if not (name and folder):
            raise UsageError(f"--adapter {given}: write NAME=DIR, such as polite=adapters/polite")
        if name in adapters:
            raise UsageError(f"--adapter {given}: there are two adapters with this name; rename one of them")
        try:
            adapters[name] = read_peft(hub.find(folder).folder)
        except UsageError as error:
            raise UsageError(f"--adapter {given}: {error}") from None
    return adapters


def _api_keys(options: ServeOptions) -> tuple[str, ...]:
    """Return the keys of --api-key or the environment; none if neither is given. Raises UsageError."""
    given, source = options.api_key, "--api-key"
    if given is None:
        given, source = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
    if given is None:
        return ()
    keys = tuple(key.strip() for key in given.split(","))
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UsageError(f"{source}: every key must be one word of printable ASCII characters")
    return keys


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that clients are refused until the model is loaded."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port: {port} is not a port; give 0 to 65535")
    family, kind, protocol, _, address = addresses(host, port)[0]
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"{host}, port {port}: cannot listen: {error.strerror}; give another --port or --host"
        ) from None
    return bound


def _engine(loaded: "Loaded", options: ServeOptions, adapters: "RowChoice | None" = None) -> "Engine":
    """Return the inference engine with its KV cache. Raises RunError if the cache does not fit into memory."""
    import torch

    from deskside.engine.device import cache_tokens
    from deskside.engine.engine import PAGE_SIZE, Engine

    tokens = options.cache_tokens
    if tokens is None:
        context = math.ceil(loaded.config.max_position_embeddings / PAGE_SIZE) * PAGE_SIZE
        desired = min(options.max_batch * context, CACHE_TOKENS)
        tokens = cache_tokens(loaded.model, desired, PAGE_SIZE)
        if tokens < desired:
            say(f"KV cache: {tokens:,} tokens fit into GPU memory with the model, instead of {desired:,}")
    try:
        return Engine(
            loaded.model,
            max_batch=options.max_batch,
            max_tokens=tokens,
            tokenizer=loaded.tokenizer,
            adapters=adapters,
        )
    except torch.OutOfMemoryError:
        raise RunError(
            f"a KV cache of {tokens:,} tokens does not fit into memory with the model; set fewer with --cache-tokens"
        ) from None
