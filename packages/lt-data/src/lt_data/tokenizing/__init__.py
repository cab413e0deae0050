"""Tokenizing: the tokenizer and its files, verified engines, splitting of long texts."""
