"""Parts of a job, prepared apart and merged, are the store that one machine makes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lt_data
from lt_data import DataError, Selection, StoreManifest, Tokenizer, TokenStore, merge, pack, part_folder, prepare

Contents = Callable[[Path], dict[str, bytes]]


def prepare_parts(corpus: Path, out: Path, num_parts: int, options: dict[str, Any]) -> list[StoreManifest]:
    return [
        prepare([corpus], out=out, part_index=rank, num_parts=num_parts, **options)
        for rank in reversed(range(num_parts))
    ][::-1]


def same_but_for(one: bytes, two: bytes, names: set[str]) -> bool:
    """Whether two manifests are equal, byte for byte, but for the values of some names."""
    a, b = json.loads(one), json.loads(two)
    for name in names:
        a[name] = b[name]
    return json.dumps(a, indent=2).encode() + b"\n" == two


@pytest.mark.parametrize("num_parts", [2, 4, 13])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.usefixtures("small_batches")
def test_identical_to_one_run(
    fast_path: Path,
    corpus: Path,
    options: dict[str, Any],
    chosen: Selection,
    contents: Contents,
    num_parts: int,
    drop: bool,
) -> None:
    selection = chosen if drop else Selection(min_tokens=15)
    options = {**options, "selection": selection}
    out = fast_path / "store"
    whole = prepare([corpus], out=fast_path / "whole", **options)
    parts = prepare_parts(corpus, out, num_parts, options)
    if num_parts == 13:
        assert any(part.documents == 0 for part in parts)  # fewer files than ranks
    merged = merge(out)
    assert TokenStore(out).manifest == merged
    one, several = contents(fast_path / "whole"), contents(out)
    assert same_but_for(one.pop("manifest.json"), several.pop("manifest.json"), {"merged_from", "checksum"})
    assert one == several
    assert merged.fingerprint == whole.fingerprint
    assert (merged.merged_from, merged.part, merged.sources) == (num_parts, None, whole.sources)
    if drop:  # there was something to do across the parts
        assert sum(part.documents for part in parts) > merged.documents
        assert sum(part.left_out["duplicate"].documents for part in parts if part.documents) < (
            merged.left_out["duplicate"].documents
        )
    TokenStore(out).verify()


@pytest.mark.usefixtures("small_batches")
def test_a_part_is_a_store_and_says_which_part_it_is(fast_path: Path, corpus: Path, options: dict[str, Any]) -> None:
    parts = prepare_parts(corpus, fast_path / "store", 2, options)
    for rank, part in enumerate(parts):
        folder = part_folder(fast_path / "store", rank, 2)
        assert folder.name == f"store.part-{rank:05d}-of-00002"
        store = TokenStore(folder)
        store.verify()
        assert store.manifest == part
        assert part.part is not None
        assert (part.part.index, part.part.num_parts) == (rank, 2)
        assert part.is_consistent
    assert parts[0].part is not None
    assert parts[1].part is not None
    assert parts[0].part.listing_fingerprint == parts[1].part.listing_fingerprint


def test_a_part_without_a_file_is_a_store_of_nothing(fast_path: Path, corpus: Path, options: dict[str, Any]) -> None:
    parts = prepare_parts(corpus, fast_path / "store", 13, options)
    rank = next(rank for rank, part in enumerate(parts) if not part.shards)
    store = TokenStore(part_folder(fast_path / "store", rank, 13))
    store.verify()
    assert (store.n_tokens, store.n_documents, store.lengths.tolist(), store.offsets.tolist()) == (0, 0, [], [0])
    index = pack(store, seq_len=16)
    assert (index.n_rows, index.n_slices) == (0, 0)
    index.verify()


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("drop", [False, True])
def test_ranks_that_were_cut_off(
    fast_path: Path, corpus: Path, options: dict[str, Any], contents: Contents, whole: dict[str, bytes], drop: bool
) -> None:
    """Each part, and the merge, is interrupted again and again."""
    if not drop:
        options = {**options, "selection": None}
        prepare([corpus], out=fast_path / "whole", **options)
        whole = contents(fast_path / "whole")
    out = fast_path / "store"
    cuts = 0

    def cut_at(n: int) -> Callable[[int, int, str], None]:
        seen = 0

        def report(*_: object) -> None:
            nonlocal seen
            seen += 1
            if seen == n:
                raise KeyboardInterrupt

        return report

    def until_done(work: Callable[[Callable[[int, int, str], None]], object]) -> None:
        nonlocal cuts
        for n in range(4, 100):
            try:
                work(cut_at(n))
            except KeyboardInterrupt:
                cuts += 1
                continue
            return

    for rank in (1, 0):
        until_done(
            lambda report, rank=rank: prepare(
                [corpus], out=out, part_index=rank, num_parts=2, progress=report, **options
            )
        )
    until_done(lambda report: merge(out, progress=report))
    assert cuts > 8
    merged = contents(out)
    assert same_but_for(whole["manifest.json"], merged.pop("manifest.json"), {"merged_from", "checksum"})
    assert merged == {name: content for name, content in whole.items() if name != "manifest.json"}


@pytest.mark.usefixtures("small_batches")
def test_ready_made_ids(fast_path: Path, tokenizer: Tokenizer, contents: Contents) -> None:
    folder = fast_path / "in"
    folder.mkdir()
    for number in range(4):
        lines = [json.dumps({"ids": [number % 2 + 2, 5, 6 + i % 3]}) for i in range(9)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "options": lt_data.SourceOptions(tokens_field="ids"),
        "selection": Selection(drop_duplicates=True),
        "engine": "hf",
    }
    whole = prepare([folder], out=fast_path / "whole", **options)
    assert (whole.documents, whole.left_out["duplicate"].documents) == (6, 30)
    prepare_parts(folder, fast_path / "store", 3, options)
    merged = merge(fast_path / "store")
    assert merged.fingerprint == whole.fingerprint
    assert merged.left_out == whole.left_out


def test_what_the_parts_say_of_their_engines(fast_path: Path, options: dict[str, Any]) -> None:
    """The same engine, checked on the text of each part; or another one in one part."""
    (fast_path / "in").mkdir()
    for number in range(2):
        (fast_path / f"in/{number}.txt").write_text("the quick brown fox " * (20 + number), encoding="utf-8")
    choices = [
        {"name": "gigatoken", "version": "1", "requested": "auto", "reason": "same ids", "checked_bytes": 400 + rank}
        for rank in (0, 1)
    ]
    other = choices[1] | {"name": "hf", "checked_bytes": 0}
    for second, said in ((choices[1], choices[0] | {"checked_bytes": 801}), (other, {"parts": [choices[0], other]})):
        for rank, choice in enumerate((choices[0], second)):
            prepare(
                [fast_path / "in"],
                out=fast_path / "store",
                part_index=rank,
                num_parts=2,
                overwrite=True,
                **{**options, "selection": None},
            )
            path = part_folder(fast_path / "store", rank, 2) / "manifest.json"
            manifest = StoreManifest.from_dict(json.loads(path.read_bytes()), "")
            path.write_text(json.dumps(replace(manifest, engine=choice).to_dict()), encoding="utf-8")
        merged = merge(fast_path / "store", overwrite=True)
        assert merged.engine == said
        assert merged.documents == 2


@pytest.fixture
def parts(fast_path: Path, corpus: Path, options: dict[str, Any]) -> Path:
    """Three parts, not merged."""
    out = fast_path / "store"
    prepare_parts(corpus, out, 3, options)
    return out


def test_a_missing_part(parts: Path) -> None:
    shutil.rmtree(part_folder(parts, 1, 3))
    with pytest.raises(DataError, match=r"store: 1 of 3 parts are missing: 1; prepare them with --part"):
        merge(parts)
    part_folder(parts, 1, 3).with_name("store.part-00001-of-00003.building").mkdir()
    with pytest.raises(DataError, match=r"missing: 1 \(1 started, not finished\)"):
        merge(parts)


def test_parts_of_two_jobs(parts: Path, corpus: Path, options: dict[str, Any]) -> None:
    prepare([corpus], out=parts, part_index=0, num_parts=2, **options)
    with pytest.raises(DataError, match="parts of jobs with 2 and 3 parts; move the old ones away"):
        merge(parts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"eos": False}, r"eos \(True and False\)"),
        ({"shard_tokens": 77}, r"shard_tokens \(150 and 77\)"),
        ({"selection": Selection()}, "selection "),
        ({"options": lt_data.SourceOptions(on_bad="skip", text_field="body")}, "listing of the sources"),
        ({"tokenizer": "other"}, "tokenizer "),
    ],
)
def test_a_part_made_with_other_options(
    parts: Path, corpus: Path, options: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    if "tokenizer" in change:
        change = {"tokenizer": lt_data.train_bpe(["other text"], vocab_size=260)}
    prepare([corpus], out=parts, part_index=2, num_parts=3, overwrite=True, **{**options, **change})
    with pytest.raises(DataError, match=rf"of-00003: of another job than .*{said}.*prepare it again"):
        merge(parts)


def test_a_part_under_another_name(parts: Path) -> None:
    one, two = part_folder(parts, 1, 3), part_folder(parts, 2, 3)
    one.rename(parts.with_name("aside"))
    two.rename(one)
    parts.with_name("aside").rename(two)
    with pytest.raises(DataError, match="part-00001-of-00003: not part 1 of 3 by its manifest"):
        merge(parts)


@pytest.mark.parametrize(
    "name",
    [
        "shards/00000.bin",
        "shards/00000.idx",
        "tokenizer/tokenizer.json",
        "part/documents",
        "part/sources",
        "part/special",
    ],
)
def test_a_damaged_part_is_not_merged(parts: Path, name: str) -> None:
    path = part_folder(parts, 1, 3) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if name == "tokenizer/tokenizer.json":  # that of the first part is taken
        path = part_folder(parts, 0, 3) / name
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"{Path(name).stem}"):
        merge(parts)
    assert not parts.exists()


def test_a_part_is_not_merged_over_something_else(parts: Path) -> None:
    parts.mkdir()
    (parts / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(DataError, match="exists and is not a token store"):
        merge(parts, overwrite=True)
    (parts / "thesis.tex").unlink()
    merged = merge(parts)
    with pytest.raises(DataError, match="holds a token store already"):
        merge(parts)
    assert merge(parts, overwrite=True) == merged


def test_no_part_at_all(fast_path: Path, corpus: Path, options: dict[str, Any]) -> None:
    prepare([corpus], out=fast_path / "store", part_index=0, num_parts=1, **options)  # the whole, not a part
    with pytest.raises(DataError, match=r"store: no parts \(such as .*store\.part-00000-of-00002\)"):
        merge(fast_path / "store", overwrite=True)


def test_ranks_that_are_none(fast_path: Path, corpus: Path, options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"part_index = 2, num_parts = 2: give a part_index from 0 to num_parts - 1"):
        prepare([corpus], out=fast_path / "store", part_index=2, num_parts=2, **options)
    for num_parts in (0, -1):
        with pytest.raises(DataError, match=rf"num_parts = {num_parts}: give a part_index from 0"):
            prepare([corpus], out=fast_path / "store", num_parts=num_parts, **options)
    with pytest.raises(DataError, match="only a DocumentReader"):
        lt_data.prepare_documents(
            [], tokenizer=options["tokenizer"], out=fast_path / "store", part_index=0, num_parts=2
        )
    assert list(fast_path.iterdir()) == []
