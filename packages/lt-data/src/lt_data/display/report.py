"""HTML report of a store, self-contained, and optionally its charts as PNG.

The page loads nothing: charts (bars.py) are inline SVG, colors follow the dark or light theme, and labels are HTML
beside the charts, so that they keep their size on a narrow screen. Every text from a store is escaped; should one still
be markup, the content security policy allows no style but that of the page, by its hash, and no script. The output is
reproducible. Cost: that of `stats`.
"""

import base64
import hashlib
import secrets
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from lt_data.analysis.stats import PackStats, StoreStats, stats
from lt_data.display.bars import Bar, length_bars, pack_bars
from lt_data.display.progress_bars import format_si
from lt_data.display.stats_text import format_epoch_steps, provenance_facts
from lt_data.errors import DataError
from lt_data.file_names import to_portable_name
from lt_data.progress import Progress, no_progress
from lt_data.storage import fsync_folder, translate_os_errors, write_file
from lt_data.store.manifest import StoreManifest
from lt_data.store.token_store import TokenStore

MAX_SHOWN_SOURCES = 20


def write_report(
    store: TokenStore,
    out: str | Path,
    *,
    png: str | Path | None = None,
    duplicates: bool = False,
    global_batch_size: int | None = None,
    dp_size: int = 1,
    overwrite: bool = False,
    progress: Progress = no_progress,
) -> tuple[Path, ...]:
    """Write an HTML report of a store, and optionally its charts as PNG.

    Args:
        store: the store.
        out: the HTML file to write.
        png: folder for PNG files; requires matplotlib.
        duplicates: count exact duplicates, which reads all ids.
        global_batch_size: rows in a step, to count the steps of an epoch.
        dp_size: data-parallel ranks.
        overwrite: replace existing files.
        progress: called with the bytes read for duplicates.

    Returns:
        The files written.

    Raises:
        DataError: a file exists already, a file system error, matplotlib is missing, or the store is broken.
    """
    out = Path(out)
    charts: dict[str, Path] = {}
    if png is not None:
        from lt_data.display.report_png import CHART_NAMES, check_matplotlib

        check_matplotlib()
        charts = {name: Path(png) / f"{name}.png" for name in CHART_NAMES}
    for path in (out, *charts.values()):
        if path.exists() and not overwrite:
            raise DataError(f"{path}: exists already; give another name, or --overwrite")
    store_stats = stats(
        store, duplicates=duplicates, global_batch_size=global_batch_size, dp_size=dp_size, progress=progress
    )
    page = render_page(to_portable_name(store.path.name), store_stats, store.manifest)
    _write_atomic(out, page.encode("utf-8", "backslashreplace"))  # a name need not be UTF-8
    if charts:
        from lt_data.display.report_png import render_charts

        for name, content in render_charts(store_stats).items():
            _write_atomic(charts[name], content)
    return (out, *charts.values())


def _write_atomic(path: Path, content: bytes) -> None:
    with translate_os_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tmp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # no name that a link could wait at
        try:
            write_file(tmp, content)
            tmp.replace(path)
        finally:
            tmp.unlink(missing_ok=True)
        fsync_folder(path.parent)


def content_security_policy(*, style: str, scripts: Iterable[str] = ()) -> str:
    """Return the policy of a page that loads nothing and runs nothing but these.

    Args:
        style: content of its `<style>`; style attributes are not applied.
        scripts: contents of its `<script>` elements.
    """
    allowed = " ".join(map(_source_hash, scripts)) or "'none'"
    return f"default-src 'none'; style-src {_source_hash(style)}; script-src {allowed}; img-src data:; base-uri 'none'"


def _source_hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def render_page(name: str, store_stats: StoreStats, manifest: StoreManifest) -> str:
    """Return the HTML of the report."""
    header = f"<header><p class=kind>Token store</p><h1>{escape(name)}</h1></header>"
    body = f"{header}\n{render_sections(store_stats, manifest)}"
    return (
        "<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n"
        f'<meta http-equiv=Content-Security-Policy content="{content_security_policy(style=STYLE)}">\n'
        '<meta name=viewport content="width=device-width, initial-scale=1">\n'
        '<meta name=color-scheme content="light dark">\n'
        f"<title>{escape(name)}: token store</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n"
        "</main>\n</body>\n</html>\n"
    )


def render_sections(store_stats: StoreStats, manifest: StoreManifest, *, level: int = 2) -> str:
    """Return the sections of the report, for another page; `STYLE` is their style sheet.

    Args:
        store_stats: statistics of the store.
        manifest: manifest of the store.
        level: level of the headings, 2 for h2.
    """
    packs = "".join(_pack(pack, level + 1) for pack in store_stats.packs)
    return "\n".join(
        [
            _tiles(store_stats),
            _section("Length of documents", _lengths(store_stats), level, "in tokens, BOS and EOS included"),
            _section("Packs", packs or "<p>This store has no pack yet.</p>", level),
            _section("Sources", _sources(manifest), level),
            _section("Left out and special", _render_exclusions(store_stats, manifest), level),
            _section("How it was made", _render_provenance(manifest, store_stats), level),
        ]
    )


def _tiles(store_stats: StoreStats) -> str:
    facts = [
        ("documents", f"{store_stats.documents:,}"),
        ("tokens", f"{format_si(store_stats.tokens)}"),
        ("bytes per token", f"{store_stats.bytes_per_token:.2f}" if store_stats.text_bytes else "none"),
        ("vocabulary", f"{store_stats.vocab_size:,}"),
        ("median length", f"{store_stats.median_length:,.0f}"),
        ("longest", f"{store_stats.max_length:,}"),
    ]
    tiles = "".join(f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>" for name, value in facts)
    return f"<dl class=tiles>{tiles}</dl>"


def _section(title: str, content: str, level: int, note: str = "") -> str:
    aside = f" <small>{escape(note)}</small>" if note else ""
    return f"<section><h{level}>{escape(title)}{aside}</h{level}>{content}</section>"


def _lengths(store_stats: StoreStats) -> str:
    rows = "".join(
        f"<tr><th scope=row>{name}</th><td>{_bar(documents, 'a')}</td><td>{_bar(tokens, 'b')}</td></tr>"
        for name, documents, tokens in length_bars(store_stats)
    )
    text = (
        f"<p>From {store_stats.min_length:,} to {store_stats.max_length:,} tokens, median "
        f"{store_stats.median_length:,.0f}, mean {store_stats.mean_length:,.1f}. "
        "Each range is twice as long as the previous one.</p>"
    )
    head = "<tr><th scope=col>length</th><th scope=col>documents</th><th scope=col>tokens in them</th></tr>"
    return f"{text}<table class=chart><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _bar(bar: Bar, color: str) -> str:
    width = 100 * bar.fraction
    drawn = f"<rect width='{max(width, 0.6):.2f}' height=10 rx=1 class={color} />" if bar.fraction else ""
    return (
        f"<svg viewBox='0 0 100 10' preserveAspectRatio=none role=img aria-label='{escape(bar.value)}'>"
        f"<rect width=100 height=10 rx=1 class=track />{drawn}</svg><span>{escape(bar.value)}</span>"
    )


def _pack(pack: PackStats, level: int) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(bar.label)}</th><td>{_bar(bar, 'a' if number == 0 else 'c')}</td></tr>"
        for number, bar in enumerate(pack_bars(pack))
    )
    steps = "".join(f"<p class=steps>{escape(format_epoch_steps(item))}</p>" for item in pack.steps)
    note = "" if pack.current else " <strong>of another store: make it again</strong>"
    return (
        f"<h{level}>{escape(pack.name)}{note}</h{level}><p>{pack.rows:,} rows of {pack.seq_len:,} tokens, "
        f"{escape(pack.mode)}; {pack.valid_tokens:,} labels.</p>"
        f"<table class='chart one'><tbody>{rows}</tbody></table>{steps}"
    )


def _sources(manifest: StoreManifest) -> str:
    sources = manifest.sources
    text = f"<p>{sources.files:,} files, {format_si(sources.bytes)}B."
    if not sources.listed:
        return f"{text} They are not listed; the SHA-256 over their list is <code>{escape(sources.sha256)}</code>.</p>"
    largest = sorted(sources.listed, key=lambda file: (-file.bytes, file.path))[:MAX_SHOWN_SOURCES]
    if len(sources.listed) > len(largest):
        text += f" The {len(largest)} largest:"
    max_bytes = max(file.bytes for file in largest) or 1
    rows = "".join(
        f"<tr><th scope=row class=path>{escape(_escape_surrogates(file.path))}</th><td>"
        + _bar(
            Bar(
                label=file.path,
                value=f"{format_si(file.bytes)}B ({_format_percent(file.bytes, sources.bytes)})",
                fraction=file.bytes / max_bytes,
            ),
            "b",
        )
        + "</td></tr>"
        for file in largest
    )
    return f"{text}</p><table class='chart one'><tbody>{rows}</tbody></table>"


def _escape_surrogates(text: str) -> str:
    """Escape unpaired surrogates, which represent bytes that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _format_percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _render_exclusions(store_stats: StoreStats, manifest: StoreManifest) -> str:
    rows = [(f"documents left out: {reason}", f"{count:,}") for reason, count in store_stats.left_out.items()]
    rows += [(f"skipped: {reason}", f"{count:,}") for reason, count in manifest.skipped.items()]
    rows += [(f"files without a checksum: {kind}", f"{count:,}") for kind, count in manifest.sources.unchecked.items()]
    rows += [
        (f"special string {string} in the text", f"{count:,}") for string, count in store_stats.special_strings.items()
    ]
    if store_stats.duplicates is not None:
        duplicates = store_stats.duplicates
        rows.append(
            ("exact duplicates in the store", f"{duplicates.documents:,} documents, {duplicates.tokens:,} tokens")
        )
    return _facts(rows) if rows else "<p>Nothing was left out, and the text has no special strings.</p>"


def _render_provenance(manifest: StoreManifest, store_stats: StoreStats) -> str:
    engine = manifest.engine.get("engine") or manifest.engine.get("name")
    rows = [
        ("tokenizer", manifest.tokenizer.name),
        ("ids on disk", f"{manifest.dtype}, {len(manifest.shards)} shards"),
        ("BOS, EOS", f"{'BOS' if manifest.bos else 'no BOS'}, {'EOS' if manifest.eos else 'no EOS'}"),
        ("special strings in text", f"encoded as {manifest.special_tokens_as}"),
        *([("engine", str(engine))] if engine else []),
        *provenance_facts(store_stats),
        ("fingerprint", store_stats.fingerprint),
    ]
    return _facts(rows)


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f"<tr><th scope=row>{escape(_escape_surrogates(name))}</th><td>{escape(_escape_surrogates(value))}</td></tr>"
        for name, value in rows
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
