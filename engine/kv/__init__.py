"""Who holds which block: pool, leases, prefix cache, hashing. Pure Python; knows no requests, no bytes."""
