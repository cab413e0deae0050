"""Text to store: what is written, that nothing is lost, and that the bytes depend on the text alone."""

import hashlib
import json
from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lt_data import DataError, Document, SourceOptions, Tokenizer, TokenStore, prepare


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def as_documents(texts: list[str]) -> list[Document]:
    return [Document(text=text, source=str(i)) for i, text in enumerate(texts)]


def test_documents_in_memory(tokenizer, texts, tmp_path):
    """Texts of an iterator, documents and records of a list, a table or a generator make the same store."""
    given = {
        "texts": iter(texts),
        "documents": as_documents(texts),
        "records": [{"text": text, "n": 1} for text in texts],
        "generator": ({"text": text} for text in texts),
        "table": datasets.Dataset.from_dict({"text": texts}),
    }
    stores = {}
    for name, documents in given.items():
        manifest = prepare(documents, tokenizer=tokenizer, out=tmp_path / name)
        assert (manifest.documents, manifest.read.documents) == (len(texts) - 1, len(texts))
        stores[name] = contents(tmp_path / name)
    assert all(store == stores["texts"] for store in stores.values())
    fields = SourceOptions(tokens_field="ids", on_bad="skip")
    given_ids = [{"ids": [5, 6]}, {"ids": None}, {"ids": []}]
    manifest = prepare(given_ids, options=fields, tokenizer=tokenizer, out=tmp_path / "ids", bos=False, eos=False)
    assert (manifest.skipped, manifest.left_out["empty"].documents) == ({"null": 1}, 1)
    assert TokenStore(tmp_path / "ids")[0].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("It is a text.", r"a single path or text; give a list of paths or texts as \{\"text\": text\}"),
        (["It is a text."], r"no such file or folder \(a text in memory: \{'text': text\}\)"),
        ([Path(), "line\nline"], r"no such file or folder \(a text in memory"),
        (["nul\0"], r"no such file or folder \(a text in memory"),
        (["word" * 9999], r"no such file or folder \(a text in memory"),
        (["see https://a.b " * 9999], r"no such file or folder \(a text in memory"),
        (iter([str(Path(__file__))]), "is a path; give a list of paths, or texts as"),
        ([{"text": "a"}, 3], r"document 2: a int; give a text, a dict or a lt_data\.Document"),
        (iter(["a", "\ud800"]), "document 2: character 0 is half of a surrogate pair"),
        ([{"body": "a"}], r"document 1: no field 'text' \(found fields 'body'\).*--on-bad skip"),
    ],
)
def test_what_is_neither_a_source_nor_a_document(documents, message, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message) as info:
        prepare(documents, tokenizer=tokenizer, out="out")
    assert len(str(info.value)) < 250
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=12).filter(any),
    bos=st.booleans(),
    eos=st.booleans(),
    shard_tokens=st.integers(1, 100),
)
def test_any_texts_policy_and_shard_size(tmp_path_factory, tokenizer, texts, bos, eos, shard_tokens):
    out = tmp_path_factory.mktemp("any") / "store"
    prepare(as_documents(texts), tokenizer=tokenizer, out=out, bos=bos, eos=eos, shard_tokens=shard_tokens)
    store = TokenStore(out)
    store.verify()
    expected = [
        [*([0] if bos else []), *ids.tolist(), *([1] if eos else [])]
        for ids in tokenizer.encode_batch(texts)
        if ids.size
    ]
    assert [store[i].tolist() for i in range(store.n_documents)] == expected
    assert store.tokens(0, store.n_tokens).tolist() == [token for document in expected for token in document]
    for shard in store.manifest.shards:
        assert shard.tokens <= shard_tokens or shard.documents == 1


def test_sources_are_recorded_and_progress_counts_their_bytes(tmp_path, tokenizer):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(b"hello")
    (tmp_path / "in/b.jsonl").write_bytes(b'{"body": "one"}\n{"body": "two"}\n')
    seen: list[tuple[int, int, str]] = []
    manifest = prepare(
        [tmp_path / "in"],
        tokenizer=tokenizer,
        out=tmp_path / "deep/er/out",
        options=SourceOptions(text_field="body"),
        progress=lambda *report: seen.append(report),
    )
    assert (manifest.documents, manifest.text_bytes) == (3, 11)
    assert [(Path(file.path).name, file.bytes) for file in manifest.sources.listed] == [("a.txt", 5), ("b.jsonl", 32)]
    assert manifest.sources.listed[0].sha256 == hashlib.sha256(b"hello").hexdigest()
    assert seen == [(37, 37, "bytes")]


@pytest.mark.parametrize(("highest", "dtype"), [(65498, "uint16"), (65499, "uint32"), (70000, "uint32")])
def test_dtype_follows_the_limit_of_megatron(tmp_path, tokenizer, highest, dtype):
    model = json.loads(tokenizer.files["tokenizer.json"])
    del model["model"]["vocab"]["x"]
    model["model"]["vocab"]["x"] = highest
    model["model"]["merges"] = []
    model["model"]["vocab"] = {t: i for t, i in model["model"]["vocab"].items() if len(t) == 1 or t.startswith("<|")}
    changed = Tokenizer.from_bytes({**tokenizer.files, "tokenizer.json": json.dumps(model).encode()})
    assert changed.vocab_size == highest + 1
    manifest = prepare(as_documents(["axa"]), tokenizer=changed, out=tmp_path / "out")
    assert manifest.dtype == dtype
    ids = TokenStore(tmp_path / "out")[0]
    assert ids.dtype == dtype
    assert ids[2] == highest
    assert (tmp_path / "out/shards/00000.idx").read_bytes()[17] == {"uint16": 8, "uint32": 4}[dtype]


def test_fingerprint_names_tokens_and_policy_not_paths(tmp_path, tokenizer):
    def fingerprint(name: str, texts: list[str], **options: bool) -> str:
        (tmp_path / name).mkdir()
        for i, text in enumerate(texts):
            (tmp_path / name / f"{i}.txt").write_text(text, encoding="utf-8")
        out = tmp_path / f"{name}-store"
        return prepare([tmp_path / name], tokenizer=tokenizer, out=out, **options).fingerprint

    base = fingerprint("base", ["one", "two"])
    assert fingerprint("other-place", ["one", "two"]) == base
    assert fingerprint("other-order", ["two", "one"]) != base
    assert fingerprint("other-boundaries", ["onetwo"]) != base
    assert fingerprint("no-eos", ["one", "two"], eos=False) != base


@pytest.mark.parametrize("nothing", [[], ["", ""]])
def test_empty_corpus(tmp_path, tokenizer, nothing):
    with pytest.raises(DataError, match=r"no text in the documents given.*check the sources"):
        prepare(as_documents(nothing), tokenizer=tokenizer, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.bin").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=r"no text in 0 files \(folders are searched for \.txt .*check the sources"):
        prepare([tmp_path / "in"], tokenizer=tokenizer, out=tmp_path / "out")
    with pytest.raises(DataError, match="no text in 0 files"):
        prepare([tmp_path / "in"], tokenizer=tokenizer, out=tmp_path / "out")


def test_options_that_cannot_be(tmp_path, tokenizer):
    bare = Tokenizer.from_bytes({"tokenizer.json": tokenizer.files["tokenizer.json"]}, name="bare")
    for name in ("bos", "eos"):
        with pytest.raises(DataError, match=rf"{name} = True: tokenizer bare has no {name}_token.*--no-{name}"):
            prepare([{"text": "a"}], tokenizer=bare, out=tmp_path / "out", **{"bos": False, "eos": False, name: True})
    for name in ("workers", "shard_tokens", "unit_bytes"):
        with pytest.raises(DataError, match=f"{name} = 0: at least 1"):
            prepare([{"text": "a"}], tokenizer=tokenizer, out=tmp_path / "out", **{name: 0})
    assert list(tmp_path.iterdir()) == []
    assert prepare([{"text": "a"}], tokenizer=bare, out=tmp_path / "out", bos=False, eos=False).tokens == 1


def test_out_is_refused_when_it_is_not_ours(tmp_path, tokenizer):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work", encoding="utf-8")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text('{"format": "another"}', encoding="utf-8")
    for out in (foreign, tmp_path / "file", tmp_path / "other"):
        with pytest.raises(DataError, match=r"holds a token store already|is not a token store"):
            prepare(as_documents(["a"]), tokenizer=tokenizer, out=out)
    assert contents(tmp_path) == {
        "foreign/thesis.tex": b"years of work",
        "file": b"x",
        "other/manifest.json": b'{"format": "another"}',
    }
