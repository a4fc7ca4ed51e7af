"""Moves one request's KV from one pool to another: regions, connectors, hand-off tables, sender and receiver."""
