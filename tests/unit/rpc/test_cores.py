"""Cores by number: what is read, what is refused, and that a process that kept to them has all its threads there."""

import os
import subprocess
import sys

import pytest

from contracts.errors import ConfigError
from rpc.cores import check_usable, keep_to, parse_cores, parse_groups, usable_in_order, written


@pytest.mark.parametrize(("text", "cores"), [("0", (0,)), ("3,0-1", (0, 1, 3)), (" 2 , 5-5", (2, 5))])
def test_lists_and_ranges(text, cores):
    assert parse_cores("--cores", text) == cores
    assert parse_cores("--cores", written(cores)) == cores


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "2-1", "0,0", "0-2,1", "5000", "1.5", "0/1"])
def test_what_is_no_list_of_cores_is_named(text):
    with pytest.raises(ConfigError) as caught:
        parse_cores("--cores", text)
    assert "--cores" in caught.value.message


def test_no_core_has_two_workers():
    assert parse_groups("--worker-cores", "0,1/2-3") == ((0, 1), (2, 3))
    with pytest.raises(ConfigError, match="two workers"):
        parse_groups("--worker-cores", "0-1/1")


def test_a_core_that_is_not_ours_is_named():
    with pytest.raises(ConfigError, match="core 4095 is not one"):
        check_usable("--cores", [4095])
    with pytest.raises(ConfigError, match="4095"):
        keep_to("--cores", (4095,))


def test_all_threads_keep_to_it_those_that_were_there_and_those_that_come():
    core = usable_in_order()[-1]
    code = (
        "import os, threading, time; from rpc.cores import keep_to, usable_cores; "
        "begin = lambda: threading.Thread(target=time.sleep, args=(1,), daemon=True).start(); "
        f"begin(); keep_to('--cores', ({core},)); begin(); "
        "print(usable_cores(), [sorted(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert shown.stdout == f"1 [[{core}], [{core}], [{core}]]\n"
