"""Commands that analyze a store: `stats`, `steps-per-epoch`, `inspect`, `verify` and `report`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from lt_data.packing.groups import PackMode
    from lt_data.packing.pack_index import PackIndex
    from lt_data.store.token_store import TokenStore

_Store = Annotated[str, typer.Argument(metavar="STORE", help="Folder of a token store, or its s3:// address.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Batch = Annotated[int | None, typer.Option(help="Rows in a step, over all ranks.", show_default=False)]
_Ranks = Annotated[int, typer.Option(help="Data-parallel ranks.")]
Packs = Annotated[
    Path | None,
    typer.Option(help="Folder for packs of several stores, if they are not in STORE.", show_default="STORE/packs"),
]
_SeqLen = Annotated[int | None, typer.Option(help="Of the pack, if the store has several.", show_default=False)]
_Mode = Annotated[str | None, typer.Option(help="Of the pack, if the store has several.", show_default=False)]


def stats(
    store: _Store,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="Count exact duplicates; reads all ids.")] = False,
    global_batch_size: _Batch = None,
    dp_size: _Ranks = 1,
    packs: Packs = None,
    as_json: _Json = False,
) -> None:
    """Show documents, tokens, lengths, and the fill, padding and truncation of each pack."""
    import lt_data
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.stats_text import format_stats
    from lt_data.display.terminal import echo

    with progress_bar("read") as bar:
        store_stats = lt_data.stats(
            lt_data.TokenStore(store, packs=packs),
            duplicates=duplicates,
            global_batch_size=global_batch_size,
            dp_size=dp_size,
            progress=bar,
        )
    echo(json.dumps(store_stats.to_dict(), indent=2) if as_json else format_stats(store_stats))


def steps_per_epoch(
    store: _Store,
    global_batch_size: Annotated[int, typer.Option(help="Rows in a step, over all ranks.")],
    dp_size: _Ranks = 1,
    packs: Packs = None,
    seq_len: _SeqLen = None,
    mode: _Mode = None,
    as_json: _Json = False,
) -> None:
    """Show the steps of an epoch of a pack, and the remaining rows."""
    from lt_data.analysis.steps import steps_per_epoch as count
    from lt_data.display.stats_text import format_epoch_steps
    from lt_data.display.terminal import echo
    from lt_data.store.token_store import TokenStore

    pack = _find_pack(TokenStore(store, packs=packs), seq_len, mode)
    by_length = count(pack, global_batch_size=global_batch_size, dp_size=dp_size)
    if as_json:
        echo(json.dumps([steps.to_dict() for steps in by_length], indent=2))
    else:
        echo("\n".join(format_epoch_steps(steps) for steps in by_length))


def verify(store: _Store, packs: Packs = None) -> None:
    """Read and verify everything in a store; report every problem."""
    from lt_data.analysis.verification import find_problems
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo
    from lt_data.errors import DataError
    from lt_data.packing.packs import list_pack_folders
    from lt_data.store.token_store import TokenStore

    opened = TokenStore(store, packs=packs)
    with progress_bar("verify") as report:
        problems = list(find_problems(opened, report))
    if problems:
        echo("\n".join(problems))
        raise DataError(f"{store}: {len(problems)} problem{'' if len(problems) == 1 else 's'}, listed above")
    n_packs = len(list_pack_folders(opened))
    echo(f"{store}: {opened.n_documents} documents, {opened.n_tokens} tokens, {n_packs} packs: verified")


def inspect(
    folder: Annotated[
        str | None, typer.Argument(metavar="[STORE]", help="Token store, to show rows of a pack.", show_default=False)
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run directory, to show the rows of a step.", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option(help="Step of the run, from 1.", show_default=False)] = None,
    store: Annotated[
        Path | None, typer.Option(help="The run's token store, if it is not at the path in its recipe.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=STORE", help="Likewise, the store of a source of the run's mixture."),
    ] = None,
    seq_len: _SeqLen = None,
    mode: _Mode = None,
    packs: Packs = None,
    row: Annotated[int | None, typer.Option(help="Only this row, from 0.", show_default=False)] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only the rows A to B - 1.", show_default="0:4 of a store")
    ] = None,
    document: Annotated[
        int | None, typer.Option(help="This document of the store, from 0; needs no pack.", show_default=False)
    ] = None,
    full_text: Annotated[bool, typer.Option("--full-text", help="Print the complete text.")] = False,
    color: Annotated[
        bool | None, typer.Option("--color/--no-color", help="Use color.", show_default="on a terminal")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the complete text.")] = False,
) -> None:
    """Show documents and their sources: of rows of a pack, of a step of a run, or one document."""
    from shutil import get_terminal_size

    from lt_data.analysis.inspection import inspect_document, inspect_rows
    from lt_data.analysis.run_inspection import inspect_step
    from lt_data.display.color import AnsiStyle, should_use_color
    from lt_data.display.inspection_text import pack_lines, parse_rows, span_lines, step_lines
    from lt_data.display.terminal import echo
    from lt_data.errors import DataError
    from lt_data.store.token_store import TokenStore

    columns, style = get_terminal_size((120, 24)).columns, AnsiStyle(should_use_color(color))
    selected = parse_rows(row, rows)
    if (folder is None) == (run is None):
        raise DataError("give either a store, to show rows of a pack, or --run and --step, to show the rows of a step")
    if run is not None:
        if packs is not None:
            raise DataError("--packs: those of a run are in data.packs of its recipe; leave it out")
        if step is None or document is not None:
            raise DataError("--run: requires --step, from 1, and shows its documents (--document is for a store)")
        pairs = [item.partition("=") for item in source or ()]
        if wrong := [name for name, equals, path in pairs if not (name and equals and path)]:
            raise DataError(f"--source {wrong[0]}: give NAME=STORE")
        stores = {name: path for name, _, path in pairs}
        report = inspect_step(run, step, store=store, sources=stores, rows=selected)
        lines = step_lines(report, columns=columns, full_text=full_text, style=style)
        echo(json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(lines), is_styled=True)
        return
    assert folder is not None
    if step is not None or store is not None or source:
        raise DataError("--step, --store and --source: require --run")
    opened = TokenStore(folder, packs=packs)
    if document is not None:
        if (seq_len, mode, selected) != (None, None, None):
            raise DataError("--document: not with --seq-len, --mode, --row or --rows, which are of a pack")
        span = inspect_document(opened, document)
        lines = span_lines(span, columns=columns, full_text=full_text, style=style)
        echo(json.dumps(span.to_dict(), indent=2) if as_json else "\n".join(lines), is_styled=True)
        return
    pack = _find_pack(opened, seq_len, mode)
    inspected = inspect_rows(opened, pack, range(min(4, pack.n_rows)) if selected is None else selected)
    lines = pack_lines(inspected, columns=columns, full_text=full_text, style=style)
    echo(json.dumps([item.to_dict() for item in inspected], indent=2) if as_json else "\n".join(lines), is_styled=True)


def report(
    store: _Store,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    png: Annotated[Path | None, typer.Option(help="Folder for the charts as PNG.", show_default=False)] = None,
    duplicates: Annotated[bool, typer.Option("--duplicates", help="Count exact duplicates; reads all ids.")] = False,
    global_batch_size: _Batch = None,
    dp_size: _Ranks = 1,
    packs: Packs = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Write a self-contained HTML report of a store: lengths, packs, sources."""
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.report import write_report
    from lt_data.display.terminal import echo
    from lt_data.store.token_store import TokenStore

    opened = TokenStore(store, packs=packs)
    with progress_bar("read") as bar:
        written = write_report(
            opened,
            out,
            png=png,
            duplicates=duplicates,
            global_batch_size=global_batch_size,
            dp_size=dp_size,
            overwrite=overwrite,
            progress=bar,
        )
    echo("\n".join(str(path) for path in written))


def _find_pack(store: "TokenStore", seq_len: int | None, mode: str | None) -> "PackIndex":
    """Return the only pack of a store that matches the options."""
    from lt_data.errors import DataError
    from lt_data.packing.pack_index import PackIndex
    from lt_data.packing.packs import list_pack_folders

    packs = {folder.name: PackIndex.load(folder) for folder in list_pack_folders(store)}
    matching = {
        name: pack
        for name, pack in packs.items()
        if seq_len in (None, pack.seq_len) and cast("PackMode | None", mode) in (None, pack.mode)
    }
    if len(matching) != 1:
        options = " ".join(
            [*([f"--seq-len {seq_len}"] if seq_len is not None else []), *([f"--mode {mode}"] if mode else [])]
        )
        if not packs:
            raise DataError(f"{store.path}: has no pack; make one with: lt data pack {store.path} --seq-len N")
        if not matching:
            raise DataError(f"{store.path}: no pack with {options}; there are {', '.join(packs)}")
        raise DataError(f"{store.path}: has several packs ({', '.join(matching)}); give --seq-len and --mode")
    ((name, pack),) = matching.items()
    if pack.store_fingerprint != store.manifest.fingerprint:
        raise DataError(f"{store.path}: the pack {name} belongs to another store; make it again")
    return pack
