"""Reads pickles without executing anything.

A pickle is a program for a small stack machine, and Python's own unpickler lets it call what it names. Here another
machine walks the opcodes. It knows those that build plain values (numbers, strings, lists, tuples, dictionaries) and
looks every name up in a table given by the caller, where each name stands for an inert value or for a `Maker`: a
function of ours that checks its arguments and returns a value. A name outside the table, and every opcode that plain
files do not need (sets, old text opcodes, extension codes, keyword arguments), ends in a `CheckpointError`. Nothing is
ever imported, and no attribute of anything is looked up or set.

A small pickle cannot become large: opcodes are counted, integers have a width, and the result is measured before it is
returned as if everything shared in it were written out (lists that refer to one another a hundred times a level are
refused), so whoever walks it later needs no care. Texts become bytes once, not again and again, and no keys can be
given that slow a dictionary down. Cycles and deep nesting are refused.

Cost: about half a microsecond per opcode.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lt_ckpt.errors import CheckpointError

MAX_OPCODES = 4_000_000
MAX_DEPTH = 64
MAX_INT_BYTES = 32
MAX_NAME_BYTES = 512
MAX_KEY = 2**60
"""Integers as keys are smaller: larger ones can be made to collide in a dictionary by the thousand."""


class Stand:
    """Base of the values that stand for objects of classes which are not loaded."""

    __slots__ = ()

    def set_state(self, state: Any) -> None:
        """Take the state that the pickle gives the object; refuse by `CheckpointError`."""
        raise CheckpointError(f"{type(self).__name__} takes no state")

    def children(self) -> Iterable[object]:
        """Values that came out of the pickle and are held by this one."""
        return ()


@dataclass(frozen=True, slots=True)
class Maker:
    """A name of the table that may be called: with a tuple of arguments, of which it believes nothing."""

    make: Callable[[tuple[Any, ...]], Any]


Table = Mapping[tuple[str, str], object]
"""(module, name) → `Maker`, or the inert value that the name stands for."""

Persistent = Callable[[object], object]
"""Turns a persistent id, a reference to something outside of the pickle, into a value."""


def loads(
    data: bytes, table: Table, where: str, *, persistent: Persistent | None = None, max_opcodes: int = MAX_OPCODES
) -> Any:
    """Reads a pickle.

    Args:
        data: The pickle, whole.
        table: What its names mean.
        where: The file, for messages.
        persistent: What its persistent ids mean; without it they are refused.
        max_opcodes: Most opcodes, and most values in the result when everything shared is counted each time.

    Returns:
        What it holds: None, bool, int, float, str, bytes, list, tuple, dict, values of the table, what makers made.

    Raises:
        CheckpointError: A name that is not in the table, or anything else than a plain, whole, bounded pickle.
    """
    machine = _Machine(data, table, persistent)
    try:
        value = machine.run(max_opcodes)
        _measure(value, max_opcodes)
    except CheckpointError as exc:
        raise CheckpointError(f"{where}: {exc}; nothing of the file was executed") from None
    except (IndexError, KeyError, ValueError, struct.error) as exc:
        what = f"{type(exc).__name__} at byte {machine.position}"
        raise CheckpointError(f"{where}: not a whole pickle ({what}); the file is damaged") from None
    return value


class _Machine:
    """The stack machine."""

    def __init__(self, data: bytes, table: Table, persistent: Persistent | None) -> None:
        self.position = 0
        self._data = data
        self._table = table
        self._persistent = persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        """The stacks under the open marks."""
        self._memo: dict[int, Any] = {}
        self._made_bytes = 0

    def run(self, max_opcodes: int) -> Any:
        stop = ord(".")
        for _ in range(max_opcodes):
            opcode = self._data[self.position]
            self.position += 1
            if opcode == stop:
                break
            action = _ACTIONS.get(opcode)
            if action is None:
                raise CheckpointError(f"its pickle uses opcode 0x{opcode:02x}, which plain files do not need")
            action(self)
        else:
            raise CheckpointError(f"its pickle has more than {max_opcodes} opcodes")
        if self._below or len(self._stack) != 1:
            raise CheckpointError("its pickle leaves values over; the file is damaged")
        if self.position != len(self._data):
            raise CheckpointError(f"{len(self._data) - self.position} bytes follow its pickle; the file is damaged")
        return self._stack[0]

    def _take(self, n: int) -> bytes:
        end = self.position + n
        if end > len(self._data):
            raise IndexError
        part = self._data[self.position : end]
        self.position = end
        return part

    def _number(self, n_bytes: int) -> int:
        end = self.position + n_bytes
        if end > len(self._data):
            raise IndexError
        value = int.from_bytes(self._data[self.position : end], "little")
        self.position = end
        return value

    def _line(self) -> str:
        end = self._data.index(b"\n", self.position, self.position + MAX_NAME_BYTES)
        text = self._data[self.position : end].decode()
        self.position = end + 1
        return text

    def _to_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._below.pop()
        return items

    # Plain values

    def push(self, value: object) -> None:
        self._stack.append(value)

    def whole_number(self, n_bytes: int) -> None:
        self._stack.append(self._number(n_bytes))

    def signed_number(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def real_number(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def long_number(self, n_bytes: int) -> None:
        n = self._number(n_bytes)
        if n > MAX_INT_BYTES:
            raise CheckpointError(f"its pickle has an integer of {n} bytes")
        self._stack.append(int.from_bytes(self._take(n), "little", signed=True))

    def text(self, n_bytes: int) -> None:
        self._stack.append(self._take(self._number(n_bytes)).decode())

    def raw(self, n_bytes: int) -> None:
        self._stack.append(self._take(self._number(n_bytes)))

    # Containers

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def tuple_to_mark(self) -> None:
        items = self._to_mark()
        self._stack.append(tuple(items))

    def tuple_of(self, n: int) -> None:
        if len(self._stack) < n:
            raise IndexError
        self._stack[-n:] = [tuple(self._stack[-n:])]

    def append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def appends(self) -> None:
        items = self._to_mark()
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise CheckpointError(f"its pickle appends to a {type(target).__name__}")
        target.extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        items = self._to_mark()
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise CheckpointError(f"its pickle sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Tuples are no keys here: hashing deeply nested ones would end the process.
            if not (type(key) in (str, int, bool, bytes, type(None)) or isinstance(key, Stand)):
                raise CheckpointError(f"its pickle has a dictionary key of type {type(key).__name__}")
            if type(key) is int and abs(key) >= MAX_KEY:
                raise CheckpointError(f"its pickle has a dictionary key of more than {MAX_KEY.bit_length() - 1} bits")
            if key in target:
                raise CheckpointError("its pickle has a dictionary with one key twice; the file is damaged")
            target[key] = value

    # Memo

    def get(self, n_bytes: int) -> None:
        self._stack.append(self._memo[self._number(n_bytes)])

    def put(self, n_bytes: int) -> None:
        self._memo[self._number(n_bytes)] = self._stack[-1]

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    # Names and what stands for objects

    def _look_up(self, module: object, name: object) -> None:
        if not (type(module) is str and type(name) is str):
            raise CheckpointError("its pickle has a name that is no text")
        if (module, name) not in self._table:
            shown = f"{module}.{name}"
            shown = shown if len(shown) <= 100 else shown[:100] + "..."
            raise CheckpointError(
                f"its pickle asks for {shown!r}, which is not among the names allowed here; where the file can be "
                "trusted, load it with the program that made it and save plain tensors"
            )
        self._stack.append(self._table[module, name])

    def line_global(self) -> None:
        module = self._line()
        self._look_up(module, self._line())

    def stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._look_up(module, name)

    def call(self) -> None:
        arguments, maker = self._stack.pop(), self._stack.pop()
        if type(maker) is not Maker or type(arguments) is not tuple:
            raise CheckpointError(f"its pickle calls a {type(maker).__name__} with a {type(arguments).__name__}")
        made = maker.make(arguments)
        if type(made) is bytes:  # made of a text that stands in the pickle, which a honest one does once
            self._made_bytes += len(made)
            if self._made_bytes > len(self._data):
                raise CheckpointError("its pickle makes more bytes than it has itself")
        self._stack.append(made)

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Stand):
            target.set_state(state)
        elif type(target) is not dict:  # an OrderedDict's attributes are of no use to anyone here
            raise CheckpointError(f"its pickle sets the state of a {type(target).__name__}")

    def outside(self) -> None:
        if self._persistent is None:
            raise CheckpointError("its pickle refers to something outside")
        self._stack.append(self._persistent(self._stack.pop()))

    def protocol(self) -> None:
        version = self._number(1)
        if version > 5:
            raise CheckpointError(f"its pickle has protocol {version}, newer than 5")

    def frame(self) -> None:
        self._take(8)


_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    0x80: _Machine.protocol,
    0x95: _Machine.frame,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): _Machine.signed_number,
    ord("K"): lambda m: m.whole_number(1),
    ord("M"): lambda m: m.whole_number(2),
    ord("G"): _Machine.real_number,
    0x8A: lambda m: m.long_number(1),
    0x8B: lambda m: m.long_number(4),
    ord("X"): lambda m: m.text(4),
    0x8C: lambda m: m.text(1),
    0x8D: lambda m: m.text(8),
    ord("B"): lambda m: m.raw(4),
    ord("C"): lambda m: m.raw(1),
    0x8E: lambda m: m.raw(8),
    ord("("): _Machine.mark,
    ord(")"): lambda m: m.push(()),
    ord("t"): _Machine.tuple_to_mark,
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("]"): lambda m: m.push([]),
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("}"): lambda m: m.push({}),
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("h"): lambda m: m.get(1),
    ord("j"): lambda m: m.get(4),
    ord("q"): lambda m: m.put(1),
    ord("r"): lambda m: m.put(4),
    0x94: _Machine.memoize,
    ord("c"): _Machine.line_global,
    0x93: _Machine.stack_global,
    ord("R"): _Machine.call,
    0x81: _Machine.call,  # NEWOBJ: the table knows what an instance is made of
    ord("b"): _Machine.build,
    ord("Q"): _Machine.outside,
}


def _children(value: object) -> Iterable[object]:
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return value
    return value.children() if isinstance(value, Stand) else ()


def _measure(value: object, limit: int) -> None:
    """Refuses a value that is cyclic, deeper than `MAX_DEPTH`, or that has more than `limit` parts written out."""
    sizes: dict[int, tuple[int, int]] = {}
    """Finished container, by id → its parts and its depth; everything is kept alive by `value`."""
    open_ids: set[int] = set()
    todo: list[tuple[object, bool]] = [(value, False)]
    while todo:
        item, parts_are_done = todo.pop()
        if not parts_are_done:
            if id(item) in sizes:
                continue
            if id(item) in open_ids:
                raise CheckpointError("its pickle refers to itself")
            open_ids.add(id(item))
            todo.append((item, True))
            todo.extend((part, False) for part in _children(item) if isinstance(part, _CONTAINERS))
            continue
        open_ids.discard(id(item))
        size, depth = 1, 0
        for part in _children(item):
            part_size, part_depth = sizes.get(id(part), (1, 0))
            size += part_size
            depth = max(depth, part_depth)
        if size > limit:
            raise CheckpointError(f"its pickle grows beyond {limit} values")
        if depth >= MAX_DEPTH:
            raise CheckpointError(f"its pickle is nested more than {MAX_DEPTH} deep")
        sizes[id(item)] = size, depth + 1


_CONTAINERS = (list, tuple, dict, Stand)
