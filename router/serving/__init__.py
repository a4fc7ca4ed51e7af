"""One request over the pools: its answers, attempts, legs and progress."""
