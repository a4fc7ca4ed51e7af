"""SharedRegion: memory that another process can map, and that outlives its closing for those who still look."""

import fcntl
import mmap
import os

import numpy as np
import pytest

from kv_transfer.region import SharedRegion


def refuse(name):
    raise OSError("no memfd here")


def test_memory_is_zeroed_writable_and_mapped_by_its_descriptor():
    with SharedRegion(10_000) as region:
        assert region.num_bytes == len(region.buffer) == 10_000
        assert region.buffer.format == "B"
        assert not any(region.buffer)
        region.buffer[9_999] = 7
        with mmap.mmap(region.fd, 10_000) as other:
            assert other[9_999] == 7
            other[0] = 8
        assert region.buffer[0] == 8


def test_populated_memory_is_there_and_still_zero():
    with SharedRegion(64 * mmap.PAGESIZE) as region:
        assert os.fstat(region.fd).st_blocks == 0
        region.populate()
        assert os.fstat(region.fd).st_blocks * 512 == 64 * mmap.PAGESIZE
        assert not any(region.buffer)


def test_nobody_can_resize_it_under_a_mapping():
    with SharedRegion(4096) as region:
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(region.fd, size)


def test_close_gives_the_descriptor_back_and_is_idempotent():
    region = SharedRegion(4096)
    fd = region.fd
    region.close()
    region.close()
    assert region.fd is None
    with pytest.raises(OSError):
        fcntl.fcntl(fd, fcntl.F_GETFD)


def test_views_that_are_still_held_stay_valid_after_close():
    region = SharedRegion(4096)
    array = np.frombuffer(region.buffer, dtype=np.uint8)
    region.close()
    array[5] = 9
    assert array[5] == 9


def test_without_memfd_it_is_this_process_s_alone():
    with SharedRegion(4096, make_memfd=refuse) as region:
        assert region.fd is None
        region.buffer[0] = 1
        assert region.buffer[0] == 1


def test_a_memfd_that_cannot_be_sealed_is_an_error_and_leaks_nothing():
    made = []

    def unsealable(name):
        made.append(os.memfd_create(name))
        return made[0]

    with pytest.raises(PermissionError):
        SharedRegion(4096, make_memfd=unsealable)
    with pytest.raises(OSError):
        os.fstat(made[0])


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_no_memory_is_refused(num_bytes):
    with pytest.raises(ValueError, match="num_bytes"):
        SharedRegion(num_bytes)
