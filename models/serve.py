"""Serving over HTTP: `python -m models.serve`, on this machine only.

    POST /v1/completions    OpenAI's fields: prompt, max_tokens, temperature, top_p, n, stop, seed,
                            stream, logprobs (0), echo; and top_k. An unknown one is an error.
    GET  /v1/models         the one model
    GET  /metrics           numbers for Prometheus
    GET  /health            200 while the engine lives

Errors are JSON, `{"error": {"message", "type", "param", "code"}}`: 400 for what is wrong with a
request, 408 and 413 for a body that comes too slowly or is too large, 429 with Retry-After when the
queue is full, 503 when the engine has failed. A client that hangs up ends its request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from models.checkpoint import load_model
from models.data import CharTokenizer
from models.engine import Completion, Engine, EngineConfig, Output, QueueFullError, SamplingParams
from models.generate import newest_run
from models.metrics import prometheus
from models.worker import Subscription, Worker, WorkerDeadError

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(
        f"serving needs the extra 'serve' ({error}): pip install 'jax-flash[serve]'"
    ) from error

HOST = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request may ask for.

    Attributes:
        body_bytes: size of its body.
        body_s: seconds in which the body must have come.
        prompt_tokens: length of its prompt.
        max_tokens: tokens to draw for one text.
        n: texts.
        stops: stop strings.
        stop_chars: length of each.
    """

    body_bytes: int = 1 << 20
    body_s: float = 30.0
    prompt_tokens: int = 1 << 16
    max_tokens: int = 4096
    n: int = 8
    stops: int = 4
    stop_chars: int = 64


class RequestError(Exception):
    """What is wrong with a request: a status, a message, and which field it is about."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


@dataclasses.dataclass(frozen=True)
class Job:
    """A request in the engine's terms."""

    tokens: list[int]
    params: SamplingParams
    prompt_text: str  # to echo, else ""
    stream: bool
    logprobs: bool


def parse(fields: Any, tokenizer: CharTokenizer, limits: Limits, model: str) -> Job:
    """Checks the JSON of a completion request.

    Raises:
        RequestError: 400, with the field's name.
    """
    if not isinstance(fields, dict):
        raise RequestError(400, "the body must be a JSON object")
    read = _Reader(dict(fields))
    if read("model", str, model) != model:
        raise RequestError(400, f"this server has the model {model!r} only", "model")
    read("user", str, "")
    tokens = _prompt_tokens(read("prompt", (str, list), ""), tokenizer, limits)
    stop = read("stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > limits.stops or not all(
        isinstance(one, str) and 0 < len(one) <= limits.stop_chars for one in stop
    ):
        rule = f"at most {limits.stops} strings of 1 to {limits.stop_chars} characters"
        raise RequestError(400, f"stop must be {rule}", "stop")
    logprobs = read("logprobs", int, None)
    if logprobs not in (None, 0):
        raise RequestError(400, "logprobs must be null or 0: only the token's own", "logprobs")
    max_tokens = read("max_tokens", int, 16, 1, limits.max_tokens)
    n = read("n", int, 1, 1, limits.n)
    stream, echo = read("stream", bool, False), read("echo", bool, False)
    settings = {
        "temperature": read("temperature", (int, float), 1.0),
        "top_p": read("top_p", (int, float), 1.0),
        "top_k": read("top_k", int, 0),
        "seed": read("seed", int, None),
    }
    if read.fields:
        name = min(read.fields)
        raise RequestError(400, f"the field {name!r} is not supported", name)
    if settings["seed"] is None:
        settings["seed"] = uuid.uuid4().int % 2**32
    try:
        params = SamplingParams(max_tokens, stop=tuple(stop), n=n, **settings)
    except (ValueError, TypeError) as error:
        raise RequestError(400, str(error), str(error).split()[0]) from error
    text = tokenizer.decode(tokens) if echo else ""
    return Job(tokens, params, text, stream, logprobs is not None)


class _Reader:
    """Takes fields out of a JSON object one by one; null counts as absent."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.fields = fields

    def __call__(
        self, name: str, kinds: Any, default: Any, low: float | None = None, high: float = 0
    ) -> Any:
        value = self.fields.pop(name, None)
        if value is None:
            return default
        is_bool = isinstance(value, bool)
        if not isinstance(value, kinds) or is_bool != (kinds is bool):
            names = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
            raise RequestError(400, f"{name} must be {' or '.join(names)}, got {value!r:.80}", name)
        if low is not None and not low <= value <= high:
            raise RequestError(400, f"{name} must be in [{low}, {high}], got {value}", name)
        return value


def _prompt_tokens(prompt: str | list[Any], tokenizer: CharTokenizer, limits: Limits) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if len(prompt) > limits.prompt_tokens:
        message = f"the prompt must have at most {limits.prompt_tokens} tokens"
        raise RequestError(400, message, "prompt")
    try:
        if isinstance(prompt, str):
            return tokenizer.encode(prompt).tolist() or [tokenizer.start_token]
        if not prompt or not all(type(token) is int for token in prompt):
            raise ValueError("prompt must be one string, or a list of token ids")
        return tokenizer.check(prompt)
    except ValueError as error:
        raise RequestError(400, str(error), "prompt") from error


async def read_json(request: Request, limits: Limits) -> Any:
    """The body as JSON, of bounded size and in bounded time.

    Raises:
        RequestError: 400, 408 or 413.
    """
    too_large = RequestError(413, f"the body must have at most {limits.body_bytes} bytes")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_large
    except ClientDisconnect as error:
        raise RequestError(400, "the body ended early") from error
    except TimeoutError as error:
        raise RequestError(408, f"the body took more than {limits.body_s:g} s") from error
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error


class Server:
    """The endpoints of one engine.

    Args:
        engine: with a tokenizer; this server's worker drives it.
        tokenizer: of the model.
        name: what the model is called.
        limits: what one request may ask for.
    """

    def __init__(
        self, engine: Engine, tokenizer: CharTokenizer, name: str, limits: Limits | None = None
    ) -> None:
        self.tokenizer, self.name, self.limits = tokenizer, name, limits or Limits()
        self.worker = Worker(engine)
        self.created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application; it runs the worker between startup and shutdown."""

        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            await self.worker.ready()
            yield
            await asyncio.to_thread(self.worker.stop)

        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
            ],
            # A page of another site must not reach this server through a name that it made up.
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", HOST])],
            exception_handlers={
                RequestError: _answer(lambda error: error.status),
                HTTPException: _answer(lambda error: error.status_code),
                QueueFullError: _answer(lambda error: 429),
                WorkerDeadError: _answer(lambda error: 503),
            },
            lifespan=lifespan,
        )

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "local"}
        return JSONResponse({"object": "list", "data": [model]})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return PlainTextResponse(prometheus(await self.worker.snapshot()))

    async def health(self, request: Request) -> Response:
        """GET /health."""
        await self.worker.ready()
        return JSONResponse({"status": "ok"})

    async def completions(self, request: Request) -> Any:
        """POST /v1/completions."""
        job = parse(await read_json(request, self.limits), self.tokenizer, self.limits, self.name)
        subscription = Subscription()
        watch = asyncio.create_task(_leave_with_client(request, subscription))

        def close() -> None:
            watch.cancel()
            self.worker.cancel(subscription)

        try:
            await self.worker.submit(subscription, job.tokens, job.params)
        except BaseException as error:
            close()
            if isinstance(error, ValueError):
                raise RequestError(400, str(error)) from error
            raise
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        outputs = _outputs(subscription, job)
        if job.stream:
            return _EventStream(self._events(head, job, outputs), close)
        try:
            return JSONResponse(await self._whole(head, job, outputs))
        finally:
            close()

    async def _whole(
        self, head: dict[str, Any], job: Job, outputs: AsyncIterator[Output]
    ) -> dict[str, Any]:
        texts = [Completion() for _ in range(job.params.n)]
        async for output in outputs:
            texts[output.choice].add(output)
        if any(text.finish_reason == "error" for text in texts):
            raise HTTPException(500, "the model's logits are not finite")
        choices = [
            {
                "index": index,
                "text": job.prompt_text + text.text,
                "logprobs": self._logprobs(text.tokens, text.logprobs) if job.logprobs else None,
                "finish_reason": text.finish_reason,
            }
            for index, text in enumerate(texts)
        ]
        drawn = sum(len(text.tokens) for text in texts)
        usage = {
            "prompt_tokens": len(job.tokens),
            "completion_tokens": drawn,
            "total_tokens": len(job.tokens) + drawn,
        }
        return {**head, "choices": choices, "usage": usage}

    async def _events(
        self, head: dict[str, Any], job: Job, outputs: AsyncIterator[Output]
    ) -> AsyncGenerator[str]:
        def event(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> str:
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
            return json.dumps({**head, "choices": [choice]})

        if job.prompt_text:
            for index in range(job.params.n):
                yield event(index, job.prompt_text)
        try:
            async for output in outputs:
                if output.finish_reason == "error":
                    yield json.dumps(_error(500, "the model's logits are not finite", None))
                    return
                logprobs = None
                if job.logprobs:
                    logprobs = self._logprobs([output.token], [output.logprob])
                if output.text or output.finish_reason or logprobs:
                    yield event(output.choice, output.text, logprobs, output.finish_reason)
        except WorkerDeadError as error:
            yield json.dumps(_error(503, str(error), None))
            return
        yield "[DONE]"

    def _logprobs(self, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
        pieces = [self.tokenizer.decode([token]) for token in tokens]
        return {"tokens": pieces, "token_logprobs": logprobs, "top_logprobs": None}


async def _outputs(subscription: Subscription, job: Job) -> AsyncIterator[Output]:
    """The request's outputs until its last text has ended, or the client has gone."""
    left = job.params.n
    while left and (output := await subscription.next()) is not None:
        left -= output.finish_reason is not None
        yield output


async def _leave_with_client(request: Request, subscription: Subscription) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    subscription.leave()


class _EventStream:
    """A response of server-sent events, which closes what it came from however it ends."""

    def __init__(self, events: AsyncGenerator[str], close: Callable[[], None]) -> None:
        self._events, self._close = events, close

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    body = f"data: {event}\n\n".encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except OSError:  # the client has gone
            return
        finally:
            self._close()


def _error(status: int, message: str, param: str | None) -> dict[str, Any]:
    kinds = {429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    if param is not None:  # it may be a name that the client made up, which UTF-8 does not have
        param = param.encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _answer(status_of: Callable[[Any], int]) -> Callable[[Request, Any], Awaitable[Response]]:
    async def answer(request: Request, error: Any) -> Response:
        status = status_of(error)
        message = getattr(error, "detail", None) or str(error)
        headers = dict(getattr(error, "headers", None) or {})
        if status == 429:
            headers["retry-after"] = "1"
        if status in (408, 413):  # the rest of the body is not read
            headers["connection"] = "close"
        content = _error(status, message, getattr(error, "param", None))
        return JSONResponse(content, status, headers)

    return answer


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m models.serve",
        description=f"Serve a trained MiniGPT over HTTP on {HOST}.",
        allow_abbrev=False,
    )
    parser.add_argument("--checkpoint", type=Path, help="run folder; default: the newest in runs/")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch-size", type=int, default=16, help="texts that run at once")
    parser.add_argument("--max-waiting", type=int, default=256, help="texts that may wait")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--decode-draws", type=int, default=2, help="tokens a text draws in a step")
    parser.add_argument("--num-pages", type=int, help="default: enough for all that run at once")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command until Ctrl-C; returns the exit code: 0, or 2 for a bad argument."""
    options = make_parser().parse_args(arguments)
    try:
        loaded = load_model(options.checkpoint or newest_run())
        config = EngineConfig(
            max_batch_size=options.max_batch_size,
            max_waiting=options.max_waiting,
            page_size=options.page_size,
            num_pages=options.num_pages,
            decode_draws=options.decode_draws,
        )
        engine = Engine(loaded.model, config, loaded.tokenizer)
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    server = Server(engine, loaded.tokenizer, "minigpt")
    print(f"compiling, then serving {loaded.folder} on http://{HOST}:{options.port}")
    uvicorn.run(server.app(), host=HOST, port=options.port, log_level="warning", ws="none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
