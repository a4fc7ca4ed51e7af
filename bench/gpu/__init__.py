"""Checks and times the GPU path on a GPU machine, in minutes, and prints one table: see bench/gpu.sh."""
