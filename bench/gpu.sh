#!/usr/bin/env bash
# Checks and times the GPU path, in at most eight minutes, and prints one table.
#
#   bench/gpu.sh             on a machine with a GPU, torch's CUDA build and triton
#   bench/gpu.sh --dry-run   anywhere: tiny sizes in Triton's interpreter, that everything runs
#
# PYTHON names the interpreter. Of packages it needs torch, triton, numpy, safetensors, psutil, filelock, pytest and hypothesis.
set -u
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
if [ "${1:-}" = "--dry-run" ]; then
    export TRITON_INTERPRET=1
fi
begun=$SECONDS
# Without the project's own settings, whose plug-ins this machine need not have.
echo "== every kernel, and the engine's tokens, against float64 and the CPU (tests/gpu)"
timeout 230 "$PYTHON" -m pytest -q -c /dev/null --rootdir "$PWD" --confcutdir tests/gpu --import-mode importlib \
    -p no:cacheprovider tests/gpu
tests=$?
echo "== a Llama of 8 billion parameters"
timeout $((470 - SECONDS + begun)) "$PYTHON" -m bench.gpu "$@"
table=$?
echo "== tests $tests, table $table, $((SECONDS - begun)) s"
exit $((tests | table))
