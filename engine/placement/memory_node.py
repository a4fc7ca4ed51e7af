"""From which memory nodes the pages of this thread, and of those that it starts from now on, are taken: Linux's memory policy.

A page lies where the thread that first touches it stands, so a process on one node's cores mostly gets it right by itself; not
for pages that the system moves threads away from, nor for a file's pages, which is what weights are. Preferred, not bound: a
full node must make a worker slower, not end it. There is no wrapper in the C library, so it is called by number. Does not know
cores.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterable

_PREFERRED_MANY = 5
_PREFERRED = 1
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
# set_mempolicy by machine, from the kernel's tables of system calls.
_CALL = {"x86_64": 238, "aarch64": 237}


def node_mask(nodes: Iterable[int]) -> list[int]:
    """The nodes as words of bits, the lowest first, as many as they need."""
    chosen = sorted(nodes)
    words = [0] * (chosen[-1] // _WORD_BITS + 1)
    for node in chosen:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return words


def prefer_nodes(nodes: tuple[int, ...]) -> bool:
    """Take this thread's memory from `nodes` while they have any; False where the system does not do that.

    Threads have it from the thread that starts them: call it before others are started.
    """
    number = _CALL.get(platform.machine())
    if sys.platform != "linux" or number is None or not nodes:
        return False
    words = node_mask(nodes)
    mask = (ctypes.c_ulong * len(words))(*words)
    # The kernel reads one bit less than it is told of.
    num_bits = len(words) * _WORD_BITS + 1
    call = ctypes.CDLL(None, use_errno=True).syscall
    policies = (_PREFERRED,) if len(nodes) == 1 else (_PREFERRED_MANY,)
    return any(call(number, policy, mask, ctypes.c_ulong(num_bits)) == 0 for policy in policies)
