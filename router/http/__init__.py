"""The HTTP door: sockets, bounds, bodies, routes, streamed answers."""
