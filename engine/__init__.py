"""Tokens in, tokens out: scheduling, KV blocks and model execution of one worker. Knows no role and no network."""
