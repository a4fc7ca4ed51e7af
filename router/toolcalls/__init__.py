"""Calls of tools in what a model says, found while it is said: pure text in, content and calls out.

    text ──▶ parser.CallParser.feed ──▶ Heard(content, calls)      dialects.py says how each kind of model writes calls

Any cut of the text into pieces gives the same content and calls (tests/property/test_toolcalls.py). Does not know tokens,
requests or OpenAI's forms.
"""
