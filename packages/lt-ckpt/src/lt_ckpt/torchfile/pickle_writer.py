"""Pickle writer for globals that are not imported.

Python's pickler imports every global to check that it exists. This one writes the same opcodes (protocol 2, as
`torch.save` does, including memo entries) from explicit nodes: a `Global` is a name, a `Call` a function's result, a
`PickledObject` an object with a state, a `PersistentId` a reference to something outside. All else is plain: None,
bool, int, float, str, list, tuple, dict.

Cost: one pass over the value.
"""

import struct
from dataclasses import dataclass
from itertools import islice
from typing import Any

BATCH_SIZE = 1000
"""Items appended by one opcode, as in Python's pickler."""


@dataclass(frozen=True, slots=True)
class Global:
    """Function or class, by module and name."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """Result of a function call; `items`, if given, are set on it as on a dict."""

    function: Global
    arguments: tuple[Any, ...] = ()
    items: dict[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class PickledObject:
    """Object of a class, made without arguments, with an optional state."""

    kind: Global
    state: Any = None


@dataclass(frozen=True, slots=True)
class DictItems:
    """Dict given by its items, whose keys may be objects."""

    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class PersistentId:
    """Reference to something outside of the pickle."""

    reference: Any


def dumps(value: Any) -> bytes:
    """Return the pickle of a value."""
    writer = _Writer()
    writer.save(value)
    return b"\x80\x02" + bytes(writer.out) + b"."


class _Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self._memo: dict[str | Global, int] = {}
        """Strings and globals written so far. Containers are written again each time."""
        self._n_memo = 0

    def save(self, value: Any) -> None:
        kind = type(value)
        if value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"\x88" if value else b"\x89"
        elif kind is int:
            self._save_int(value)
        elif kind is float:
            self.out += b"G" + struct.pack(">d", value)
        elif kind is str or kind is Global:
            self._save_memoized(value)
        elif kind is tuple:
            self._save_tuple(value)
        elif kind is list:
            self.out += b"]"
            self._memoize()
            self._save_batches([[item] for item in value], b"a", b"e")
        elif kind is dict or kind is DictItems:
            self.out += b"}"
            self._memoize()
            pairs = value.items if kind is DictItems else value.items()
            self._save_batches([[key, item] for key, item in pairs], b"s", b"u")
        elif kind is PersistentId:
            self.save(value.reference)
            self.out += b"Q"
        else:
            self._save_object(value)

    def _save_object(self, value: Any) -> None:
        if type(value) is Call:
            self.save(value.function)
            self.save(value.arguments)
            self.out += b"R"
            self._memoize()
            self._save_batches([[key, item] for key, item in (value.items or {}).items()], b"s", b"u")
        elif type(value) is PickledObject:
            self.save(value.kind)
            self.out += b")\x81"
            self._memoize()
            if value.state is not None:
                self.save(value.state)
                self.out += b"b"
        else:
            raise TypeError(f"a {type(value).__name__} cannot be written into a checkpoint's pickle")

    def _memoize(self) -> None:
        n = self._n_memo
        self.out += b"q" + struct.pack("<B", n) if n < 256 else b"r" + struct.pack("<I", n)
        self._n_memo += 1

    def _save_memoized(self, value: str | Global) -> None:
        n = self._memo.get(value)
        if n is not None:
            self.out += b"h" + struct.pack("<B", n) if n < 256 else b"j" + struct.pack("<I", n)
            return
        if isinstance(value, str):
            raw = value.encode()
            self.out += b"X" + struct.pack("<I", len(raw)) + raw
        else:
            self.out += f"c{value.module}\n{value.name}\n".encode("ascii")
        self._memo[value] = self._n_memo
        self._memoize()

    def _save_int(self, value: int) -> None:
        if 0 <= value < 2**8:
            self.out += b"K" + struct.pack("<B", value)
        elif 0 <= value < 2**16:
            self.out += b"M" + struct.pack("<H", value)
        elif -(2**31) <= value < 2**31:
            self.out += b"J" + struct.pack("<i", value)
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += b"\x8a" + struct.pack("<B", len(raw)) + raw

    def _save_tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self.out += b")"
            return
        if len(value) > 3:
            self.out += b"("
        for item in value:
            self.save(item)
        self.out += b"t" if len(value) > 3 else b"\x85\x86\x87"[len(value) - 1 : len(value)]
        self._memoize()

    def _save_batches(self, groups: list[list[Any]], one: bytes, many: bytes) -> None:
        rest = iter(groups)
        while batch := list(islice(rest, BATCH_SIZE)):
            if len(batch) > 1:
                self.out += b"("
            for group in batch:
                for item in group:
                    self.save(item)
            self.out += many if len(batch) > 1 else one
