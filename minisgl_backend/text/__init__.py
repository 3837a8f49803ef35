"""Strings and token ids: tokenizer, incremental detokenizer, stop strings.

Knows nothing of Triton, engines or requests.
"""
