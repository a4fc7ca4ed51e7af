"""The mask of nodes is what the kernel reads; what cannot be done is said."""

import subprocess
import sys

import pytest

from engine.placement.memory_node import node_mask, prefer_nodes


def test_masks():
    assert node_mask((0,)) == [1]
    assert node_mask((3, 1)) == [0b1010]
    assert node_mask((64,)) == [0, 1]
    assert node_mask((0, 130)) == [1, 0, 4]


def test_no_node_is_no_wish():
    assert prefer_nodes(()) is False


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's memory policy")
def test_the_system_takes_it_or_says_no_and_memory_can_be_had_either_way():
    """A sandbox may forbid the call; a node that is not there is always refused."""
    code = (
        "from engine.placement.memory_node import prefer_nodes; took = prefer_nodes((0,)); "
        "print(type(took).__name__, prefer_nodes((1000,)), len(bytearray(1 << 20)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "bool False 1048576\n"
