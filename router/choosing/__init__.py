"""Which way a request goes and which workers get it: candidates, prefix index, costs, decisions."""
