"""`python -m bench.gpu [--dry-run]`: the table. Exit code 1 when a kernel is wrong.

With --dry-run, in Triton's interpreter on the CPU with tiny sizes (TRITON_INTERPRET=1 must be set): that everything runs, not
how fast.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import triton

from bench.gpu.measure import Line, Stopwatch, measure_limits
from bench.gpu.model import ModelBench
from bench.gpu.ops import Ops
from bench.gpu.sizes import DRY, LLAMA_8B
from kernels.triton.kernels import triton_kernels


def main() -> int:
    """Print as lines come, so that what is there stays when time is up."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--dry-run", action="store_true")
    dry = parser.parse_args().dry_run
    if not dry and not torch.cuda.is_available():
        print("no CUDA device; --dry-run goes through everything without one", file=sys.stderr)
        return 1
    begun = time.monotonic()
    torch.manual_seed(0)
    device, sizes = (torch.device("cpu"), DRY) if dry else (torch.device("cuda"), LLAMA_8B)
    name = "the interpreter" if dry else torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'':<44} {'error':>14} {'ms':>10} {'':>14} {'limit':>6}")
    watch = Stopwatch(device, sizes.tries)
    limits, lines = measure_limits(device, sizes, watch)
    num_wrong = 0
    with torch.inference_mode():
        for line in (*lines, *Ops(device, sizes, limits, watch).lines()):
            num_wrong += _said(line)
        for line in ModelBench(sizes, triton_kernels(device.type), limits, watch).lines():
            num_wrong += _said(line)
    print(f"{num_wrong} wrong, {time.monotonic() - begun:.0f} s")
    return 1 if num_wrong else 0


def _said(line: Line) -> int:
    print(line.text(), flush=True)
    return 0 if line.right else 1


if __name__ == "__main__":
    sys.exit(main())
