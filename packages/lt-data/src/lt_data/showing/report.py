"""One page about a store: an HTML file that holds all it shows, and the same charts as PNG by option.

Nothing on the page comes from elsewhere: the drawings are inline SVG, the colours follow the reader's dark or light
theme, and words are HTML beside the drawings, so that they keep their size on a narrow screen. Every text from a store
is escaped. The same store gives the same bytes. Cost: that of `stats`.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from lt_data.errors import DataError
from lt_data.looking.summary import PackStats, Stats, stats
from lt_data.names import portable
from lt_data.progress import Progress, silent
from lt_data.showing.bars import scaled
from lt_data.showing.summary_text import steps_line
from lt_data.storage import fsync, fsync_folder, os_errors, write
from lt_data.store.manifest import Manifest
from lt_data.store.token_store import TokenStore

SHOWN_SOURCES = 20


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar of a chart: its label, what it says, and its length as a share of the whole."""

    label: str
    value: str
    share: float


def write_report(
    store: TokenStore,
    out: str | Path,
    *,
    png: str | Path | None = None,
    duplicates: bool = False,
    global_batch: int | None = None,
    dp_size: int = 1,
    overwrite: bool = False,
    progress: Progress = silent,
) -> tuple[Path, ...]:
    """Write a page about a store, and its charts as pictures.

    Args:
        store: the store.
        out: the HTML file to write.
        png: folder for PNG files; needs matplotlib.
        duplicates: look for documents that are there twice, which reads all ids.
        global_batch: rows in a step, to count the steps of an epoch.
        dp_size: ranks that share a step's rows.
        overwrite: replace files that are there.
        progress: told the bytes read for duplicates.

    Returns:
        The files written.

    Raises:
        DataError: a file is there already, the file system refuses, matplotlib is missing, or the store is broken.
    """
    out = Path(out)
    charts: dict[str, Path] = {}
    if png is not None:
        from lt_data.showing.report_png import NAMES, check_matplotlib

        check_matplotlib()
        charts = {name: Path(png) / f"{name}.png" for name in NAMES}
    for path in (out, *charts.values()):
        if path.exists() and not overwrite:
            raise DataError(f"{path}: is there already; give another name, or --overwrite")
    found = stats(store, duplicates=duplicates, global_batch=global_batch, dp_size=dp_size, progress=progress)
    _replace(out, page(portable(str(store.path.name)), found, store.manifest).encode())
    if charts:
        from lt_data.showing.report_png import draw

        for name, content in draw(found).items():
            _replace(charts[name], content)
    return (out, *charts.values())


def _replace(path: Path, content: bytes) -> None:
    with os_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with tmp.open("wb") as file:
                write(file, content)
                file.flush()
                fsync(file.fileno())
            tmp.replace(path)
        finally:
            tmp.unlink(missing_ok=True)
        fsync_folder(path.parent)


def page(name: str, found: Stats, manifest: Manifest) -> str:
    """The HTML of the report."""
    body = f"<header><p class=kind>Token store</p><h1>{escape(name)}</h1></header>\n{sections(found, manifest)}"
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        '<meta name=color-scheme content="light dark">\n'
        f"<title>{escape(name)}: token store</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def sections(found: Stats, manifest: Manifest, *, level: int = 2) -> str:
    """What a page says of a store, for a page of one's own; `STYLE` is how it looks.

    Args:
        found: the store's numbers.
        manifest: the store's.
        level: of the headings, 2 for h2.
    """
    packs = "".join(_pack(pack, level + 1) for pack in found.packs)
    return "\n".join(
        [
            _tiles(found),
            _section("Length of documents", _lengths(found), level, "in tokens, BOS and EOS included"),
            _section("Packs", packs or "<p>This store has no pack yet.</p>", level),
            _section("Sources", _sources(manifest), level),
            _section("Left out and special", _rest(found, manifest), level),
            _section("How it was made", _made(manifest, found), level),
        ]
    )


def _tiles(found: Stats) -> str:
    facts = [
        ("documents", f"{found.documents:,}"),
        ("tokens", f"{scaled(found.tokens)}"),
        ("bytes per token", f"{found.bytes_per_token:.2f}" if found.text_bytes else "none"),
        ("vocabulary", f"{found.vocab_size:,}"),
        ("median length", f"{found.median:,.0f}"),
        ("longest", f"{found.longest:,}"),
    ]
    tiles = "".join(f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>" for name, value in facts)
    return f"<dl class=tiles>{tiles}</dl>"


def _section(title: str, content: str, level: int, note: str = "") -> str:
    aside = f" <small>{escape(note)}</small>" if note else ""
    return f"<section><h{level}>{escape(title)}{aside}</h{level}>{content}</section>"


def length_bars(found: Stats) -> Iterator[tuple[str, Bar, Bar]]:
    """For each range of lengths its name, the documents in it and their tokens."""
    most_documents = max(bin.documents for bin in found.lengths)
    most_tokens = max(bin.tokens for bin in found.lengths)
    for bin in found.lengths:
        name = f"{bin.least:,}" if bin.least == bin.most else f"{bin.least:,} to {bin.most:,}"
        documents, tokens = bin.documents / found.documents, bin.tokens / found.tokens
        yield (
            name,
            Bar(label="documents", value=f"{bin.documents:,} ({documents:.1%})", share=bin.documents / most_documents),
            Bar(label="tokens", value=f"{scaled(bin.tokens)} ({tokens:.1%})", share=bin.tokens / most_tokens),
        )


def _lengths(found: Stats) -> str:
    rows = "".join(
        f"<tr><th scope=row>{name}</th><td>{_bar(one, 'a')}</td><td>{_bar(two, 'b')}</td></tr>"
        for name, one, two in length_bars(found)
    )
    text = (
        f"<p>From {found.shortest:,} to {found.longest:,} tokens, median {found.median:,.0f}, mean {found.mean:,.1f}. "
        "Each range is twice as long as the one above it.</p>"
    )
    head = "<tr><th scope=col>length</th><th scope=col>documents</th><th scope=col>tokens in them</th></tr>"
    return f"{text}<table class=chart><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _bar(bar: Bar, colour: str) -> str:
    width = 100 * bar.share
    drawn = f"<rect width='{max(width, 0.6):.2f}' height=10 rx=1 class={colour} />" if bar.share else ""
    return (
        f"<svg viewBox='0 0 100 10' preserveAspectRatio=none role=img aria-label='{escape(bar.value)}'>"
        f"<rect width=100 height=10 rx=1 class=track />{drawn}</svg><span>{escape(bar.value)}</span>"
    )


def _pack(pack: PackStats, level: int) -> str:
    bars = (
        Bar(label="fill", value=f"{pack.fill:.3%}", share=pack.fill),
        Bar(label="padding", value=f"{pack.padding_rate:.3%}", share=pack.padding_rate),
        Bar(
            label="documents cut",
            value=f"{pack.cut_documents:,} ({pack.truncation_rate:.2%})",
            share=pack.truncation_rate,
        ),
        Bar(
            label="of these needlessly",
            value=f"{pack.needlessly_cut:,} ({pack.needless_truncation_rate:.2%})",
            share=pack.needless_truncation_rate,
        ),
    )
    rows = "".join(
        f"<tr><th scope=row>{escape(bar.label)}</th><td>{_bar(bar, 'a' if number == 0 else 'c')}</td></tr>"
        for number, bar in enumerate(bars)
    )
    steps = "".join(f"<p class=steps>{escape(steps_line(item))}</p>" for item in pack.steps)
    note = "" if pack.current else " <strong>of another store: make it again</strong>"
    return (
        f"<h{level}>{escape(pack.name)}{note}</h{level}><p>{pack.rows:,} rows of {pack.seq_len:,} tokens, "
        f"{escape(pack.mode)}; {pack.valid_tokens:,} labels.</p>"
        f"<table class='chart one'><tbody>{rows}</tbody></table>{steps}"
    )


def _sources(manifest: Manifest) -> str:
    sources = manifest.sources
    text = f"<p>{sources.files:,} files, {scaled(sources.bytes)}B."
    if not sources.listed:
        return (
            f"{text} They are not listed one by one; the SHA-256 over their list is <code>{sources.sha256}</code>.</p>"
        )
    largest = sorted(sources.listed, key=lambda file: (-file.bytes, file.path))[:SHOWN_SOURCES]
    if len(sources.listed) > len(largest):
        text += f" The {len(largest)} largest:"
    most = max(file.bytes for file in largest) or 1
    rows = "".join(
        f"<tr><th scope=row class=path>{escape(_shown(file.path))}</th><td>"
        + _bar(
            Bar(
                label=file.path,
                value=f"{scaled(file.bytes)}B ({_share(file.bytes, sources.bytes)})",
                share=file.bytes / most,
            ),
            "b",
        )
        + "</td></tr>"
        for file in largest
    )
    return f"{text}</p><table class='chart one'><tbody>{rows}</tbody></table>"


def _shown(text: str) -> str:
    """A text that a page can hold: lone surrogates, which stand for bytes that are no UTF-8, as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _rest(found: Stats, manifest: Manifest) -> str:
    rows = [(f"documents left out: {reason}", f"{count:,}") for reason, count in found.left_out.items()]
    rows += [(f"records skipped: {reason}", f"{count:,}") for reason, count in manifest.skipped.items()]
    rows += [(f"special string {string} in the text", f"{count:,}") for string, count in found.special_strings.items()]
    if found.duplicates is not None:
        twice = found.duplicates
        rows.append(("exact duplicates in the store", f"{twice.documents:,} documents, {twice.tokens:,} tokens"))
    return _facts(rows) if rows else "<p>Nothing was left out, and no special string stands in the text.</p>"


def _made(manifest: Manifest, found: Stats) -> str:
    engine = manifest.engine.get("engine") or manifest.engine.get("name")
    rows = [
        ("tokenizer", manifest.tokenizer.name),
        ("ids on disk", f"{manifest.dtype}, {len(manifest.shards)} shards"),
        ("BOS, EOS", f"{'BOS' if manifest.bos else 'no BOS'}, {'EOS' if manifest.eos else 'no EOS'}"),
        ("special strings in text", f"encoded as {manifest.specials}"),
        *([("engine", str(engine))] if engine else []),
        ("fingerprint", found.fingerprint),
    ]
    return _facts(rows)


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th scope=row>{escape(_shown(name))}</th><td>{escape(_shown(value))}</td></tr>" for name, value in rows
    )
    return f"<table class=facts><tbody>{cells}</tbody></table>"


STYLE = """
:root{--bg:#fff;--ink:#1c2330;--soft:#5b6575;--line:#dfe3ea;--track:#eef1f5;--a:#2f6fbf;--b:#c2701c;--c:#8a94a6}
@media (prefers-color-scheme:dark){:root{--bg:#14181f;--ink:#e6e9ef;--soft:#9aa5b5;--line:#2c3440;--track:#222933;
--a:#6ba6ef;--b:#e2a05a;--c:#7c8798}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{margin:0;font-size:1.7rem;overflow-wrap:anywhere}h2{margin:2.5rem 0 .5rem;font-size:1.2rem}
h3{margin:1.5rem 0 .25rem;font-size:1rem}p{margin:.25rem 0 .75rem;color:var(--soft)}
small{font-weight:400;color:var(--soft)}.kind{margin:0}.steps{color:var(--ink)}strong{color:var(--b)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.75rem;margin:1.25rem 0 0}
.tiles div{border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
.tiles dd{margin:0;font-size:1.35rem;font-variant-numeric:tabular-nums}.tiles dt{color:var(--soft);font-size:.85rem}
table{width:100%;border-collapse:collapse;font-size:.9rem}
th{text-align:left;font-weight:400;color:var(--soft);vertical-align:middle}
td,th{padding:.2rem .75rem .2rem 0;font-variant-numeric:tabular-nums}td{overflow-wrap:anywhere}
thead th{font-size:.85rem;border-bottom:1px solid var(--line)}
.chart th{white-space:nowrap;width:1%}.chart th.path{white-space:normal;overflow-wrap:anywhere;width:35%}
.chart td{width:50%}.chart svg{display:inline-block;width:calc(100% - 9.5rem);height:.7rem;vertical-align:middle}
.chart span{display:inline-block;width:9rem;padding-left:.5rem;font-size:.85rem;white-space:nowrap}
.facts th{width:40%;vertical-align:top}.facts td{vertical-align:top}
.track{fill:var(--track)}.a{fill:var(--a)}.b{fill:var(--b)}.c{fill:var(--c)}
@media (max-width:40rem){.chart svg{display:block;width:100%}.chart span{width:auto;padding:0}
.chart td,.chart th{vertical-align:top}.chart td{padding-bottom:.4rem}.chart th.path{width:50%}}
"""
