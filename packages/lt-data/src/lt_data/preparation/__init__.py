"""Resumable preparation of token stores from documents, by one or several processes or machines."""
