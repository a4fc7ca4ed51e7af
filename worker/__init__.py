"""One shell for the workers of both pools: from a configuration to a process that serves. See README.md."""
