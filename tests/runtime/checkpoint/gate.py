"""``gate.py PORT BEHIND``: hand connections on to a port of this machine; SIGUSR1 shuts the gate, SIGUSR2 opens it."""

import asyncio
import signal
import sys
from contextlib import suppress


async def main(port: int, behind: int) -> None:
    open_ones = set[asyncio.StreamWriter]()
    servers = list[asyncio.Server]()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones.add(writer)
        with suppress(OSError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        open_ones.discard(writer)
        writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", behind)
        await asyncio.gather(carry(reader, inner_writer), carry(inner_reader, writer))

    async def unlock() -> None:
        servers.append(await asyncio.start_server(meet, "127.0.0.1", port))

    def shut() -> None:
        servers.pop().close()
        for writer in tuple(open_ones):
            writer.transport.abort()

    loop = asyncio.get_running_loop()
    tasks = list[asyncio.Task[None]]()
    loop.add_signal_handler(signal.SIGUSR1, shut)
    loop.add_signal_handler(signal.SIGUSR2, lambda: tasks.append(loop.create_task(unlock())))
    await unlock()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
