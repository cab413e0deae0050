"""Text to store: what is written, that nothing is lost, and that the bytes depend on the text alone."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lt_data import DataError, Document, SourceOptions, Tokenizer, TokenStore, prepare, prepare_documents
from lt_data.store.megatron import decode_index


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def as_documents(texts: list[str]) -> list[Document]:
    return [Document(text=text, source=str(i)) for i, text in enumerate(texts)]


def test_files_and_manifest(store: TokenStore, texts: list[str], tokenizer: Tokenizer) -> None:
    files = contents(store.path)
    manifest = json.loads(files["manifest.json"])
    shards = manifest["shards"]
    assert len(shards) > 3
    assert set(files) == {
        "manifest.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        *(f"shards/{i:05d}.{kind}" for i in range(len(shards)) for kind in ("bin", "idx")),
    }
    assert (manifest["format"], manifest["version"], manifest["dtype"]) == ("lt-data-store", 1, "uint16")
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert manifest["documents"] == len(texts) - 1 == sum(shard["documents"] for shard in shards)
    assert manifest["left_out"] == {"empty": {"documents": 1, "text_bytes": 0, "tokens": 0}}
    assert manifest["tokenizer"]["sha256"] == tokenizer.sha256
    assert manifest["tokens"] == sum(ids.size for ids in tokenizer.encode_batch(texts)) + 2 * (len(texts) - 1)
    for shard in shards:
        content, index = files[f"shards/{shard['name']}.bin"], files[f"shards/{shard['name']}.idx"]
        assert shard["tokens"] <= 2000
        assert len(content) == 2 * shard["tokens"]
        assert hashlib.sha256(content).hexdigest() == shard["sha256"]
        assert hashlib.sha256(index).hexdigest() == shard["idx_sha256"]
        lengths, dtype = decode_index(index, "")
        assert (lengths.size, lengths.sum(), dtype) == (shard["documents"], shard["tokens"], "uint16")


def test_texts_in_memory_are_documents(tokenizer: Tokenizer, texts: list[str], tmp_path: Path) -> None:
    kept = [text for text in texts if text]
    prepare_documents(iter(kept), tokenizer=tokenizer, out=tmp_path / "texts")
    prepare_documents([Document(text=text) for text in kept], tokenizer=tokenizer, out=tmp_path / "documents")
    assert contents(tmp_path / "texts") == contents(tmp_path / "documents")
    assert TokenStore(tmp_path / "texts").n_documents == len(kept)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("a text", "a single text; pass a list of texts"),
        (["a", {"text": "b"}], r"document 2: a dict; give a text or a lt_data\.Document"),
        (["a", "\ud800"], "document 2: character 0 is half of a surrogate pair"),
    ],
)
def test_what_is_no_text_in_memory(documents: list[str], message: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        prepare_documents(documents, tokenizer=tokenizer, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["It is a text.", "line\nline", "nul\0", "word" * 9999, "see https://a.b " * 9999])
def test_a_text_is_not_taken_for_a_path(text: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for sources in ([text], [tmp_path, text]):
        with pytest.raises(
            DataError, match=r"no such file or folder \(texts in memory go to prepare_documents\)"
        ) as info:
            prepare(sources, tokenizer=tokenizer, out=tmp_path / "out")
        assert len(str(info.value)) < 250
    with pytest.raises(DataError, match="a single path; pass a list of paths") as info:
        prepare(text, tokenizer=tokenizer, out=tmp_path / "out")
    assert len(str(info.value)) < 250


def test_every_document_in_order(store: TokenStore, texts: list[str], tokenizer: Tokenizer) -> None:
    kept = [text for text in texts if text]
    assert store.n_documents == len(kept)
    for i, text in enumerate(kept):
        ids = store[i]
        assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert ids[1:-1].tolist() == tokenizer.encode_batch([text])[0].tolist()
        assert store.tokenizer().decode(ids[1:-1]) == text


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(max_size=30), min_size=1, max_size=12).filter(any),
    bos=st.booleans(),
    eos=st.booleans(),
    shard_tokens=st.integers(1, 100),
)
def test_any_texts_policy_and_shard_size(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Tokenizer,
    texts: list[str],
    bos: bool,
    eos: bool,
    shard_tokens: int,
) -> None:
    out = tmp_path_factory.mktemp("any") / "store"
    prepare_documents(as_documents(texts), tokenizer=tokenizer, out=out, bos=bos, eos=eos, shard_tokens=shard_tokens)
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


def test_any_number_of_workers_gives_the_same_bytes(
    tmp_path: Path, documents: list[Document], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lt_data.tokenizing.encode._BATCH_BYTES", 500)
    stores = []
    for workers in (1, 3):
        out = tmp_path / str(workers)
        manifest = prepare_documents(documents, tokenizer=tokenizer, out=out, workers=workers, shard_tokens=1500)
        assert TokenStore(out).manifest == manifest
        stores.append(contents(out))
    monkeypatch.undo()
    prepare_documents(documents, tokenizer=tokenizer, out=tmp_path / "whole", shard_tokens=1500)
    assert stores[0] == stores[1] == contents(tmp_path / "whole")


def test_worker_errors_reach_the_caller(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, documents: list[Document]
) -> None:
    monkeypatch.setattr("lt_data.tokenizing.encode._BATCH_DOCUMENTS", 2)
    broken = [*documents[:9], Document(text="a\ud800b", source="bad.jsonl:7"), *documents]
    with pytest.raises(DataError, match=r"bad\.jsonl:7: character 1 is half of a surrogate pair"):
        prepare_documents(broken, tokenizer=tokenizer, out=tmp_path / "out", workers=2)
    assert list(tmp_path.iterdir()) == []


def test_sources_are_recorded_and_progress_counts_their_bytes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_bytes(b"hello")
    (tmp_path / "in/b.jsonl").write_bytes(b'{"body": "one"}\n{"body": "two"}\n')
    seen: list[tuple[int, int, str]] = []
    manifest = prepare(
        [tmp_path / "in"],
        options=SourceOptions(text_field="body"),
        tokenizer=tokenizer,
        out=tmp_path / "deep/er/out",
        progress=lambda *report: seen.append(report),
    )
    assert (manifest.documents, manifest.text_bytes) == (3, 11)
    assert [(Path(file.path).name, file.bytes) for file in manifest.sources.listed] == [("a.txt", 5), ("b.jsonl", 32)]
    assert manifest.sources.listed[0].sha256 == hashlib.sha256(b"hello").hexdigest()
    assert seen == [(37, 37, "bytes")]


def test_special_strings_are_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["a<|eos|>b<|eos|>", "<|bos|><|", "none"]
    manifest = prepare_documents(as_documents(texts), tokenizer=tokenizer, out=tmp_path / "out")
    assert manifest.special_strings == {"<|bos|>": 1, "<|eos|>": 2}
    tokens = TokenStore(tmp_path / "out").tokens(0, manifest.tokens).tolist()
    assert (tokens.count(0), tokens.count(1)) == (3, 3)


@pytest.mark.parametrize(("highest", "dtype"), [(65498, "uint16"), (65499, "uint32"), (70000, "uint32")])
def test_dtype_follows_the_limit_of_megatron(tmp_path: Path, tokenizer: Tokenizer, highest: int, dtype: str) -> None:
    model = json.loads(tokenizer.files["tokenizer.json"])
    del model["model"]["vocab"]["x"]
    model["model"]["vocab"]["x"] = highest
    model["model"]["merges"] = []
    model["model"]["vocab"] = {t: i for t, i in model["model"]["vocab"].items() if len(t) == 1 or t.startswith("<|")}
    changed = Tokenizer.from_bytes({**tokenizer.files, "tokenizer.json": json.dumps(model).encode()})
    assert changed.vocab_size == highest + 1
    manifest = prepare_documents(as_documents(["axa"]), tokenizer=changed, out=tmp_path / "out")
    assert manifest.dtype == dtype
    ids = TokenStore(tmp_path / "out")[0]
    assert ids.dtype == dtype
    assert ids[2] == highest
    assert (tmp_path / "out/shards/00000.idx").read_bytes()[17] == {"uint16": 8, "uint32": 4}[dtype]


def test_fingerprint_names_tokens_and_policy_not_paths(tmp_path: Path, tokenizer: Tokenizer) -> None:
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
def test_empty_corpus(tmp_path: Path, tokenizer: Tokenizer, nothing: list[str]) -> None:
    with pytest.raises(DataError, match=r"no text in the documents given.*check the sources"):
        prepare_documents(as_documents(nothing), tokenizer=tokenizer, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.bin").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=r"no text in 0 files \(folders are searched for \.txt .*check the sources"):
        prepare([tmp_path / "in"], tokenizer=tokenizer, out=tmp_path / "out")
    with pytest.raises(DataError, match="no text in 0 files"):
        prepare([], tokenizer=tokenizer, out=tmp_path / "out")


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_tokenizer_without_bos_or_eos(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    bare = Tokenizer.from_bytes({"tokenizer.json": tokenizer.files["tokenizer.json"]}, name="bare")
    wanted = {"bos": False, "eos": False, name: True}
    with pytest.raises(DataError, match=rf"{name} = True: tokenizer bare has no {name}_token.*--no-{name}"):
        prepare_documents(as_documents(["a"]), tokenizer=bare, out=tmp_path / "out", **wanted)
    prepare_documents(as_documents(["a"]), tokenizer=bare, out=tmp_path / "out", bos=False, eos=False)
    assert TokenStore(tmp_path / "out").n_tokens == 1


@pytest.mark.parametrize("option", ["workers", "shard_tokens"])
def test_bad_numbers(tmp_path: Path, tokenizer: Tokenizer, option: str) -> None:
    with pytest.raises(DataError, match=f"{option} = 0: at least 1"):
        prepare_documents(as_documents(["a"]), tokenizer=tokenizer, out=tmp_path / "out", **{option: 0})


def test_out_is_refused_when_it_is_not_ours(tmp_path: Path, tokenizer: Tokenizer) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work", encoding="utf-8")
    (tmp_path / "file").write_text("x", encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text('{"format": "another"}', encoding="utf-8")
    for out in (foreign, tmp_path / "file", tmp_path / "other"):
        for overwrite in (False, True):
            with pytest.raises(DataError, match=r"not the manifest of a token store|is not a token store"):
                prepare_documents(as_documents(["a"]), tokenizer=tokenizer, out=out, overwrite=overwrite)
    assert contents(tmp_path) == {
        "foreign/thesis.tex": b"years of work",
        "file": b"x",
        "other/manifest.json": b'{"format": "another"}',
    }


def test_overwrite_replaces_a_store_and_only_when_asked(tmp_path: Path, tokenizer: Tokenizer) -> None:
    out = tmp_path / "store"
    out.mkdir()  # an empty folder is free
    first = prepare_documents(as_documents(["a"]), tokenizer=tokenizer, out=out)
    with pytest.raises(DataError, match=r"holds a token store already.*--overwrite"):
        prepare_documents(as_documents(["b"]), tokenizer=tokenizer, out=out)
    assert TokenStore(out).manifest == first
    (out / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(DataError, match=r"holds notes\.txt beside the store"):
        prepare_documents(as_documents(["b"]), tokenizer=tokenizer, out=out, overwrite=True)
    (out / "notes.txt").unlink()
    second = prepare_documents(as_documents(["b", "c"]), tokenizer=tokenizer, out=out, overwrite=True)
    assert TokenStore(out).manifest == second != first
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_relative_out(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare_documents(as_documents(["a"]), tokenizer=tokenizer, out="store")
    assert TokenStore("store").n_documents == 1


def test_files_have_the_modes_of_the_umask(tmp_path: Path, tokenizer: Tokenizer) -> None:
    before = os.umask(0o027)
    try:
        prepare_documents(as_documents(["a"]), tokenizer=tokenizer, out=tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "out/shards/00000.bin").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the workers")
def test_killed_in_the_middle_leaves_nothing_that_looks_finished(
    tmp_path: Path, tokenizer: Tokenizer, wait_for: Callable[[Callable[[], bool]], None]
) -> None:
    tokenizer.save(tmp_path / "tok")
    (tmp_path / "endless.py").write_text(
        "import itertools, lt_data\n"
        "if __name__ == '__main__':\n"
        "    documents = (lt_data.Document(text='fox ' * 1000, source=str(i)) for i in itertools.count())\n"
        "    lt_data.prepare_documents(documents, tokenizer='tok', out='out', workers=2, shard_tokens=10000)\n",
        encoding="utf-8",
    )
    child = subprocess.Popen([sys.executable, "endless.py"], cwd=tmp_path, start_new_session=True)
    try:
        wait_for(lambda: len(list(tmp_path.glob("out.building/store/shards/*.idx"))) > 2)
        family = members(child.pid)
        assert len(family) >= 3  # the child and its workers
    finally:
        child.kill()
        child.wait()
    assert not (tmp_path / "out").exists()
    wait_for(lambda: not members(child.pid))  # the workers end with their parent
    again = prepare_documents(as_documents(["a"]), tokenizer=tokenizer, out=tmp_path / "out")
    assert TokenStore(tmp_path / "out").manifest == again


def members(session: int) -> list[int]:
    """Processes of a session that are alive."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(path.parent.name))
    return found


def test_ids_are_stored_little_endian(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prepare_documents(as_documents(["x"]), tokenizer=tokenizer, out=tmp_path / "out", bos=False)
    x = int(tokenizer.encode_batch(["x"])[0][0])
    assert (tmp_path / "out/shards/00000.bin").read_bytes() == bytes([x % 256, x // 256, 1, 0])
    assert np.array_equal(TokenStore(tmp_path / "out")[0], [x, 1])
