"""The server's application: OpenAI's routes on one Llama.

Request types are llama-cpp-python's (_serve_types.py). Its endpoints are not used: they answer wrong input with status 500, let a
new request break off a running stream, and go on computing for a client that left. Needs the extra `server`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import time

from . import bindings  # noqa: F401  before llama_cpp: it makes llama_cpp use our libraries

import jinja2
import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from llama_cpp.server import types
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import JSONResponse, Response

from ._serve_metrics import Metrics
from ._serve_queue import Gone, Queue, Refused, watch
from ._serve_types import CHAT, COMPLETION, ChatRequest, CompletionRequest, EmbeddingRequest, arguments
from ._version import __version__
from .errors import HobbitError

END = object()


def error(status: int, message: str, kind: str = "", code=None, headers=None) -> JSONResponse:
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": code}}, status, headers)


def context_code(message: str):
    return "context_length_exceeded" if "exceed context window" in message else None


def checked(function):
    """What the request is to blame for becomes status 400."""
    try:
        return function()
    except (ValueError, jinja2.TemplateError) as problem:
        raise HTTPException(400, str(problem)) from None


class EventStream(Response):
    """Server-sent events. stack is closed at the end, whatever happens: it holds the turn, and the generation."""

    media_type = "text/event-stream"

    def __init__(self, events, stack):
        self.events, self.stack = events, stack
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self.events:
                await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await asyncio.shield(self.stack.aclose())


class Limits:
    """ASGI middleware: bodies that are too large get 413, all answers are counted."""

    def __init__(self, app, max_body: int, metrics: Metrics):
        self.app, self.max_body, self.metrics = app, max_body, metrics

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        began, status, size = time.perf_counter(), 0, 0
        length = dict(scope["headers"]).get(b"content-length", b"")

        async def count_status(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def count_body():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise HTTPException(413, f"the request is larger than {self.max_body} bytes")
            return message

        try:
            if length.isdigit() and int(length) > self.max_body:
                await error(413, f"the request is larger than {self.max_body} bytes")(scope, receive, count_status)
            else:
                await self.app(scope, count_body, count_status)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - began)


def to_json(value) -> str:
    """llama_cpp's log probabilities are NumPy's."""
    return json.dumps(value, default=float)


class PlainJSON(JSONResponse):
    def render(self, content) -> bytes:
        return to_json(content).encode("utf-8")


class Service:
    """The routes' work. settings: ServeSettings."""

    def __init__(self, llm, settings):
        self.llm, self.settings = llm, settings
        self.names = settings.alias or [settings.model.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".gguf")]
        self.queue = Queue(llm, settings.max_queue)
        self.metrics = Metrics(llm, self.names[0], self.queue)
        self.keys = [key.encode("utf-8") for key in settings.api_key]
        self.created = int(time.time())
        self.counted = llm.last_generation

    def authenticate(self, request: Request):
        """A dependency of every route that uses the model."""
        if not self.keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
        if not any([secrets.compare_digest(given, key) for key in self.keys]):  # all: the time says nothing
            raise HTTPException(401, "the API key is missing or wrong", {"WWW-Authenticate": "Bearer"})

    def name_of(self, body) -> str:
        """The name to answer with. Names are compared, never opened."""
        if body.model is None:
            return self.names[0]
        if body.model not in self.names:
            raise HTTPException(404, f"the model {body.model[:200]!r} does not exist; this server has {', '.join(self.names)}")
        return body.model

    async def call(self, request: Request, function):
        """function() when it is this request's turn."""
        gone = watch(request.receive)
        try:
            async with self.queue.turn(gone) as call:
                try:
                    return await call(lambda: checked(function))
                finally:
                    self.count()
        finally:
            gone.cancel()

    def count(self) -> None:
        """At the end of a turn: what was generated in it."""
        last = self.llm.last_generation
        if last is not self.counted:
            self.counted = last
            self.metrics.count_tokens(last.report())

    async def generate(self, request: Request, body, create, allowed):
        name = self.name_of(body)

        def begin():
            return create(**arguments(body, allowed, self.llm, name, self.settings.max_tokens))

        if not body.stream:
            return PlainJSON(await self.call(request, begin))
        return await self.stream(request, body, begin)

    async def stream(self, request: Request, body, begin):
        """The first part is computed before anything is answered: what is wrong with a request gets a status of its own."""
        stack = contextlib.AsyncExitStack()
        try:
            gone = watch(request.receive)
            stack.callback(gone.cancel)
            call = await stack.enter_async_context(self.queue.turn(gone))
            stack.callback(self.count)
            parts = await call(lambda: checked(begin))
            stack.callback(parts.close)
            first = await call(lambda: checked(lambda: next(parts, END)))
        except BaseException:
            await asyncio.shield(stack.aclose())
            raise

        async def events():
            part = first
            try:
                while part is not END:
                    yield to_json(part)
                    last = part
                    part = await call(lambda: next(parts, END))
                if body.include_usage:
                    n_prompt, n_new = self.llm.last_generation.lengths
                    usage = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
                    yield to_json({**last, "choices": [], "usage": usage})
                yield "[DONE]"
            except Gone:
                self.metrics.gone.inc()
            except (HobbitError, Refused) as problem:
                yield to_json({"error": {"message": str(problem), "type": "server_error", "param": None, "code": None}})

        return EventStream(events(), stack)

    def embed(self, body: EmbeddingRequest) -> dict:
        result = self.llm.create_embedding(body.input, model=self.name_of(body))
        if body.encoding_format == "base64":
            for item in result["data"]:
                item["embedding"] = base64.b64encode(np.asarray(item["embedding"], "<f4").tobytes()).decode()
        return result


def create_app(llm, settings) -> FastAPI:
    """llm: a loaded Llama; settings: ServeSettings. The lifespan's end does not close llm."""
    service = Service(llm, settings)

    @contextlib.asynccontextmanager
    async def lifespan(app):
        service.queue.start()
        yield

    app = FastAPI(title="hobbit-cpp", version=__version__, root_path=settings.root_path, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Limits, max_body=settings.max_body, metrics=service.metrics)
    if settings.cors_origin:
        app.add_middleware(CORSMiddleware, allow_origins=settings.cors_origin, allow_methods=["*"], allow_headers=["*"])
    _add_errors(app, service)
    _add_routes(app, service)
    return app


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request, problem):
        first = problem.errors()[0]
        where = ".".join(str(x) for x in first["loc"] if x != "body")
        what = first["msg"].removeprefix("Value error, ")
        if not where and not request.headers.get("content-type", "").startswith("application/json"):
            what += " (its content-type must be application/json)"
        return error(400, f"{where}: {what}" if where and first["type"] != "json_invalid" else f"the body is not valid: {what}")

    @app.exception_handler(StarletteHTTPException)  # of which FastAPI's is one
    async def refused(request, problem):
        code = context_code(str(problem.detail)) or {401: "invalid_api_key", 404: "model_not_found" if "model" in str(problem.detail) else None}.get(problem.status_code)
        return error(problem.status_code, str(problem.detail), code=code, headers=problem.headers)

    @app.exception_handler(Refused)
    async def full(request, problem):
        return error(503, str(problem), code="overloaded", headers={"Retry-After": "5"})

    @app.exception_handler(Gone)
    async def gone(request, problem):
        service.metrics.gone.inc()
        return Response(status_code=499)

    @app.exception_handler(HobbitError)
    async def failed(request, problem):
        return error(500, str(problem))

    @app.exception_handler(Exception)
    async def broken(request, problem):  # which is logged
        return error(500, "something is wrong in the server; its log has more")


def _add_routes(app: FastAPI, service: Service) -> None:
    llm, protected = service.llm, [Depends(service.authenticate)]

    @app.get("/health")
    async def health():
        state = "stopping" if service.queue.stopping else "ok"
        return JSONResponse({"status": state, "model": service.names[0], "waiting": service.queue.waiting, "running": service.queue.running},
                            200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics():
        text = await run_in_threadpool(service.metrics.text)  # may wait for a lock of the engine's
        return Response(text, media_type=service.metrics.content_type)

    @app.get("/v1/models", dependencies=protected)
    async def models():
        return {"object": "list", "data": [_model(name) for name in service.names]}

    @app.get("/v1/models/{name:path}", dependencies=protected)
    async def model(name: str):
        if name not in service.names:
            raise HTTPException(404, f"the model {name[:200]!r} does not exist; this server has {', '.join(service.names)}")
        return _model(name)

    def _model(name):
        return {"id": name, "object": "model", "created": service.created, "owned_by": "hobbit-cpp"}

    @app.post("/v1/completions", dependencies=protected)
    async def completions(request: Request, body: CompletionRequest):
        return await service.generate(request, body, llm.create_completion, COMPLETION)

    @app.post("/v1/chat/completions", dependencies=protected)
    async def chat(request: Request, body: ChatRequest):
        if not llm.chat_handler and service.settings.chat_format is None and "tokenizer.chat_template" not in llm.metadata:
            raise HTTPException(400, "this model has no chat template: use /v1/completions, or start the server with --chat-format")
        return await service.generate(request, body, llm.create_chat_completion, CHAT)

    @app.post("/v1/embeddings", dependencies=protected)
    async def embeddings(request: Request, body: EmbeddingRequest):
        if not service.settings.embedding:
            raise HTTPException(400, "this server gives no embeddings: start it with --embedding")
        service.name_of(body)
        return JSONResponse(await service.call(request, lambda: service.embed(body)))

    @app.post("/extras/tokenize", dependencies=protected)
    async def tokenize(body: types.TokenizeInputRequest):
        service.name_of(body)
        return {"tokens": await run_in_threadpool(llm.tokenize, body.input.encode("utf-8"), special=True)}

    @app.post("/extras/tokenize/count", dependencies=protected)
    async def count(body: types.TokenizeInputRequest):
        service.name_of(body)
        return {"count": len(await run_in_threadpool(llm.tokenize, body.input.encode("utf-8"), special=True))}

    @app.post("/extras/detokenize", dependencies=protected)
    async def detokenize(body: types.DetokenizeInputRequest):
        service.name_of(body)
        try:
            return {"text": (await run_in_threadpool(llm.detokenize, body.tokens)).decode("utf-8", "replace")}
        except ValueError as problem:
            raise HTTPException(400, str(problem)) from None
