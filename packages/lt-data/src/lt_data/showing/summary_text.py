"""How `lt data stats` and `lt data steps-per-epoch` show numbers."""

from typing import Any

from lt_data.looking.steps import EpochSteps
from lt_data.looking.summary import PackStats, Stats


def table(found: Stats) -> str:
    """The numbers of a store as lines of text."""
    twice = found.duplicates
    facts: list[tuple[str, Any]] = [
        ("documents", found.documents),
        ("tokens", found.tokens),
        ("text bytes", found.text_bytes),
        ("bytes per token", f"{found.bytes_per_token:.3f}" if found.text_bytes else "no text is known"),
        ("vocabulary", found.vocab_size),
        ("document length", f"{found.shortest} to {found.longest}, median {found.median:.0f}, mean {found.mean:.1f}"),
        ("empty documents", found.empty_documents),
        *((f"left out, {reason}", count) for reason, count in found.left_out.items() if reason != "empty"),
        *((f"special string {string}", count) for string, count in found.special_strings.items()),
        *([("exact duplicates", f"{twice.documents} documents, {twice.tokens} tokens")] if twice else []),
        ("fingerprint", found.fingerprint),
    ]
    lines = [f"{name:<20} {value}" for name, value in facts]
    lines += ["", f"{'length in tokens':<20} {'documents':>12} {'tokens':>16}"]
    lines += [f"{f'{bin.least} to {bin.most}':<20} {bin.documents:>12} {bin.tokens:>16}" for bin in found.lengths]
    if found.packs:
        heads = (("rows", 10), ("fill", 9), ("padding", 9), ("labels", 14), ("documents cut", 20), ("needlessly", 18))
        lines += ["", f"{'pack':<20} {' '.join(f'{head:>{width}}' for head, width in heads)}"]
    lines += [_pack_line(pack) for pack in found.packs]
    for pack in found.packs:
        if pack.steps:
            lines += ["", f"{pack.name}:", *(f"  {steps_line(steps)}" for steps in pack.steps)]
    return "\n".join(lines)


def _pack_line(pack: PackStats) -> str:
    cut = f"{pack.cut_documents} ({pack.truncation_rate:.3%})"
    needlessly = f"{pack.needlessly_cut} ({pack.needless_truncation_rate:.3%})"
    return (
        f"{pack.name:<20} {pack.rows:>10} {pack.fill:>9.4%} {pack.padding_rate:>9.4%} {pack.valid_tokens:>14} "
        f"{cut:>20} {needlessly:>18}" + ("" if pack.current else "  (of another store)")
    )


def steps_line(steps: EpochSteps) -> str:
    """Such as `1003 rows of 4096 tokens = 125 steps of 8 rows (2 for each of 4 ranks) + 3 rows, which ...`."""
    ranks = f"{steps.rows_per_rank} for each of {steps.dp_size} ranks" if steps.dp_size > 1 else "1 rank"
    rest = "nothing is left over"
    if steps.remainder:
        left = "1 row is" if steps.remainder == 1 else f"{steps.remainder} rows are"
        rest = f"{left} left over, which the next epoch's first step reads first"
    return (
        f"{steps.rows} rows of {steps.seq_len} tokens = {steps.steps} steps of {steps.global_batch} rows ({ranks}, "
        f"{steps.tokens_per_step} tokens) + {steps.remainder}: {rest}"
    )
