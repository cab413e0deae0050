"""Tokenizing: the tokenizer and its files, engines, and batches of encoded documents."""
