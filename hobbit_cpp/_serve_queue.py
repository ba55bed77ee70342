"""Who may use the model: one request at a time, in the order they came. A client that leaves gives up its place, or ends its turn."""

from __future__ import annotations

import asyncio
import contextlib
import functools


class Refused(Exception):
    """The server takes no more requests now."""


class Gone(Exception):
    """The client went away: there is nobody to answer."""


class Queue:
    """llm: a Llama. limit: requests that may wait for it.

    `gone`, below, is a future that is done when the request's client has gone.
    """

    def __init__(self, llm, limit: int):
        self.llm, self.limit = llm, limit
        self.waiting = self.running = 0

    def start(self) -> None:
        """In the event loop that everything else is called in."""
        self._lock, self._stopping, self._over = asyncio.Lock(), asyncio.Event(), asyncio.Event()

    def stop(self, grace: float) -> None:
        """Whoever waits is refused; who has the model keeps it for so many seconds."""
        self._stopping.set()
        asyncio.get_running_loop().call_later(grace, self._over.set)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @contextlib.asynccontextmanager
    async def turn(self, gone: asyncio.Future):
        """async with queue.turn(gone) as call: result = await call(function)

        The function is called in a thread and is the only user of the model meanwhile. Raises Refused or Gone.
        """
        if self.waiting >= self.limit:
            raise Refused(f"{self.limit} requests are waiting already: try again later")
        self.waiting += 1
        try:
            await self._acquire(gone)
        finally:
            self.waiting -= 1
        self.running = 1
        try:
            yield functools.partial(self._call, gone)
        finally:
            self.running = 0
            self._lock.release()

    async def _acquire(self, gone) -> None:
        place, stop = asyncio.ensure_future(self._lock.acquire()), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({place, gone, stop}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise Gone
            if self.stopping:
                raise Refused("the server is stopping")
        except BaseException:  # cancelled, too
            place.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await place
                self._lock.release()
            raise
        finally:
            stop.cancel()

    async def _call(self, gone, function):
        """The thread is always waited for: nobody else may have the model before it is out of there."""
        work, over = asyncio.ensure_future(asyncio.to_thread(function)), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({work, gone, over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            left = not work.done()
            while not work.done():
                self.llm.cancel()  # again and again: it may not have begun when it was told the first time
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({work}, timeout=0.05)
            if left:
                work.exception()  # it was cancelled, or ended just now: nobody wants to know
        if left and gone.done():
            raise Gone
        if left:
            raise Refused("the server stopped before the answer was complete")
        return work.result()


def watch(receive) -> asyncio.Future:
    """The future for turn(), of a request whose body was read."""
    async def wait():
        while (await receive())["type"] != "http.disconnect":
            pass
    return asyncio.ensure_future(wait())
