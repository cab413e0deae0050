"""Text output of `lt data stats` and `lt data steps-per-epoch`."""

import json
from typing import Any

from lt_data.analysis.stats import PackStats, StoreStats
from lt_data.analysis.steps import EpochSteps
from lt_data.display.terminal import escape_controls


def format_stats(stats: StoreStats) -> str:
    """Format the statistics of a store as lines of text."""
    duplicates = stats.duplicates
    facts: list[tuple[str, Any]] = [
        ("documents", stats.documents),
        ("tokens", stats.tokens),
        ("text bytes", stats.text_bytes),
        ("bytes per token", f"{stats.bytes_per_token:.3f}" if stats.text_bytes else "unknown"),
        ("vocabulary", stats.vocab_size),
        (
            "document length",
            f"{stats.min_length} to {stats.max_length}, median {stats.median_length:.0f}, mean {stats.mean_length:.1f}",
        ),
        ("empty documents", stats.empty_documents),
        *((f"left out, {reason}", count) for reason, count in stats.left_out.items() if reason != "empty"),
        *((f"skipped, {reason}", count) for reason, count in stats.skipped.items()),
        *((f"no check, {kind}", _format_files(count)) for kind, count in stats.unchecked_sources.items()),
        *((f"special string {string}", count) for string, count in stats.special_strings.items()),
        *(
            [("exact duplicates", f"{duplicates.documents} documents, {duplicates.tokens} tokens")]
            if duplicates
            else []
        ),
        *provenance_facts(stats),
        ("fingerprint", stats.fingerprint),
    ]
    lines = [f"{_one_line(name):<20} {_one_line(str(value))}" for name, value in facts]
    lines += ["", f"{'length in tokens':<20} {'documents':>12} {'tokens':>16}"]
    lines += [
        f"{f'{bin.min_tokens} to {bin.max_tokens}':<20} {bin.documents:>12} {bin.tokens:>16}"
        for bin in stats.length_histogram
    ]
    if stats.packs:
        heads = (("rows", 10), ("fill", 9), ("padding", 9), ("labels", 14), ("documents cut", 20), ("needlessly", 18))
        lines += ["", f"{'pack':<20} {' '.join(f'{head:>{width}}' for head, width in heads)}"]
    lines += [_pack_line(pack) for pack in stats.packs]
    for pack in stats.packs:
        if pack.steps:
            lines += ["", f"{_one_line(pack.name)}:", *(f"  {format_epoch_steps(steps)}" for steps in pack.steps)]
    return "\n".join(lines)


def provenance_facts(stats: StoreStats) -> list[tuple[str, str]]:
    """Return columns, map and split of a store, as far as it has them: (name, value)."""
    facts = [
        (f"column {column.name}", f"{column.type}, {column.nulls} of {stats.documents} documents without it")
        for column in stats.columns
    ]
    if stats.map is not None:
        arguments = f", arguments {json.dumps(stats.map.arguments)}" if stats.map.arguments else ""
        facts.append(("map", f"{stats.map.function}, code {stats.map.sha256}{arguments}"))
    if stats.split is not None:
        facts.append(
            ("split", f"{stats.split.side} of store {stats.split.fingerprint}, share {stats.split.holdout} held out")
        )
    return facts


def _format_files(count: int) -> str:
    return f"{count} source file{'s' if count != 1 else ''} without a checksum: damage in them may go unnoticed"


def _one_line(text: str) -> str:
    return escape_controls(text, keep="")


def _pack_line(pack: PackStats) -> str:
    truncated = f"{pack.truncated_documents} ({pack.truncation_rate:.3%})"
    needlessly = f"{pack.needlessly_truncated_documents} ({pack.needless_truncation_rate:.3%})"
    return (
        f"{_one_line(pack.name):<20} {pack.rows:>10} {pack.fill_rate:>9.4%} {pack.padding_rate:>9.4%} "
        f"{pack.valid_tokens:>14} {truncated:>20} {needlessly:>18}" + ("" if pack.current else "  (of another store)")
    )


def format_epoch_steps(steps: EpochSteps) -> str:
    """Format steps such as `1003 rows of 4096 tokens = 125 steps of 8 rows (...) + 3: ...`."""
    ranks = f"{steps.rows_per_rank} for each of {steps.dp_size} ranks" if steps.dp_size > 1 else "1 rank"
    rest = "no rows remain"
    if steps.remainder:
        remaining = "1 row remains" if steps.remainder == 1 else f"{steps.remainder} rows remain"
        rest = f"{remaining} for the first step of the next epoch"
    return (
        f"{steps.rows} rows of {steps.seq_len} tokens = {steps.steps} steps of {steps.global_batch_size} rows "
        f"({ranks}, {steps.tokens_per_step} tokens) + {steps.remainder}: {rest}"
    )
