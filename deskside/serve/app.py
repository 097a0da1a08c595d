"""HTTP routes: the OpenAI API under /v1, vLLM's /tokenize, /detokenize and /version, /health, /metrics, /openapi.json,
and the chat page.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deskside import __version__
from deskside.serve.embeddings import EmbeddingRequest
from deskside.serve.handler import RequestHandler
from deskside.serve.metrics import CONTENT_TYPE
from deskside.serve.openapi import openapi_document
from deskside.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse_request
from deskside.serve.responses_request import ResponsesRequest, renamed
from deskside.serve.responses_writer import writer_of
from deskside.serve.service import HEADERS, Service
from deskside.serve.token_routes import TokenRoutes
from deskside.serve.web_files import WEB_PREFIX, WebFiles


def make_app(service: Service) -> Starlette:
    """Return the ASGI application."""
    handler, tokens, web = RequestHandler(service), TokenRoutes(service), WebFiles()
    vocab_size = service.loaded.config.vocab_size
    api = openapi_document(service.max_choices, service.max_tokens, vocab_size, handler.prompts.roles)

    async def health(request: Request) -> Response:
        status = "draining" if service.admission.draining else "ok"
        if service.worker.failed is not None:
            status = "failed"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503, HEADERS)

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__}, headers=HEADERS)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), headers={**HEADERS, "content-type": CONTENT_TYPE})

    async def openapi(request: Request) -> Response:
        return JSONResponse(api, headers=HEADERS)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(handler.cards.values())}, headers=HEADERS)

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_model(name)
        return JSONResponse(handler.cards[name], headers=HEADERS)

    async def chat(request: Request) -> Response:
        return await handler.answer(parse_request(ChatRequest, await request.body()), request)

    async def complete(request: Request) -> Response:
        return await handler.answer(parse_request(CompletionRequest, await request.body()), request)

    async def respond(request: Request) -> Response:
        body = parse_request(ResponsesRequest, await request.body())
        try:
            return await handler.answer(body.chat(), request, writer_of(body))
        except ApiError as error:
            raise renamed(error) from None

    async def embed(request: Request) -> Response:
        return await handler.embed(parse_request(EmbeddingRequest, await request.body()), request)

    # The routes that clients call most come first.
    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/responses", respond, methods=["POST"]),
        Route("/v1/embeddings", embed, methods=["POST"]),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/", web.page),
        Route(WEB_PREFIX + "{path:path}", web.file),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/openapi.json", openapi),
    ]
    handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error}
    app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    app.router.redirect_slashes = False
    return app


async def _api_error(request: Request, error: ApiError) -> Response:
    headers = dict(HEADERS)
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JSONResponse(error.body, error.status, headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = ApiError(error.status_code, f"{request.method} {request.url.path[:80]}: {error.detail}")
    return JSONResponse(message.body, error.status_code, {**HEADERS, **(error.headers or {})})


async def _internal_error(request: Request, error: Exception) -> Response:
    message = ApiError(500, "internal error; see the server's log")
    return JSONResponse(message.body, 500, HEADERS)
