"""CRC-32 of zip archives, by `isal` (`lt-ckpt[fast]`) if installed, else by zlib.

The values are the same. zlib takes about 0.25 s of a processor per GB, isal a tenth of that.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

crc32: Callable[[bytes | memoryview, int], int] = import_module("isal.isal_zlib" if find_spec("isal") else "zlib").crc32
"""(bytes, CRC of the preceding bytes) → CRC of all."""
