"""Members of a gzip file, each with CRC-32 and length of its content at its end.

zlib compares both. Content is decompressed in chunks of at most 1 MiB. Zeros after a member are padding, as for gunzip.
"""

import io
import zlib

from lt_data.sources.record import DamagedFileError

_INPUT_BYTES = 1 << 17
_CHUNK_BYTES = 1 << 20
_GZIP_WBITS = 16 + zlib.MAX_WBITS


class GzipMembers:
    """Reader of the members of a gzip file in order; each `open_member` is followed by `read_chunk`s.

    Attributes:
        begin: offset of the open member.
        is_checked: True: the end of every member confirms its content.
    """

    is_checked = True

    def __init__(self, stream: io.BufferedReader) -> None:
        """Read from the beginning of a member; offsets count from there."""
        self.begin = 0
        self._stream = stream
        self._input = b""
        self._read_bytes = 0
        self._member = zlib.decompressobj(_GZIP_WBITS)

    def open_member(self) -> bool:
        """Begin the next member; return False at the end of the file."""
        is_first = not self._read_bytes
        while not self._input:
            if not self._read_input():
                return False
            if not is_first:
                self._input = self._input.lstrip(b"\0")
        self.begin = self._read_bytes - len(self._input)
        self._member = zlib.decompressobj(_GZIP_WBITS)
        return True

    def read_chunk(self) -> bytes:
        """Return the next content of the member; b"" at its end, when its check has passed.

        Raises:
            DamagedFileError: the member is damaged or truncated.
        """
        chunk = b""
        while not chunk and not self._member.eof:
            if not self._input and not self._read_input():
                raise DamagedFileError("truncated gzip file; download or compress it again")
            before = self._member.copy()
            try:
                chunk = self._member.decompress(self._input, _CHUNK_BYTES)
            except zlib.error as exc:
                error = DamagedFileError(f"damaged gzip file: {exc}; download or compress it again")
                error.lost_lines = _count_lines(before, self._input)
                raise error from exc
            ended = self._member.eof
            self._input = self._member.unused_data.lstrip(b"\0") if ended else self._member.unconsumed_tail
        return chunk

    def _read_input(self) -> bool:
        self._input = self._stream.read1(_INPUT_BYTES)
        self._read_bytes += len(self._input)
        return bool(self._input)


def _count_lines(member: "zlib._Decompress", damaged: bytes) -> int:
    """Return the number of line ends before the damage, which zlib does not return with the error."""
    lines = 0
    try:
        for i in range(len(damaged)):
            lines += member.decompress(damaged[i : i + 1]).count(b"\n")
    except zlib.error:
        return lines
    raise AssertionError("the same input was damaged before")
