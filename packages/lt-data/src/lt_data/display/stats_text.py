"""Statistics of a store as tables of text: `lt data stats`, and the content of `lt data report`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from lt_data.analysis.stats import EpochSteps, StoreStats
from lt_data.display.progress_bars import format_si
from lt_data.display.terminal import escape_controls

PACK_HEADS = ("pack", "rows", "fill", "padding", "labels", "documents cut", "needlessly")


def store_facts(stats: StoreStats) -> Iterator[tuple[str, str]]:
    """Yield name and value of what is known of a store and its making; what others wrote is escaped."""
    manifest = stats.manifest
    middle = f"median {stats.median_length:.0f}, mean {stats.mean_length:.1f}"
    facts: list[tuple[str, Any]] = [
        ("documents", stats.documents),
        ("tokens", stats.tokens),
        ("text bytes", manifest.text_bytes),
        ("bytes per token", f"{stats.bytes_per_token:.3f}" if manifest.text_bytes else "unknown"),
        ("vocabulary", stats.vocab_size),
        ("tokenizer", f"{manifest.tokenizer.name}, SHA-256 {manifest.tokenizer.sha256}"),
        ("document length", f"{stats.min_length} to {stats.max_length}, {middle}"),
        ("sources", f"{manifest.sources.files} files, {format_si(manifest.sources.bytes)}B"),
        *((f"left out, {reason}", amount.documents) for reason, amount in manifest.left_out.items()),
        *((f"skipped, {reason}", count) for reason, count in manifest.skipped.items()),
        *((f"special string {string}", count) for string, count in manifest.special_strings.items()),
        *((f"column {column.name}", column.type) for column in manifest.columns),
    ]
    if stats.duplicates is not None:
        facts.append(("exact duplicates", "{} documents, {} tokens".format(*stats.duplicates)))
    if manifest.map is not None:
        arguments = f", arguments {json.dumps(manifest.map.arguments)}" if manifest.map.arguments else ""
        facts.append(("map", f"{manifest.map.function}, code {manifest.map.sha256}{arguments}"))
    if manifest.split is not None:
        split = manifest.split
        facts.append(("split", f"{split.side} of store {split.fingerprint}, share {split.holdout} held out"))
    facts.append(("fingerprint", manifest.fingerprint))
    yield from ((escape_controls(name, keep=""), escape_controls(str(value), keep="")) for name, value in facts)


def pack_rows(stats: StoreStats) -> Iterator[Sequence[str]]:
    """Yield the values of each pack, in the order of `PACK_HEADS`."""
    for pack in stats.packs:
        yield (
            escape_controls(pack.name, keep="") + ("" if pack.is_current else " (of another store)"),
            str(pack.rows),
            f"{pack.fill_rate:.4%}",
            f"{1 - pack.fill_rate:.4%}",
            str(pack.valid_tokens),
            f"{pack.truncated_documents} ({pack.truncation_rate:.3%})",
            f"{pack.needlessly_truncated_documents} ({pack.needless_truncation_rate:.3%})",
        )


def format_stats(stats: StoreStats) -> str:
    """Format the statistics of a store as lines of text."""
    lines = [f"{name:<20} {value}" for name, value in store_facts(stats)]
    lines += ["", f"{'length in tokens':<20} {'documents':>12} {'tokens':>16}"]
    lines += [
        f"{f'{one.min_tokens} to {one.max_tokens}':<20} {one.documents:>12} {one.tokens:>16}"
        for one in stats.length_histogram
    ]
    rows = [PACK_HEADS, *pack_rows(stats)] if stats.packs else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += [""] * bool(rows)
    lines += ["  ".join(f"{value:<{width}}" for value, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *epoch_lines(stats)])


def epoch_lines(stats: StoreStats) -> Iterator[str]:
    """Yield the steps of an epoch of each pack, if they were counted."""
    for pack in stats.packs:
        if pack.epoch is not None:
            yield f"{escape_controls(pack.name, keep='')}: {format_epoch(pack.epoch, pack.seq_len)}"


def format_epoch(epoch: EpochSteps, seq_len: int) -> str:
    """Format steps such as `1003 rows of 4096 tokens = 125 steps of 8 rows (...) + 3: ...`."""
    batch, rest = epoch.global_batch_size, epoch.remainder
    ranks = f"{batch // epoch.dp_size} for each of {epoch.dp_size} ranks" if epoch.dp_size > 1 else "1 rank"
    remaining = "no rows remain"
    if rest:
        remaining = f"{rest} row{'s remain' if rest > 1 else ' remains'} for the first step of the next epoch"
    return (
        f"{epoch.rows} rows of {seq_len} tokens = {epoch.steps} steps of {batch} rows ({ranks}, {batch * seq_len} "
        f"tokens) + {rest}: {remaining}"
    )
