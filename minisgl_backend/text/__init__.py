"""Strings and token ids: tokenizer, incremental detokenizer, stop strings."""
