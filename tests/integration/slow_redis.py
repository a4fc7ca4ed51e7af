"""Passes bytes to a Redis and back, late: as a Redis that is far away does, or one that is too slow for use."""

import asyncio
import contextlib


class SlowRedis:
    """Each way takes `late_s`, however much is on it."""

    def __init__(self, port):
        self.port, self.late_s = port, 0.0
        self.carrying = []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.take, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        self.url = f"redis://{host}:{port}/0"
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for task in self.carrying:
            task.cancel()
        await asyncio.gather(*self.carrying, return_exceptions=True)

    async def take(self, reader, writer):
        self.carrying.append(asyncio.current_task())
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self.carry(reader, back))
                ways.create_task(self.carry(there, writer))
        finally:
            for each in (back, writer):
                each.close()
                with contextlib.suppress(ConnectionError):
                    await each.wait_closed()

    async def carry(self, reader, writer):
        loop, underway = asyncio.get_running_loop(), asyncio.Queue()
        reading = asyncio.create_task(self.read(reader, underway))
        try:
            while True:
                due, data = await underway.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    return
                writer.write(data)
        finally:
            writer.close()
            reading.cancel()
            await asyncio.wait((reading,))

    async def read(self, reader, underway):
        loop = asyncio.get_running_loop()
        data = b"."
        while data:
            try:
                data = await reader.read(65536)
            except ConnectionError:
                data = b""
            underway.put_nowait((loop.time() + self.late_s, data))
