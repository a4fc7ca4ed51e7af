"""Turns a GGUF file into a Hugging-Face-style directory: `convert.convert_gguf`. No torch anywhere in here."""
