"""Which token comes next: a pure function of one row's logits, parameters, seed, position and tokens.

Importing the package loads no torch; `sampler` does, `row` and `random` do not.
"""
