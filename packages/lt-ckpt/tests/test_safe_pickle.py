import copyreg
import io
import os
import pickle
import random
import struct
import sys
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lt_ckpt import CheckpointError
from lt_ckpt.torchfile.pickle_writer import Call, Global, PersistentId, PickledObject, dumps
from lt_ckpt.torchfile.safe_globals import TORCH_SAFE_GLOBALS
from lt_ckpt.torchfile.safe_pickle import MAX_DEPTH, Constructor, PickleStub, loads

WATCHED = ("import", "exec", "compile", "open", "os.", "subprocess.", "socket.", "pickle.find_class")
seen: list[str] = []
watching = False


def note(event, args):
    if watching and event.startswith(WATCHED):
        seen.append(event)


sys.addaudithook(note)  # a hook cannot be taken out again, so there is one, and it is asked to watch


def load(data, table=TORCH_SAFE_GLOBALS, **more):
    """`loads`, with a look at everything that the interpreter is asked to do meanwhile."""
    global watching
    seen.clear()
    watching = True
    try:
        return loads(data, table, "some file", **more)
    finally:
        watching = False
        assert seen == []


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(-9, 9), inner, max_size=5)
    ),
    max_leaves=25,
)


@settings(max_examples=150, deadline=None)
@given(plain, st.integers(2, 5))
@example([list(range(2500)), dict.fromkeys(range(1001)), ["x" * 300] * 3], 4)
def test_plain_values_come_back_from_every_protocol(value, protocol):
    assert load(pickle.dumps(value, protocol)) == value


def without_bytes(value):
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return type(value)(map(without_bytes, value))
    return {key: without_bytes(item) for key, item in value.items()} if isinstance(value, dict) else value


@settings(max_examples=150, deadline=None)
@given(plain.map(without_bytes))
@example([list(range(2500)), dict.fromkeys(range(1001)), [f"{i}" for i in range(700)] * 2, (1, 2, 3, 4)])
def test_what_we_write_is_read_by_python_and_by_us(value):
    assert pickle.loads(dumps(value)) == value
    assert load(dumps(value)) == value


class Evil:
    """Pickled so that Python makes a file when it reads it."""

    def __init__(self, path, protocol_call):
        self.path, self.protocol_call = path, protocol_call

    def __reduce__(self):
        return self.protocol_call(str(self.path))


def line(module, name):
    return f"c{module}\n{name}\n".encode()


def text(value):
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def hostile(path):
    """Name → a pickle that makes the file `path` when Python's own unpickler reads it."""
    touch = text(f"touch {path}")
    write = text(f"open({str(path)!r}, 'w').close()")
    copyreg._extension_registry.pop(("os", "system"), None)  # pyright: ignore[reportAttributeAccessIssue]
    mapped = line("builtins", "map") + line("posix", "system") + b"]" + touch + b"a\x86R"
    getattr_chain = line("builtins", "getattr") + line("builtins", "__import__") + text("os") + b"\x85R"
    return {
        "reduce": pickle.dumps(Evil(path, lambda p: (os.system, (f"touch {p}",))), 2),
        "reduce, protocol 4": pickle.dumps(Evil(path, lambda p: (os.system, (f"touch {p}",))), 4),
        "reduce, protocol 0": pickle.dumps(Evil(path, lambda p: (os.system, (f"touch {p}",))), 0),
        "eval": pickle.dumps(Evil(path, lambda p: (eval, (f"open({p!r}, 'w').close()",))), 2),
        "exec": b"\x80\x02" + line("builtins", "exec") + write + b"\x85R.",
        "inst": b"(" + b"S'touch " + str(path).encode() + b"'\n" + b"iposix\nsystem\n.",
        "obj": b"(" + line("posix", "system") + touch + b"o.",
        "newobj": b"\x80\x02" + line("builtins", "tuple") + mapped + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + line("builtins", "tuple") + mapped + b"\x85}\x92.",
        "stack_global": b"\x80\x04" + text("posix") + text("system") + b"\x93" + touch + b"\x85R.",
        "dotted name": b"\x80\x04" + text("shutil") + text("os.system") + b"\x93" + touch + b"\x85R.",
        "getattr chain": b"\x80\x02" + getattr_chain + text("system") + b"\x86R" + touch + b"\x85R.",
        "setstate": b"\x80\x02" + line("types", "SimpleNamespace") + b")R" + b"}" + text("__setstate__")
        + line("posix", "system") + b"sb" + touch + b"b.",
        "extension": b"\x80\x02\x82\x07" + touch + b"\x85R.",
        "reduce of a type": b"\x80\x02" + line("builtins", "list") + mapped + b"\x85R.",
    }  # fmt: skip


@pytest.fixture
def extension():
    copyreg.add_extension("posix", "system", 7)
    yield
    copyreg.remove_extension("posix", "system", 7)
    copyreg.clear_extension_cache()


def test_nothing_is_executed(tmp_path, extension):
    for i, name in enumerate(hostile(tmp_path)):
        path = tmp_path / f"made-{i}"
        data = hostile(path)[name]
        with pytest.raises(CheckpointError, match=r"some file: its pickle (uses opcode|refers to).*nothing .*executed"):
            load(data)
        assert not path.exists()
        result = pickle.loads(data)
        if hasattr(result, "wait"):
            result.wait()
        assert path.exists(), f"{name}: not hostile, so the test shows nothing"


def test_the_message_names_what_was_asked_for():
    with pytest.raises(CheckpointError, match=r"'posix\.system'.*can be trusted.*plain tensors"):
        load(pickle.dumps(os.system))
    with pytest.raises(CheckpointError, match=r"'a{90,100}\.\.\.'"):
        load(b"\x80\x02" + line("a" * 400, "b") + b".")
    with pytest.raises(CheckpointError, match="ValueError at byte"):
        load(b"\x80\x02" + line("a" * 700, "b") + b".")


@pytest.mark.parametrize(
    "module_and_name",
    [
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch", "FloatStorage.__init__"),
        ("torch", ""),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("collections", "OrderedDict.update"),
        ("", "OrderedDict"),
    ],
)
def test_names_near_the_allowed_ones_are_refused(module_and_name):
    module, name = module_and_name
    with pytest.raises(CheckpointError, match="not allowed"):
        load(b"\x80\x04" + text(module) + text(name) + b"\x93.")


ordered = line("collections", "OrderedDict")
size = line("torch", "Size")
rebuild = line("torch._utils", "_rebuild_tensor_v2")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        # What stands for classes and functions cannot be changed, and does not run with other arguments.
        (ordered + b"}" + text("make") + text("x") + b"sb.", "sets the state of a Constructor"),
        (ordered + b"N}" + text("make") + text("x") + b"s\x86b.", "sets the state of a Constructor"),
        (line("torch", "float32") + b"}" + text("code") + text("x") + b"sb.", "sets the state of a TorchDtype"),
        (line("torch", "float32") + b")R.", "calls a TorchDtype"),
        (ordered + b"]\x85R.", "arguments to OrderedDict"),
        (ordered + b"]R.", "calls a Constructor with a list"),
        (text("x") + b")R.", "calls a str"),
        (size + text("ab") + b"\x85R.", "shape, stride or offset"),
        (size + b"(K\x01J\xff\xff\xff\xfft\x85R.", "shape, stride or offset"),
        (size + b"(\x88t\x85R.", "shape, stride or offset"),
        (size + b"(" + b"K\x01" * 65 + b"t\x85R.", "shape, stride or offset"),
        (rebuild + b")R.", "arguments to _rebuild_tensor_v2"),
        (rebuild + b"(NNNNNNt" + b"R.", "without a storage"),
        (line("torch._tensor", "_rebuild_from_type_v2") + b"(" + size + b"NNNtR.", "of an unknown class"),
        (line("torch._tensor", "_rebuild_from_type_v2") + b"(" + size + line("torch", "Tensor") + b"((K\x01tt}tR.",
         "something other than a tensor"),
        (line("torch._utils", "_rebuild_parameter") + b"(NNNtR.", "parameter without a tensor"),
        (line("_codecs", "encode") + text("x") + text("rot13") + b"\x86R.", "something other than bytes"),
        (line("torch_xla.utils.serialization", "TensorReference") + b")\x81}" + text("tid") + text("..") + b"sb.",
         "without a number"),
        (line("torch_xla.utils.serialization", "TensorReference") + b")\x81}" + text("tid") + b"K\x01s"
         + text("__class__") + b"Nsb.", "without a number"),
        # Containers take only what is theirs.
        (b")K\x01a.", "appends to a tuple"),
        (b"}K\x01a.", "appends to a dict"),
        (b"]K\x01K\x02s.", "sets items of a list"),
        (b"}(K\x01u.", "sets items of a dict"),
        (b"}K\x01\x85K\x02s.", "dictionary key of type tuple"),
        (b"}G\x3f\xf0\0\0\0\0\0\0K\x02s.", "dictionary key of type float"),
        (b"}]K\x02s.", "dictionary key of type list"),
        (b"}(K\x01NK\x01Nu.", "a duplicate key"),
        # Not whole.
        (b"", "IndexError"),
        (b"K", "IndexError"),
        (b".", "values on the stack"),
        (b"NN.", "values on the stack"),
        (b"N(N.", "values on the stack"),
        (b"N.N.", "2 bytes follow"),
        (b"t.", "IndexError"),
        (b"\x86.", "IndexError"),
        (b"N(\x85.", "IndexError"),
        (b"h\x05.", "KeyError"),
        (b"q\x05.", "IndexError"),
        (b"X\xff\xff\xff\xffabc.", "IndexError"),
        (b"\x8d" + b"\xff" * 8 + b"abc.", "IndexError"),
        (b"\x8e" + b"\x7f" * 8 + b"abc.", "IndexError"),
        (b"\x8b\xff\xff\xff\x7fabc.", "an integer of 2147483647 bytes"),
        (b"\x8b\xff\xff\xff\xffabc.", "an integer of 4294967295 bytes"),
        (b"\x8a\x21" + b"\1" * 33 + b".", "an integer of 33 bytes"),
        (b"X\x01\0\0\0\xff.", "UnicodeDecodeError"),
        (b"X\x03\0\0\0\xed\xa0\x80.", "UnicodeDecodeError"),
        (b"\x95" + b"\xff" * 3, "IndexError"),
        (b"\x80\x06N.", "protocol 6"),
        (b"K\x01Q.", "refers to something outside"),
        (b"\x80\x04K\x01K\x02\x93.", "a global whose name is not a string"),
        (b"c\xff\xfe\nx\n.", "UnicodeDecodeError"),
        (b"ctorch\nSize", "ValueError"),
    ],
)  # fmt: skip
def test_a_pickle_that_is_not_plain_and_whole_is_refused(body, message):
    with pytest.raises(CheckpointError, match=message):
        load(body)


def test_opcodes_of_other_files_are_refused():
    known = set(b"\x80\x95NJKMGX\x8c\x8dBC\x8e()t\x85\x86\x87]ae}suhjqr\x94c\x93R\x81bQ.\x88\x89\x8a\x8b")
    for opcode in set(range(256)) - known:
        with pytest.raises(CheckpointError, match=f"opcode 0x{opcode:02x}"):
            load(bytes([opcode]) + b"\0" * 9 + b".")


def quick(data, **more):
    """CPU seconds of a load that must fail."""
    began = time.process_time()
    with pytest.raises(CheckpointError) as raised:
        load(data, **more)
    assert time.process_time() - began < 30
    return str(raised.value)


def test_bombs_are_small():
    body = b"\x80\x04]\x94"
    for i in range(40):
        body += b"](" + b"h" + bytes([i]) + b"".join(b"h" + bytes([i]) for _ in range(9)) + b"e\x94"
    stacked = body + b"t."  # leaves 41 lists on the stack; the mark was never set
    assert "IndexError" in quick(stacked)
    nested = b"\x80\x04(" + body[2:] + b"t."
    assert "grows beyond 4000000 values" in quick(nested)
    assert "open marks" in quick(b"\x80\x04" + b"](" * 20_000 + b"e" * 20_000 + b".")
    assert "grows beyond" in quick(b"\x80\x04)" + b"\x85" * 200_000 + b".")
    assert "nested more than" in quick(b"\x80\x04N" + b"\x85" * 65 + b".")
    assert "refers to itself" in quick(b"\x80\x04]\x94h\0a.")
    assert "refers to itself" in quick(b"\x80\x04}\x94" + text("a") + b"]h\0as.")
    assert "more than 1000 opcodes" in quick(b"}" * 2000, max_opcodes=1000)
    assert load(b"\x80\x04N" + b"\x85" * (MAX_DEPTH - 1) + b".") is not None
    assert load(b"]r\xff\xff\xff\xff.") == []  # a large memo number takes no room
    shared = load(b"\x80\x04](]\x94h\0h\0e.")
    assert shared == [[], [], []]


def test_persistent_ids_reach_the_function_and_nothing_else():
    given_ids = []

    def persistent(reference):
        given_ids.append(reference)
        return "here"

    data = dumps([PersistentId(("storage", 1)), PersistentId(("storage", 2))])
    assert load(data, persistent_load=persistent) == ["here", "here"]
    assert given_ids == [("storage", 1), ("storage", 2)]


class Box(PickleStub):
    def __init__(self):
        self.state = None

    def set_state(self, state):
        self.state = state

    def children(self):
        return [self.state]


TABLE = {("m", "Box"): Constructor(lambda arguments: Box()), ("m", "name"): "inert"}


def test_stands_take_the_state_of_objects():
    data = dumps(
        {"a": PickledObject(Global("m", "Box"), {"x": [1]}), "b": Call(Global("m", "Box")), "c": Global("m", "name")}
    )
    made = load(data, TABLE)
    assert made["a"].state == {"x": [1]}
    assert (made["b"].state, made["c"]) == (None, "inert")
    assert load(dumps({}), {}) == {}
    loop = b"\x80\x02" + line("m", "Box") + b")\x81q\0}" + text("x") + b"h\0sb."
    with pytest.raises(CheckpointError, match="refers to itself"):
        load(loop, TABLE)


def test_ordered_dicts_lose_their_attributes():
    data = dumps(Call(Global("collections", "OrderedDict"), (), {"a": 1}))
    with_state = data[:-1] + b"}" + text("_metadata") + b"}sb."
    assert load(with_state) == {"a": 1}
    assert type(load(with_state)) is dict


SEED = dumps(
    {
        "tensor": Call(Global("torch", "Size"), ((2, 3),)),
        "list": [1, 2.5, None, True, "text", Global("torch", "float32"), Call(Global("collections", "OrderedDict"))],
        "box": PickledObject(
            Global(*next(key for key in TORCH_SAFE_GLOBALS if key[1] == "TensorReference")), {"tid": 3}
        ),
    }
)
KINDS = {"NoneType", "bool", "int", "float", "str", "bytes", "list", "tuple", "dict"}
KINDS |= {"TorchSize", "TorchDtype", "TensorReference", "StorageKind", "_ClassName", "Constructor"}


def kinds(value):
    yield type(value).__name__
    if isinstance(value, list | tuple):
        for item in value:
            yield from kinds(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from kinds(key)
            yield from kinds(item)


@settings(max_examples=600, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_damaged_pickle_is_refused_or_still_plain(rng: random.Random):
    seeds = [SEED, pickle.dumps({"a": [1, (2, 3)], "b": {"c": b"x"}}, 4), *hostile("/nowhere/made").values()]
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(0, 5)):
        place = rng.randrange(len(data) + 1)
        piece = rng.choice([bytes([rng.randrange(256)]), rng.choice(seeds)[: rng.randrange(40)], b"R", b"b", b"\x81"])
        data[place : place + rng.choice([0, len(piece)])] = piece
    try:
        value = load(bytes(data))
    except CheckpointError:
        return
    assert set(kinds(value)) <= KINDS


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_random_bytes_are_refused_or_plain(data):
    try:
        value = load(data)
    except CheckpointError:
        return
    assert set(kinds(value)) <= KINDS


def test_the_table_is_as_pickle_itself_writes_it():
    class Writer(pickle._Pickler):  # pyright: ignore[reportAttributeAccessIssue]
        """Python's pickler, which does not look whether a class is where it says."""

        def save_global(self, obj, name=None):
            self.write(b"c" + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
            self.memoize(obj)

    class TensorReference:
        def __init__(self):
            self.tid = 12

    Writer.dispatch = {**Writer.dispatch, type: Writer.save_global}
    TensorReference.__module__, TensorReference.__qualname__ = "torch_xla.utils.serialization", "TensorReference"
    buffer = io.BytesIO()
    Writer(buffer, 2).dump([TensorReference()])
    assert load(buffer.getvalue())[0].tid == 12
    assert buffer.getvalue() == dumps(
        [PickledObject(Global(TensorReference.__module__, "TensorReference"), {"tid": 12})]
    )
