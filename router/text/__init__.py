"""Text to tokens and back: tokenizer, chat templates, words with their stop strings, and the model's card."""
