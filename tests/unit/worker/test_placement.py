"""A process that settles has its threads on its cores, and others hear of it; what it cannot have is said."""

import json
import os
import subprocess
import sys

import pytest

from contracts.errors import ConfigError
from rpc.cores import usable_in_order
from worker.placement import Wish, settle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes keep to cores on Linux only")

CODE = """
import json, os, sys
from worker.placement import Wish, settle
wish = json.loads(sys.argv[1])
got = settle(Wish(tuple(wish[0]) if isinstance(wish[0], list) else wish[0], wish[1]), wish[2])
print(json.dumps([got.threads, got.cpus, got.shared, got.note, sorted(os.sched_getaffinity(0))]), flush=True)
sys.stdin.read()
"""


class Settled:
    """Processes that settled, in a temporary directory of their own."""

    def __init__(self, folder):
        self._command = ["env", f"TMPDIR={folder}", sys.executable, "-c", CODE]
        self._children = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in self._children:
            child.communicate()

    def settle(self, cpus, threads, who):
        child = subprocess.Popen(
            [*self._command, json.dumps([cpus, threads, who])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._children.append(child)
        return json.loads(child.stdout.readline())


def test_workers_that_find_their_cores_have_one_each_and_the_one_too_many_any(tmp_path):
    usable = list(usable_in_order())
    with Settled(tmp_path) as settled:
        found = [settled.settle("auto", 1, f"w{n}") for n in range(2)]
        assert settled.settle("auto", len(usable), "late")[1] == []
    cpus = [cpu for _, own, *_ in found for cpu in own]
    assert len(cpus) == len(set(cpus)) and set(cpus) <= set(usable)
    for threads, own, shared, _, affinity in found:
        assert threads == 1 and shared == [] and affinity == (own or usable)


def test_who_shares_given_cores_is_told_with_whom(tmp_path):
    first = usable_in_order()[0]
    with Settled(tmp_path) as settled:
        assert settled.settle([first], None, "prefill-0")[:3] == [1, [first], []]
        threads, cpus, shared, _, affinity = settled.settle([first], None, "decode-0")
    assert (threads, cpus, affinity) == (1, [first], [first])
    assert shared == [f"prefill-0 (cpu {first})"]


def test_more_threads_than_cores_are_had_and_said(tmp_path):
    first = usable_in_order()[0]
    with Settled(tmp_path) as settled:
        threads, _, _, note, _ = settled.settle([first], 3, "prefill-0")
    assert threads == 3 and "3 threads" in note


def test_without_a_wish_nothing_is_kept_to():
    before = os.sched_getaffinity(0)
    placement = settle(Wish(), "nobody")
    assert placement.cpus == () and placement.threads >= 1 and os.sched_getaffinity(0) == before
    assert settle(Wish(None, 7), "nobody").threads == 7


def test_a_core_that_is_not_ours_is_named():
    with pytest.raises(ConfigError, match="--cores: core 4095"):
        settle(Wish((4095,)), "nobody")
