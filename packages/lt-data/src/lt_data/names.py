"""File names as the bytes that they are, whatever encoding the locale has for them.

A system's file name is bytes. Python decodes it by the locale, so that the same name is another text under another
locale. What is written into a file of ours is therefore `portable`: the bytes read as UTF-8, with bytes that are not
UTF-8 kept as lone surrogates; `local` makes of it what the present locale's functions take. Under UTF-8 both change
nothing.
"""

import os


def portable(name: str) -> str:
    """The name of a local file as the same text under every locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def local(name: str) -> str:
    """A portable name as this process has to give it to the system."""
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))
