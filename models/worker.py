"""The engine in a thread of its own, beside an event loop that talks to clients.

Only that thread touches the engine. A client's side is a `Subscription`: a queue that the thread
fills and never waits for, so that a slow or vanished client delays nobody. What a queue can hold is
bounded by the tokens that the request asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from models.engine import Engine, Output, SamplingParams

Function = Callable[[], Any]
Settle = Callable[[Any, BaseException | None], None]


class WorkerDeadError(RuntimeError):
    """The engine failed, or was stopped; nothing can be served any more."""


class Subscription:
    """The outputs of one request, for one task of the loop that made it."""

    def __init__(self) -> None:
        self.request: int | None = None  # these two belong to the engine's thread
        self.num_running = 0
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()

    def deliver(self, item: Output | BaseException) -> None:
        """Called from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def leave(self) -> None:
        """Makes `next` return None: the client has gone."""
        self._queue.put_nowait(None)

    async def next(self) -> Output | None:
        """The next output, or None after `leave`; raises WorkerDeadError if the engine failed."""
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise WorkerDeadError(f"the engine ended: {item}") from item
        return item


class Worker:
    """Runs an engine in a thread.

    Args:
        engine: from `start` on nothing else may touch it.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # What to run in the thread, and whom to tell the result or the error; None: stop.
        self._commands: queue.SimpleQueue[tuple[Function, Settle] | None] = queue.SimpleQueue()
        self._subscriptions: dict[int, Subscription] = {}
        self._failure: BaseException | None = None
        self._lock = threading.Lock()  # a command is either run or refused, never forgotten
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; it compiles all shapes before it obeys."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that runs, and with it all requests."""
        self._commands.put(None)
        self._thread.join()

    async def ready(self) -> None:
        """Waits until all shapes are compiled; raises WorkerDeadError."""
        await self._call(lambda: None)

    async def submit(
        self, subscription: Subscription, tokens: Sequence[int], params: SamplingParams
    ) -> None:
        """Queues a prompt whose outputs go to the subscription.

        Raises:
            ValueError: see `Engine.submit`.
            QueueFullError: likewise.
            WorkerDeadError: the engine failed or was stopped.
        """

        def submit() -> None:
            request = self._engine.submit(tokens, params)
            subscription.request, subscription.num_running = request, params.n
            self._subscriptions[request] = subscription

        await self._call(submit)

    def cancel(self, subscription: Subscription) -> None:
        """Ends a request, without waiting for it; also one that is still being submitted."""

        def cancel() -> None:
            if subscription.request is not None:
                self._engine.cancel(subscription.request)
                self._subscriptions.pop(subscription.request, None)

        self._commands.put((cancel, lambda result, error: None))

    async def snapshot(self) -> dict[str, float]:
        """`Engine.snapshot`; raises WorkerDeadError."""
        return await self._call(self._engine.snapshot)

    async def _call(self, function: Function) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def set_future(result: Any, error: BaseException | None) -> None:
            if future.done():  # its task was cancelled
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def settle(result: Any, error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(set_future, result, error)

        with self._lock:
            if self._failure is not None:
                raise WorkerDeadError(f"the engine ended: {self._failure}")
            self._commands.put((function, settle))
        return await future

    def _run(self) -> None:
        failure: BaseException = WorkerDeadError("it was stopped")
        try:
            self._engine.warm_up()
            while self._obey():
                for output in self._engine.step() if self._engine.has_work else ():
                    self._deliver(output)
        except Exception as problem:  # every client learns of it, now and later
            failure = problem
        with self._lock:
            self._failure = failure
        for subscription in self._subscriptions.values():
            subscription.deliver(failure)
        while not self._commands.empty():
            if (command := self._commands.get()) is not None:
                command[1](None, WorkerDeadError(f"the engine ended: {failure}"))

    def _obey(self) -> bool:
        """Runs all commands that came, waiting for one when there is nothing else to do."""
        while not self._engine.has_work or not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            function, settle = command
            try:
                result = function()
            except Exception as problem:  # the caller's, such as a prompt that is too long
                settle(None, problem)
            else:
                settle(result, None)
        return True

    def _deliver(self, output: Output) -> None:
        subscription = self._subscriptions.get(output.request)
        if subscription is None:
            return
        subscription.deliver(output)
        subscription.num_running -= output.finish_reason is not None
        if subscription.num_running == 0:
            del self._subscriptions[output.request]
