"""Fast ops, each beside its slow truth."""
