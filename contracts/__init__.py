"""The law in Python: ids, requests, KV layout, ticket, errors, clock, and in `pb` the generated wire types. No torch, no I/O."""
