"""What is particular to `shm`: slots and locks, the door, and what it needs of a machine."""

import asyncio
import fcntl
import gc
import os
import socket
from pathlib import Path

import pytest

from contracts.errors import ConfigError, NoRoom, TransferFailed
from contracts.worker import ConnectorAddress
from kv_transfer.connector import ByteRange, Write
from kv_transfer.region import SharedRegion
from kv_transfer.shm import ShmConnector, probe_locks, why_not
from kv_transfer.shm_door import Door, Terms, is_alive, knock
from kv_transfer.slots import MAX_RANGES, NUM_SLOTS, SlotReader, SlotTable, reopen, try_lock
from kv_transfer.tcp_wire import wait_readable


@pytest.fixture
def table():
    made = SlotTable()
    yield made
    made.close()


@pytest.fixture
def reader(table):
    made = SlotReader(os.dup(table.reader_fd))
    yield made
    made.close()


def test_a_machine_that_lacks_something_is_told_what():
    assert why_not() is None

    def refuse():
        raise OSError("not permitted")

    def missing():
        raise AttributeError("module 'os' has no attribute 'memfd_create'")

    assert why_not((("this", lambda: None), ("that", refuse))) == "that: not permitted"
    assert "memfd_create" in why_not((("that", missing),))


def test_locks_that_do_not_lock_are_found_out():
    for lies in (lambda *_: True, lambda *_: False):
        with pytest.raises(OSError, match="do not exclude"):
            probe_locks(lies)


def test_writers_read_the_ranges_and_cannot_change_them(table, reader):
    key = table.open((ByteRange(0, 8), ByteRange(100, 4)))
    with reader.inside(key) as ranges:
        assert ranges == (ByteRange(0, 8), ByteRange(100, 4))
    with pytest.raises(OSError):
        os.write(table.reader_fd, b"x")


def test_a_slot_is_fenced_while_a_writer_is_inside_and_reused_after(table, reader):
    key = table.open((ByteRange(0, 8),))
    with reader.inside(key), reader.inside(key):
        assert not table.close_window(key)
        assert not reader.is_open(key)
        with pytest.raises(TransferFailed), reader.inside(key):
            pass
        assert table.open(()) % NUM_SLOTS != key % NUM_SLOTS
    assert table.close_window(key)
    again = table.open(())
    assert again % NUM_SLOTS == key % NUM_SLOTS
    assert again != key
    with pytest.raises(TransferFailed), reader.inside(key):
        pass
    with reader.inside(again):
        assert table.close_window(key)  # an old key does not touch the slot's new window
    assert reader.is_open(again)


def test_a_lock_that_the_target_holds_keeps_writers_out(table, reader):
    key = table.open(())
    other = reopen(table.reader_fd, os.O_RDONLY)
    assert try_lock(other, fcntl.F_RDLCK, key % NUM_SLOTS)
    assert not try_lock(table._fd, fcntl.F_WRLCK, key % NUM_SLOTS)
    os.close(other)
    assert try_lock(table._fd, fcntl.F_WRLCK, key % NUM_SLOTS)
    with pytest.raises(TransferFailed), reader.inside(key):
        pass
    assert try_lock(table._fd, fcntl.F_UNLCK, key % NUM_SLOTS)


def test_a_full_table_is_no_room(table):
    keys = [table.open(()) for _ in range(NUM_SLOTS)]
    with pytest.raises(NoRoom, match="in use"):
        table.open(())
    assert table.close_window(keys[500])
    table.open(())


def test_too_many_ranges_are_no_room(table, reader):
    ranges = tuple(ByteRange(2 * at, 1) for at in range(MAX_RANGES))
    with reader.inside(table.open(ranges)) as seen:
        assert seen == ranges
    with pytest.raises(NoRoom, match="ranges"):
        table.open((*ranges, ByteRange(10**6, 1)))


def test_memory_without_a_descriptor_is_a_config_error():
    def refuse(name):
        raise OSError("no memfd")

    with SharedRegion(4096, make_memfd=refuse) as region, pytest.raises(ConfigError, match="memfd"):
        ShmConnector().expose(region)


@pytest.fixture
def door(table):
    with SharedRegion(4096) as region:
        made = Door((region.fd, 4096), table.reader_fd)
        yield made
        made.close()


def is_alive_soon(connection):
    """Whether it is still open after the door had time to end it."""
    return not wait_readable(connection, 5.0)


def test_the_door_gives_descriptors_and_shows_that_it_lives(door):
    keys = knock(door.name)
    assert keys.num_bytes == 4096
    assert os.fstat(keys.memory_fd).st_size == 4096
    assert is_alive(keys.connection)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect("\0" + door.name)
    stranger.recv(100)
    stranger.send(b"hello?")  # nobody may speak here
    assert not is_alive_soon(stranger)
    stranger.close()
    assert is_alive(keys.connection)
    keys.connection.close()
    for fd in (keys.memory_fd, keys.table_fd):
        os.close(fd)


def test_a_door_turns_another_user_away(table, caplog):
    with SharedRegion(4096) as region:
        door = Door((region.fd, 4096), table.reader_fd, terms=Terms(user=os.geteuid() + 1))
        with pytest.raises(TransferFailed, match="not opened to us"):
            knock(door.name)
        door.close()
    assert "turned away" in caplog.text


@pytest.mark.parametrize("greeting", [b"", b"short", b"WRONGMAG" + bytes(8)])
def test_what_is_not_a_door_is_refused(greeting):
    name = f"diptych-test-{os.getpid()}-{len(greeting)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()

        async def visit():
            knocking = asyncio.ensure_future(asyncio.to_thread(knock, name))
            guest, _ = await asyncio.to_thread(listener.accept)
            socket.send_fds(guest, [greeting], [0, 0]) if greeting else None
            guest.close()
            await knocking

        with pytest.raises(TransferFailed, match="no door"):
            asyncio.run(visit())


async def test_a_dead_target_s_memory_is_let_go():
    with SharedRegion(4096) as one, SharedRegion(4096) as other:
        source, target = ShmConnector(), ShmConnector()
        source.expose(one)
        target.expose(other)
        address = target.address()
        await source.connect(address)
        assert len(source._targets) == 1
        await target.close()
        while source._targets:  # the event loop is told by the kernel
            await asyncio.sleep(0.001)
        await source.close()


async def test_a_knock_that_fails_after_its_callers_left_is_no_news():
    said = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    with SharedRegion(4096) as region:
        source = ShmConnector()
        source.expose(region)
        connecting = asyncio.ensure_future(source.connect(ConnectorAddress("shm", "diptych-nobody")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (knocking,) = source._knocking.values()
        connecting.cancel()
        await asyncio.wait((connecting, knocking))
        del connecting, knocking
        gc.collect()
        await source.close()
    assert not said


async def test_close_waits_for_a_copy_and_for_a_knock():
    size = 64 << 20
    with SharedRegion(size) as one, SharedRegion(size) as other:
        source, target = ShmConnector(piece_bytes=4096), ShmConnector()
        source.expose(one)
        target.expose(other)
        key = target.open_window([ByteRange(0, size)])
        connecting = asyncio.ensure_future(source.connect(target.address()))
        await asyncio.sleep(0)
        assert source._knocking
        await asyncio.ensure_future(source.connect(target.address()))
        await connecting
        writing = asyncio.ensure_future(source.write(target.address(), key, [Write(0, 0, size)]))
        while not source._copies:
            await asyncio.sleep(0)
        await source.close()
        assert not source._copies
        await writing
        assert target.close_window(key)
        late = ShmConnector()
        late.expose(one)
        connecting = asyncio.ensure_future(late.connect(target.address()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert late._knocking
        await late.close()
        await connecting
        assert not late._targets
        await target.close()


def times_mapped(region):
    """How often this process has the region's memory mapped."""
    inode = str(os.fstat(region.fd).st_ino)
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


async def test_the_memory_of_a_target_that_has_ended_goes_at_once_also_where_a_write_failed():
    """Not when the collector comes by, which in a process that has nothing to do is never."""
    gc.disable()
    try:
        with SharedRegion(4096) as own, SharedRegion(4096) as others:
            source, target = ShmConnector(), ShmConnector()
            source.expose(own)
            target.expose(others)
            with pytest.raises(TransferFailed, match="the window is closed"):
                await source.write(target.address(), 7, [Write(0, 0, 100)])
            assert times_mapped(others) == 2
            await target.close()
            async with asyncio.timeout(10):
                while source._targets:
                    await asyncio.sleep(0.005)
            assert times_mapped(others) == 1, "by the target itself"
            await source.close()
    finally:
        gc.enable()
