"""Pickle reader that executes nothing.

A pickle is a program for a small stack machine, and Python's unpickler lets it call any global. Here another machine
interprets the opcodes. It supports those that build plain values (numbers, strings, lists, tuples, dictionaries) and
looks up every global in an allow-list of the caller, which maps it to an inert value or to a `Constructor`: a function
of ours that checks its arguments and returns a value. A global outside the allow-list, and every opcode that plain
files do not need (sets, old text opcodes, extension codes, keyword arguments), is a `CheckpointError`. Nothing is ever
imported, and no attribute of anything is read or set.

A small pickle cannot become large: opcodes are counted, the memory that they take is bounded by the pickle's size,
integers have a maximum width, and the result is measured before it is returned as if all shared values were expanded
(lists that refer to one another a hundred times a level are refused), so that callers can traverse it safely. Strings
become bytes once, not repeatedly, and keys that slow a dictionary down are refused. So are cycles and deep nesting.

Cost: about half a microsecond per opcode.
"""

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lt_ckpt.errors import CheckpointError

MAX_OPCODES = 4_000_000
MAX_DEPTH = 64
MAX_OPEN_MARKS = 4 * MAX_DEPTH
MAX_INT_BYTES = 32
MAX_NAME_BYTES = 512
BUDGET_PER_BYTE = 128
"""Memory that a pickle may take per byte of its own, as counted here; torch's own take up to half of it."""
BASE_BUDGET = 2**18
CONTAINER_COST, MEMO_COST, ITEM_COST = 320, 100, 8
"""Bytes of memory counted for a container (with what `_check_size` notes about it), a memo's entry, a tuple's item."""
MAX_KEY = 2**60
"""Limit of integer keys: larger ones can be chosen to collide in a dictionary by the thousand."""


class PickleStub:
    """Base of the values that represent objects of classes which are not imported."""

    __slots__ = ()

    def set_state(self, state: Any) -> None:
        """Set the object's state from the pickle; raise a CheckpointError to refuse it."""
        raise CheckpointError(f"{type(self).__name__} takes no state")

    def children(self) -> Iterable[object]:
        """Return the values of the pickle held by this object."""
        return ()


@dataclass(frozen=True, slots=True)
class Constructor:
    """Callable global of the allow-list; gets the untrusted tuple of arguments."""

    construct: Callable[[tuple[Any, ...]], Any]


SafeGlobals = Mapping[tuple[str, str], object]
"""(module, name) → `Constructor`, or the inert value that represents the global."""

PersistentLoad = Callable[[object], object]
"""Resolves a persistent id, a reference to something outside of the pickle."""


def loads(
    data: bytes,
    safe_globals: SafeGlobals,
    where: str,
    *,
    persistent_load: PersistentLoad | None = None,
    max_opcodes: int = MAX_OPCODES,
) -> Any:
    """Read a pickle.

    Args:
        data: The whole pickle.
        safe_globals: The allow-list.
        where: The file, for messages.
        persistent_load: Resolves persistent ids; without it they are refused.
        max_opcodes: Maximum number of opcodes, and of values in the result with all shared values expanded.

    Returns:
        None, bool, int, float, str, bytes, list, tuple, dict, values of the allow-list, and results of constructors.

    Raises:
        CheckpointError: A global that is not in the allow-list, or anything but a plain, complete, bounded pickle.
    """
    machine = _SafeUnpickler(data, safe_globals, persistent_load)
    try:
        value = machine.run(max_opcodes)
        _check_size(value, max_opcodes)
    except CheckpointError as exc:
        raise CheckpointError(f"{where}: {exc}; nothing of the file was executed") from None
    except (IndexError, KeyError, ValueError, struct.error) as exc:
        what = f"{type(exc).__name__} at byte {machine.position}"
        raise CheckpointError(f"{where}: not a complete pickle ({what}); the file is damaged") from None
    return value


class _SafeUnpickler:
    """Stack machine that interprets the opcodes."""

    def __init__(self, data: bytes, safe_globals: SafeGlobals, persistent_load: PersistentLoad | None) -> None:
        self.position = 0
        self._data = data
        self._safe_globals = safe_globals
        self._persistent_load = persistent_load
        self._stack: list[Any] = []
        self._metastack: list[list[Any]] = []
        """Stacks below the open marks."""
        self._memo: dict[int, Any] = {}
        self._constructed_bytes = 0
        self._budget = BASE_BUDGET + BUDGET_PER_BYTE * len(data)

    def _spend(self, n_bytes: int) -> None:
        self._budget -= n_bytes
        if self._budget < 0:
            raise CheckpointError(f"its pickle grows beyond {BUDGET_PER_BYTE} times its size")

    def run(self, max_opcodes: int) -> Any:
        stop = ord(".")
        for _ in range(max_opcodes):
            opcode = self._data[self.position]
            self.position += 1
            if opcode == stop:
                break
            action = _OPCODE_HANDLERS.get(opcode)
            if action is None:
                raise CheckpointError(f"its pickle uses opcode 0x{opcode:02x}, which plain files do not need")
            action(self)
        else:
            raise CheckpointError(f"its pickle has more than {max_opcodes} opcodes")
        if self._metastack or len(self._stack) != 1:
            raise CheckpointError("its pickle leaves values on the stack; the file is damaged")
        if self.position != len(self._data):
            raise CheckpointError(f"{len(self._data) - self.position} bytes follow its pickle; the file is damaged")
        return self._stack[0]

    def _read_bytes(self, n: int) -> bytes:
        end = self.position + n
        if end > len(self._data):
            raise IndexError
        part = self._data[self.position : end]
        self.position = end
        return part

    def _read_uint(self, n_bytes: int) -> int:
        end = self.position + n_bytes
        if end > len(self._data):
            raise IndexError
        value = int.from_bytes(self._data[self.position : end], "little")
        self.position = end
        return value

    def _read_line(self) -> str:
        end = self._data.index(b"\n", self.position, self.position + MAX_NAME_BYTES)
        text = self._data[self.position : end].decode()
        self.position = end + 1
        return text

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._metastack.pop()
        return items

    # Plain values

    def push(self, value: object) -> None:
        self._stack.append(value)

    def push_uint(self, n_bytes: int) -> None:
        self._stack.append(self._read_uint(n_bytes))

    def push_int32(self) -> None:
        self._stack.append(int.from_bytes(self._read_bytes(4), "little", signed=True))

    def push_float(self) -> None:
        self._stack.append(struct.unpack(">d", self._read_bytes(8))[0])

    def push_long(self, n_bytes: int) -> None:
        n = self._read_uint(n_bytes)
        if n > MAX_INT_BYTES:
            raise CheckpointError(f"its pickle has an integer of {n} bytes")
        self._stack.append(int.from_bytes(self._read_bytes(n), "little", signed=True))

    def push_str(self, n_bytes: int) -> None:
        self._stack.append(self._read_bytes(self._read_uint(n_bytes)).decode())

    def push_bytes(self, n_bytes: int) -> None:
        self._stack.append(self._read_bytes(self._read_uint(n_bytes)))

    # Containers

    def push_container(self, value: object) -> None:
        self._spend(CONTAINER_COST)
        self._stack.append(value)

    def mark(self) -> None:
        if len(self._metastack) >= MAX_OPEN_MARKS:
            raise CheckpointError(f"its pickle has more than {MAX_OPEN_MARKS} open marks")
        self._metastack.append(self._stack)
        self._stack = []

    def build_tuple_to_mark(self) -> None:
        items = self._pop_mark()
        self._spend(CONTAINER_COST + ITEM_COST * len(items))
        self._stack.append(tuple(items))

    def build_tuple(self, n: int) -> None:
        if len(self._stack) < n:
            raise IndexError
        self._spend(CONTAINER_COST)
        self._stack[-n:] = [tuple(self._stack[-n:])]

    def append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def appends(self) -> None:
        items = self._pop_mark()
        self._extend(items)

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise CheckpointError(f"its pickle appends to a {type(target).__name__}")
        self._spend(ITEM_COST * len(items))
        target.extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        items = self._pop_mark()
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise CheckpointError(f"its pickle sets items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Tuples are refused as keys: hashing deeply nested ones would crash the process.
            if not (type(key) in (str, int, bool, bytes, type(None)) or isinstance(key, PickleStub)):
                raise CheckpointError(f"its pickle has a dictionary key of type {type(key).__name__}")
            if type(key) is int and abs(key) >= MAX_KEY:
                raise CheckpointError(f"its pickle has a dictionary key of more than {MAX_KEY.bit_length() - 1} bits")
            if key in target:
                raise CheckpointError("its pickle has a dictionary with a duplicate key; the file is damaged")
            target[key] = value

    # Memo

    def get(self, n_bytes: int) -> None:
        self._stack.append(self._memo[self._read_uint(n_bytes)])

    def put(self, n_bytes: int) -> None:
        self._spend(MEMO_COST)
        self._memo[self._read_uint(n_bytes)] = self._stack[-1]

    def memoize(self) -> None:
        self._spend(MEMO_COST)
        self._memo[len(self._memo)] = self._stack[-1]

    # Globals and objects

    def _find_global(self, module: object, name: object) -> None:
        if not (type(module) is str and type(name) is str):
            raise CheckpointError("its pickle has a global whose name is not a string")
        if (module, name) not in self._safe_globals:
            shown = f"{module}.{name}"
            shown = shown if len(shown) <= 100 else shown[:100] + "..."
            raise CheckpointError(
                f"its pickle refers to {shown!r}, which is not allowed; if the file can be trusted, load it with the "
                "program that made it and save plain tensors"
            )
        self._stack.append(self._safe_globals[module, name])

    def load_global(self) -> None:
        module = self._read_line()
        self._find_global(module, self._read_line())

    def load_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._find_global(module, name)

    def reduce(self) -> None:
        arguments, constructor = self._stack.pop(), self._stack.pop()
        if type(constructor) is not Constructor or type(arguments) is not tuple:
            raise CheckpointError(f"its pickle calls a {type(constructor).__name__} with a {type(arguments).__name__}")
        self._spend(CONTAINER_COST)
        value = constructor.construct(arguments)
        if type(value) is bytes:  # made of a string of the pickle, which a valid one does once
            self._constructed_bytes += len(value)
            if self._constructed_bytes > len(self._data):
                raise CheckpointError("its pickle creates more bytes than it has")
        self._stack.append(value)

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, PickleStub):
            target.set_state(state)
        elif type(target) is not dict:  # an OrderedDict's attributes are ignored
            raise CheckpointError(f"its pickle sets the state of a {type(target).__name__}")

    def load_persistent(self) -> None:
        if self._persistent_load is None:
            raise CheckpointError("its pickle refers to something outside")
        self._stack.append(self._persistent_load(self._stack.pop()))

    def protocol(self) -> None:
        version = self._read_uint(1)
        if version > 5:
            raise CheckpointError(f"its pickle has protocol {version}, newer than 5")

    def frame(self) -> None:
        self._read_bytes(8)


_OPCODE_HANDLERS: dict[int, Callable[[_SafeUnpickler], None]] = {
    0x80: _SafeUnpickler.protocol,
    0x95: _SafeUnpickler.frame,
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("J"): _SafeUnpickler.push_int32,
    ord("K"): lambda m: m.push_uint(1),
    ord("M"): lambda m: m.push_uint(2),
    ord("G"): _SafeUnpickler.push_float,
    0x8A: lambda m: m.push_long(1),
    0x8B: lambda m: m.push_long(4),
    ord("X"): lambda m: m.push_str(4),
    0x8C: lambda m: m.push_str(1),
    0x8D: lambda m: m.push_str(8),
    ord("B"): lambda m: m.push_bytes(4),
    ord("C"): lambda m: m.push_bytes(1),
    0x8E: lambda m: m.push_bytes(8),
    ord("("): _SafeUnpickler.mark,
    ord(")"): lambda m: m.push(()),
    ord("t"): _SafeUnpickler.build_tuple_to_mark,
    0x85: lambda m: m.build_tuple(1),
    0x86: lambda m: m.build_tuple(2),
    0x87: lambda m: m.build_tuple(3),
    ord("]"): lambda m: m.push_container([]),
    ord("a"): _SafeUnpickler.append,
    ord("e"): _SafeUnpickler.appends,
    ord("}"): lambda m: m.push_container({}),
    ord("s"): _SafeUnpickler.set_item,
    ord("u"): _SafeUnpickler.set_items,
    ord("h"): lambda m: m.get(1),
    ord("j"): lambda m: m.get(4),
    ord("q"): lambda m: m.put(1),
    ord("r"): lambda m: m.put(4),
    0x94: _SafeUnpickler.memoize,
    ord("c"): _SafeUnpickler.load_global,
    0x93: _SafeUnpickler.load_stack_global,
    ord("R"): _SafeUnpickler.reduce,
    0x81: _SafeUnpickler.reduce,  # NEWOBJ: the constructor makes the instance
    ord("b"): _SafeUnpickler.build,
    ord("Q"): _SafeUnpickler.load_persistent,
}


def _children(value: object) -> Iterable[object]:
    if type(value) is dict:
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        return value
    return value.children() if isinstance(value, PickleStub) else ()


def _check_size(value: object, limit: int) -> None:
    """Refuse a value that is cyclic, deeper than `MAX_DEPTH`, or larger than `limit` when expanded."""
    sizes: dict[int, tuple[int, int]] = {}
    """Id of a finished container → its expanded size and depth; `value` keeps all of them alive."""
    open_ids: set[int] = set()
    todo: list[tuple[object, bool]] = [(value, False)]
    while todo:
        item, is_expanded = todo.pop()
        if not is_expanded:
            if id(item) in sizes:
                continue
            if id(item) in open_ids:
                raise CheckpointError("its pickle refers to itself")
            open_ids.add(id(item))
            todo.append((item, True))
            todo.extend((child, False) for child in _children(item) if isinstance(child, _CONTAINER_TYPES))
            continue
        open_ids.discard(id(item))
        size, depth = 1, 0
        for child in _children(item):
            child_size, child_depth = sizes.get(id(child), (1, 0))
            size += child_size
            depth = max(depth, child_depth)
        if size > limit:
            raise CheckpointError(f"its pickle grows beyond {limit} values")
        if depth >= MAX_DEPTH:
            raise CheckpointError(f"its pickle is nested more than {MAX_DEPTH} deep")
        sizes[id(item)] = size, depth + 1


_CONTAINER_TYPES = (list, tuple, dict, PickleStub)
