"""Commands that pack a store and show what is in it: `pack`, `stats`, `inspect`, `verify` and `report`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lt_data.cli.command_app import StoreArgument

if TYPE_CHECKING:
    from lt_data.packing.pack_index import PackIndex, PackMode
    from lt_data.store.token_store import TokenStore

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Batch = Annotated[int | None, typer.Option(help="Rows in a step, over all ranks.", show_default=False)]
_Ranks = Annotated[int, typer.Option(help="Data-parallel ranks.")]
_Duplicates = Annotated[bool, typer.Option("--duplicates", help="Count exact duplicates; reads all ids.")]
_Packs = Annotated[
    Path | None,
    typer.Option(help="Folder for packs of several stores, if they are not in STORE.", show_default="STORE/packs"),
]
_SeqLen = Annotated[int | None, typer.Option(help="Of the pack, if the store has several.", show_default=False)]
_Mode = Annotated[str | None, typer.Option(help="Of the pack, if the store has several.", show_default=False)]


def pack(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="Folder of a token store.")],
    seq_len: Annotated[int, typer.Option(help="Tokens in a training row.")],
    mode: Annotated[str, typer.Option(help="bfd (best-fit decreasing) or concat.")] = "bfd",
    packs: _Packs = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Make it again if it exists.")] = False,
) -> None:
    """Pack documents into training rows, as an index; tokens are not copied."""
    from lt_data.display.terminal import echo
    from lt_data.packing.packs import pack
    from lt_data.store.token_store import TokenStore

    opened = TokenStore(store, packs=packs)
    index = pack(opened, seq_len=seq_len, mode=cast("PackMode", mode), overwrite=overwrite)
    fill = opened.n_tokens / max(1, index.n_positions)
    echo(f"{index.n_rows} rows of {seq_len} tokens ({index.mode}), {fill:.4%} filled")


def stats(
    store: StoreArgument,
    duplicates: _Duplicates = False,
    global_batch_size: _Batch = None,
    dp_size: _Ranks = 1,
    packs: _Packs = None,
    as_json: _Json = False,
) -> None:
    """Show documents, tokens, lengths, and the fill, padding and truncation of each pack."""
    from lt_data.analysis.stats import stats
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.stats_text import format_stats
    from lt_data.display.terminal import echo
    from lt_data.store.token_store import TokenStore

    opened = TokenStore(store, packs=packs)
    batch = {"global_batch_size": global_batch_size, "dp_size": dp_size}
    with progress_bar("read") as bar:
        found = stats(opened, duplicates=duplicates, progress=bar, **batch)
    echo(json.dumps(found.to_dict(), indent=2) if as_json else format_stats(found))


def verify(store: StoreArgument, packs: _Packs = None) -> None:
    """Read and verify everything in a store; report every problem."""
    from lt_data.analysis.verification import verify
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.terminal import echo
    from lt_data.errors import DataError
    from lt_data.packing.packs import list_packs
    from lt_data.store.token_store import TokenStore

    opened = TokenStore(store, packs=packs)
    with progress_bar("verify") as bar:
        problems = verify(opened, bar)
    if problems:
        echo("\n".join(problems))
        raise DataError(f"{store}: {len(problems)} problem{'' if len(problems) == 1 else 's'}, listed above")
    n_packs = len(list_packs(opened))
    echo(f"{store}: {opened.n_documents} documents, {opened.n_tokens} tokens, {n_packs} packs: verified")


def inspect(
    store: StoreArgument,
    seq_len: _SeqLen = None,
    mode: _Mode = None,
    packs: _Packs = None,
    row: Annotated[int | None, typer.Option(help="Only this row, from 0.", show_default=False)] = None,
    rows: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only the rows A to B - 1.", show_default="0:4")
    ] = None,
    document: Annotated[
        int | None, typer.Option(help="This document of the store, from 0; needs no pack.", show_default=False)
    ] = None,
    full_text: Annotated[bool, typer.Option("--full-text", help="Print the complete text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with the complete text.")] = False,
) -> None:
    """Show documents and their sources: of rows of a pack, or one document (`lt train inspect`: of a run's step)."""
    from dataclasses import asdict
    from shutil import get_terminal_size

    from lt_data.analysis.inspection import inspect_document, inspect_rows
    from lt_data.display.inspection_text import document_lines, parse_rows, row_lines
    from lt_data.display.terminal import echo
    from lt_data.errors import DataError
    from lt_data.store.token_store import TokenStore

    columns, selected = get_terminal_size((120, 24)).columns, parse_rows(row, rows)
    opened = TokenStore(store, packs=packs)
    if document is not None:
        if (seq_len, mode, selected) != (None, None, None):
            raise DataError("--document: not with --seq-len, --mode, --row or --rows, which are of a pack")
        span = inspect_document(opened, document)
        lines = [*document_lines(span, columns=columns, full_text=full_text)]
        echo(json.dumps(asdict(span), indent=2) if as_json else "\n".join(lines))
        return
    pack = _find_pack(opened, seq_len, mode)
    inspected = inspect_rows(opened, pack, range(min(4, pack.n_rows)) if selected is None else selected)
    texts = ["\n".join(row_lines(one, f"row {one.row}", columns=columns, full_text=full_text)) for one in inspected]
    echo(json.dumps([asdict(one) for one in inspected], indent=2) if as_json else "\n\n".join(texts))


def report(
    store: StoreArgument,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    duplicates: _Duplicates = False,
    global_batch_size: _Batch = None,
    dp_size: _Ranks = 1,
    packs: _Packs = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Write the statistics of a store as one HTML page."""
    from lt_data.analysis.stats import stats
    from lt_data.display.progress_bars import progress_bar
    from lt_data.display.report import write_report
    from lt_data.display.terminal import echo
    from lt_data.store.token_store import TokenStore

    opened = TokenStore(store, packs=packs)
    batch = {"global_batch_size": global_batch_size, "dp_size": dp_size}
    with progress_bar("read") as bar:
        found = stats(opened, duplicates=duplicates, progress=bar, **batch)
    write_report(found, opened.path.name, out, overwrite=overwrite)
    echo(str(out))


def _find_pack(store: "TokenStore", seq_len: int | None, mode: str | None) -> "PackIndex":
    """Return the only pack of a store that matches the options."""
    from lt_data.errors import DataError
    from lt_data.packing.pack_index import read_header
    from lt_data.packing.packs import list_packs, open_pack

    packs = {folder.name: read_header(folder) for folder in list_packs(store)}
    if not packs:
        raise DataError(f"{store.path}: has no pack; make one with: lt data pack {store.path} --seq-len N")
    matching = [one for one in packs.values() if seq_len in (None, one.seq_len) and mode in (None, one.mode)]
    if len(matching) != 1:
        number = "no pack" if not matching else "several packs"
        raise DataError(f"{store.path}: {number} of these; there are {', '.join(packs)}: give --seq-len and --mode")
    return open_pack(store, seq_len=matching[0].seq_len, mode=matching[0].mode)
