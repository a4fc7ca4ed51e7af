"""Who holds which block: pool, leases, prefix cache. Pure Python; knows no requests, no bytes."""
