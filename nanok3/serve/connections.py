"""Connections that have nothing to say: a client has some seconds for a request's head, and some for its body.

    head   from the connection, or from its first byte on a connection that was used before, to the empty line
    body   between two pieces of it: http_gate.py, which answers 408

Without the first a program that opens many connections and sends a byte now and then would keep them all for ever.
uvicorn counts only the time between two requests, so its protocol is given a clock of ours.
"""

from __future__ import annotations

from typing import Any

HEAD_SECONDS = 30.0


def patient_protocol(seconds: float = HEAD_SECONDS) -> type[Any]:
    """uvicorn's HTTP/1.1 protocol, with a bound on the time for a head."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PatientProtocol(H11Protocol):
        _waiting: Any = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop()
            elif self._waiting is None and self.timeout_keep_alive_task is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._waiting = self.loop.call_later(seconds, self.transport.close)

        def _stop(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
                self._waiting = None

    return PatientProtocol
