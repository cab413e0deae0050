"""The commands that look at a store: `stats`, `steps-per-epoch`, `inspect`, `verify` and `report`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from lt_data.packing.packs import Mode, PackIndex
    from lt_data.store.token_store import TokenStore

_Store = Annotated[str, typer.Argument(metavar="STORE", help="Folder of a token store, or its s3:// address.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Batch = Annotated[int | None, typer.Option(help="Rows in a step, over all ranks.", show_default=False)]
_Ranks = Annotated[int, typer.Option(help="Data-parallel ranks that share a step's rows.")]
_SeqLen = Annotated[int | None, typer.Option(help="Of the pack, where the store has several.", show_default=False)]
_Mode = Annotated[str | None, typer.Option(help="Of the pack, where the store has several.", show_default=False)]


def stats(
    store: _Store,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="Look for equal documents: reads all ids.")] = False,
    global_batch: _Batch = None,
    dp_size: _Ranks = 1,
    as_json: _Json = False,
) -> None:
    """Documents, tokens, lengths, and the fill, padding and cuts of each pack."""
    import lt_data
    from lt_data.showing.bars import progress_bar
    from lt_data.showing.summary_text import table
    from lt_data.showing.terminal import say

    with progress_bar("read") as bar:
        found = lt_data.stats(
            lt_data.TokenStore.open(store),
            duplicates=duplicates,
            global_batch=global_batch,
            dp_size=dp_size,
            progress=bar,
        )
    say(json.dumps(found.to_dict(), indent=2) if as_json else table(found))


def steps_per_epoch(
    store: _Store,
    global_batch: Annotated[int, typer.Option(help="Rows in a step, over all ranks.")],
    dp_size: _Ranks = 1,
    seq_len: _SeqLen = None,
    mode: _Mode = None,
    as_json: _Json = False,
) -> None:
    """How many steps an epoch of a pack has, and how many rows are left over."""
    from lt_data.looking.steps import steps_per_epoch as count
    from lt_data.showing.summary_text import steps_line
    from lt_data.showing.terminal import say
    from lt_data.store.token_store import TokenStore

    found = count(_pack(TokenStore.open(store), seq_len, mode), global_batch=global_batch, dp_size=dp_size)
    if as_json:
        say(json.dumps([steps.to_dict() for steps in found], indent=2))
    else:
        say("\n".join(steps_line(steps) for steps in found))


def verify(store: _Store) -> None:
    """Read everything and compare it with all that is known of it; every problem is named."""
    from lt_data.errors import DataError
    from lt_data.looking.checking import pack_folders, problems
    from lt_data.showing.bars import progress_bar
    from lt_data.showing.terminal import say
    from lt_data.store.token_store import TokenStore

    opened = TokenStore.open(store)
    with progress_bar("verify") as report:
        found = list(problems(opened, report))
    if found:
        say("\n".join(found))
        raise DataError(f"{store}: {len(found)} problem{'' if len(found) == 1 else 's'}; they are named above")
    packs = len(pack_folders(opened))
    say(f"{store}: {opened.n_documents} documents, {opened.n_tokens} tokens, {packs} packs: all as written")


def inspect(
    folder: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="Token store, to see rows of a pack.", show_default=False)
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory, to see what a step read.", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which step of the run, from 1.", show_default=False)] = None,
    store: Annotated[
        Path | None, typer.Option(help="The run's token store, where it is not found under the name in its recipe.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=STORE", help="Likewise the store of a source of the run's mixture."),
    ] = None,
    seq_len: _SeqLen = None,
    mode: _Mode = None,
    row: Annotated[int | None, typer.Option(help="Only this row, from 0.", show_default=False)] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only the rows A to B - 1.", show_default="0:4 of a store")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the whole text.")] = False,
    colour: Annotated[
        bool | None, typer.Option("--color/--no-color", help="Colours.", show_default="on a terminal")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the whole text.")] = False,
) -> None:
    """Show the documents in rows of a store's pack, or in those that a step of a training run read."""
    from shutil import get_terminal_size

    from lt_data.errors import DataError
    from lt_data.looking.inspection import inspect_rows
    from lt_data.looking.run_files import inspect_step
    from lt_data.showing.colour import Paint, wanted
    from lt_data.showing.inspection_text import pack_lines, parse_rows, step_lines
    from lt_data.showing.terminal import say
    from lt_data.store.token_store import TokenStore

    columns, paint = get_terminal_size((120, 24)).columns, Paint(wanted(colour))
    chosen = parse_rows(row, rows)
    if (folder is None) == (run is None):
        raise DataError("give a store, to see rows of a pack, or --run and --step, to see what a step read")
    if run is not None:
        if step is None:
            raise DataError("--run: give --step too, from 1")
        pairs = [one.partition("=") for one in source or ()]
        if wrong := [name for name, equals, folder_ in pairs if not (name and equals and folder_)]:
            raise DataError(f"--source {wrong[0]}: write NAME=STORE")
        stores = {name: folder_ for name, _, folder_ in pairs}
        report = inspect_step(run, step, store=store, sources=stores, rows=chosen)
        lines = step_lines(report, columns=columns, whole_text=text, paint=paint)
        say(json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(lines))
        return
    assert folder is not None
    if step is not None or store is not None or source:
        raise DataError("--step, --store and --source: they belong to --run")
    opened = TokenStore.open(folder)
    pack = _pack(opened, seq_len, mode)
    found = inspect_rows(opened, pack, range(min(4, pack.n_rows)) if chosen is None else chosen)
    lines = pack_lines(found, columns=columns, whole_text=text, paint=paint)
    say(json.dumps([item.to_dict() for item in found], indent=2) if as_json else "\n".join(lines))


def report(
    store: _Store,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(help="Folder for the charts as PNG.", show_default=False)] = None,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="Look for equal documents: reads all ids.")] = False,
    global_batch: _Batch = None,
    dp_size: _Ranks = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Write one HTML page about a store: lengths, packs, sources; it needs no network to be read."""
    from lt_data.showing.bars import progress_bar
    from lt_data.showing.report import write_report
    from lt_data.showing.terminal import say
    from lt_data.store.token_store import TokenStore

    opened = TokenStore.open(store)
    with progress_bar("read") as bar:
        written = write_report(
            opened,
            out,
            png=png,
            duplicates=duplicates,
            global_batch=global_batch,
            dp_size=dp_size,
            overwrite=overwrite,
            progress=bar,
        )
    say("\n".join(str(path) for path in written))


def _pack(store: "TokenStore", seq_len: int | None, mode: str | None) -> "PackIndex":
    """The pack that is meant: the only one that fits what was said of it."""
    from lt_data.errors import DataError
    from lt_data.looking.checking import pack_folders
    from lt_data.packing.packs import PackIndex

    packs = {folder.name: PackIndex.load(folder) for folder in pack_folders(store)}
    fitting = {
        name: pack
        for name, pack in packs.items()
        if seq_len in (None, pack.seq_len) and cast("Mode | None", mode) in (None, pack.mode)
    }
    if len(fitting) != 1:
        asked = " ".join(
            [*([f"--seq-len {seq_len}"] if seq_len is not None else []), *([f"--mode {mode}"] if mode else [])]
        )
        if not packs:
            raise DataError(
                f"{store.path}: the store has no pack; make one with: lt data pack {store.path} --seq-len N"
            )
        if not fitting:
            raise DataError(f"{store.path}: no pack is of {asked}; there are {', '.join(packs)}")
        raise DataError(f"{store.path}: which pack? {', '.join(fitting)}; say --seq-len and --mode")
    (found,) = fitting.values()
    if found.store_fingerprint != store.manifest.fingerprint:
        raise DataError(f"{store.path}: the pack {next(iter(fitting))} belongs to another store; make it again")
    return found
