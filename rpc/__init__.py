"""The gRPC shell that every service stands in: server, channels, errors on the wire, announcements, the process itself.

Knows nothing of prompts, KV or engines.
"""
