"""Measures of speed: the engine beside transformers, the hand-off's bytes, and what serving adds to a token."""
