"""The ops on a GPU, written in Triton. The package is not imported where triton is not installed."""
