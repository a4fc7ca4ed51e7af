"""OpenAI's forms: what clients may send, and what they are sent."""
