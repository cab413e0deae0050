"""Text to ids: the tokenizer and its files, engines that have to show equal ids, long texts in pieces."""
