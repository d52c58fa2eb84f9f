"""What a Service is to the API server: its new connections go to a webhook that is there, the others stay."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

_PIECE_BYTES = 1 << 16


class Service:
    """Forwards each new connection to where `backend` says at that moment."""

    def __init__(self) -> None:
        self.port = 0
        self.backend = 0
        self._listens = threading.Event()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    @contextlib.contextmanager
    def running(self) -> "Iterator[Service]":
        """It forwards, for the length of a block."""
        self._thread.start()
        self._listens.wait()
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listens.set()
        await self._end.wait()
        # Who has a connection keeps it open, so nothing waits for them: they are cut off.
        server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            to_read, to_write = await asyncio.open_connection("127.0.0.1", self.backend)
            with contextlib.closing(to_write):
                # Where one side ends, neither has anything more to say to the other.
                pipes = _pipe(reader, to_write), _pipe(to_read, writer)
                ways = [asyncio.create_task(pipe) for pipe in pipes]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
