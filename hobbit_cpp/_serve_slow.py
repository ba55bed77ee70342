"""Clients that hold a connection, or the model, by being slow: who sends a request for too long, or does not take the answer, is cut off."""

from __future__ import annotations

import asyncio


def impatient(protocol: type, seconds: float) -> type:
    """uvicorn's protocol class (one object a connection) with a limit on each request's arrival, headers and body together, and on the
    time for which its client leaves a full buffer of the answer unread. The connection is aborted then, which the application sees as
    any client's leaving."""

    class Impatient(protocol):
        _sending = _reading = None  # timers

        def connection_made(self, transport):
            super().connection_made(transport)
            self._expect_request()

        def data_received(self, data):
            super().data_received(data)
            self._expect_request()

        def on_response_complete(self, *args):
            super().on_response_complete(*args)  # may find the next request's beginning in what it has
            self._expect_request()

        def _expect_request(self):
            due = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
            self._sending = self._timer(self._sending, due)

        def pause_writing(self):
            super().pause_writing()
            self._reading = self._timer(self._reading, True)

        def resume_writing(self):
            super().resume_writing()
            self._reading = self._timer(self._reading, False)

        def connection_lost(self, error):
            self._sending, self._reading = self._timer(self._sending, False), self._timer(self._reading, False)
            super().connection_lost(error)

        def _timer(self, running, on: bool):
            if on:
                return running or asyncio.get_running_loop().call_later(seconds, self.transport.abort)
            if running:
                running.cancel()

    return Impatient
