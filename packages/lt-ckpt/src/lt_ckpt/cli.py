"""The `lt-ckpt` command (also `lt ckpt`): inspect, verify, diff, convert, export, prune, upload, download.

Only the command line and its printing live here; the work is in the modules, which are imported when a command runs.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

if TYPE_CHECKING:
    from lt_ckpt.checkpoint import Checkpoint
    from lt_ckpt.source import Source

app = typer.Typer(
    name="lt-ckpt",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Inspect, verify, compare, convert and move checkpoints.",
)


def _say(text: str) -> None:
    r"""Prints on standard output; what its encoding cannot express is written as an escape, such as `\u6771`."""
    # `typer.echo` would stop with an error there, or write UTF-8 where ASCII was asked for.
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
    sys.stdout.flush()


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Shows bytes done, rate and time left: a bar on a terminal, else a line every ten seconds."""
    if not sys.stderr.isatty():
        from lt_ckpt.summary import size

        last = time.monotonic()

        def line(done: int, total: int, unit: str) -> None:
            nonlocal last
            if time.monotonic() - last >= 10:
                last = time.monotonic()
                sys.stderr.write(f"{title}: {size(done)} of {size(total)}\n")

        yield line
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total, _: bars.update(task, completed=done, total=total)


def _resolve(path: Path) -> "Checkpoint":
    from lt_ckpt.discover import resolve

    found, rejected = resolve(path)
    for item in rejected:
        sys.stderr.write(f"passed over {item.path}: {item.reason}\n")
    return found


ModelArgument = Annotated[
    str, typer.Argument(help="A model in any format: a folder, a file, a run, or hf://org/name@revision.")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="A config.json, for formats that do not say what the model is.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Cast to f32, bf16, f16 or f64; as stored if not given.")]


def _open(path: str, config: Path | None) -> "Source":
    from lt_ckpt.formats import open_source

    with _progress(f"downloading {path}") as progress:
        return open_source(path, config=config, progress=progress)


@app.command()
def inspect(
    path: ModelArgument,
    config: ConfigOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, with the recipe, as JSON.")] = False,
) -> None:
    """Show what a checkpoint or any other model holds."""
    import json

    from lt_ckpt.formats import HUB, detect
    from lt_ckpt.summary import summarize, summarize_source, tensor_lines

    if not path.startswith(HUB) and detect(Path(path)) == "lt":
        checkpoint = _resolve(Path(path))
        summary, specs = summarize(checkpoint), {group: checkpoint.specs(group) for group in checkpoint.groups}
    else:
        source = _open(path, config)
        summary, specs = summarize_source(source), {name: group.specs for name, group in source.groups.items()}
    if as_json:
        listed = {"tensors": {g: {n: [s.dtype, list(s.shape)] for n, s in t.items()} for g, t in specs.items()}}
        _say(json.dumps({**summary.to_dict(), **(listed if tensors else {})}, indent=2))
        return
    _say("\n".join([*summary.lines(), *(tensor_lines(specs) if tensors else [])]))


@app.command()
def verify(
    path: Annotated[str, typer.Argument(help="A checkpoint, a folder of checkpoints, a run, or any other model.")],
    config: ConfigOption = None,
    against: Annotated[
        str, typer.Option("--against", help="A model in any format whose tensors must be the same, bit for bit.")
    ] = "",
    logits: Annotated[
        bool, typer.Option("--logits", help="Also compare a forward pass layer by layer (with --against).")
    ] = False,
) -> None:
    """Check every byte against the hashes taken when it was written; or a conversion against what it was made of."""
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.formats import HUB, detect

    if logits and not against:
        raise CheckpointError("--logits has no effect without --against; name the model to compare with")
    ours = not path.startswith(HUB) and detect(Path(path)) == "lt"
    if ours:
        _verify_hashes(Path(path))
    if against or not ours:
        _verify_model(path, against, config, logits)


def _verify_hashes(path: Path) -> None:
    from lt_ckpt.discover import checkpoint_root, list_steps
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.integrity import verify as verify_checkpoint
    from lt_ckpt.summary import size

    bad = 0
    paths = [found for _, found in list_steps(checkpoint_root(path))] or [path]
    for folder in paths:
        with _progress(f"verifying {folder.name}") as progress:
            report = verify_checkpoint(folder, progress=progress)
        for problem in report.problems:
            _say(f"broken: {problem}")
        for name in report.extra:
            _say(f"extra: {folder / name} is not part of the checkpoint")
        bad += not report.ok
        if report.ok:
            _say(f"ok: {folder}: {report.n_files} files, {size(report.n_bytes)}")
    if bad:
        raise CheckpointError(f"{path}: {bad} of {len(paths)} checkpoints did not verify")


def _verify_model(path: str, against: str, config: Path | None, logits: bool) -> None:
    """Completeness (which opening a model checks), equal copies, and equality with another model."""
    from lt_ckpt.compare import compare, unequal_copies
    from lt_ckpt.errors import CheckpointError

    source = _open(path, config)
    with _progress("comparing copies") as progress:
        problems = list(unequal_copies(source, progress=progress))
    if against:
        other = _open(against, config)
        with _progress("comparing") as progress:
            found = [c for c in compare(source, other, progress=progress) if c.name.count("/") == 0]
        problems += [
            f"{c.name}: {c.problem or f'{c.n_different} of {c.n_elements} elements differ'}"
            for c in found
            if not c.equal
        ]
        if logits:
            problems += _compare_logits(source, other)
    for problem in problems:
        _say(f"broken: {problem}")
    if problems:
        raise CheckpointError(f"{path}: {len(problems)} problems")
    same = f"every tensor equal to {against}" if against else "every file and tensor there; this format has no hashes"
    _say(f"ok: {path}: {len(source.weights.specs)} tensors ({source.format}), {same}")


def _compare_logits(a: "Source", b: "Source") -> list[str]:
    from lt_ckpt.errors import CheckpointError

    try:
        from lt_ckpt.logits import compare_logits
    except ModuleNotFoundError as exc:
        raise CheckpointError("--logits needs torch: pip install 'lt-ckpt[torch]'") from exc
    vocabulary = a.weights.specs["model.embed_tokens.weight"].shape[0]
    tokens = [(i * 7919 + 1) % vocabulary for i in range(32)]
    problems: list[str] = []
    for name, largest, relative in compare_logits(a, b, tokens):
        _say(f"{name}: largest difference {largest:.3g} ({relative:.3g} of the largest value)")
        if largest:
            problems.append(f"{name} differs by {largest:.3g}")
    return problems[:1]  # what follows it follows from it


@app.command()
def diff(a: ModelArgument, b: ModelArgument, config: ConfigOption = None) -> None:
    """Compare two models tensor by tensor, whatever their formats; exit code 1 when they differ."""
    from lt_ckpt.compare import compare

    left, right = _open(a, config), _open(b, config)
    differ = n_tensors = 0
    with _progress("comparing") as progress:
        for c in compare(left, right, progress=progress):
            n_tensors += 1
            differ += not c.equal
            if c.problem:
                _say(f"{c.name}: {c.problem}")
            elif not c.equal or c.dtypes[0] != c.dtypes[1]:
                types = c.dtypes[0] if c.dtypes[0] == c.dtypes[1] else f"{c.dtypes[0]} and {c.dtypes[1]}"
                told = f"{c.n_different} of {c.n_elements} differ, max abs {c.max_abs:.6g}, relative {c.relative:.3g}"
                _say(f"{c.name} ({types}): {'equal values' if c.equal else told}")
    _say(f"{n_tensors - differ} of {n_tensors} tensors are equal")
    if differ:
        raise typer.Exit(1)


@app.command()
def convert(
    path: ModelArgument,
    out: Annotated[Path, typer.Argument(help="What to make: a folder; for --to pt a file.")],
    to: Annotated[str, typer.Option("--to", help="hf, nxd, lt or pt.")],
    config: ConfigOption = None,
    dtype: DtypeOption = "",
    max_shard_gb: Annotated[float, typer.Option("--max-shard-gb", help="Most GB of tensors per file (hf, dcp).")] = 5.0,
    tp: Annotated[int, typer.Option("--tp", help="NxD: tensor parallel degree.")] = 1,
    pp: Annotated[int, typer.Option("--pp", help="NxD: pipeline stages.")] = 1,
    virtual_pp: Annotated[int, typer.Option("--virtual-pp", help="NxD: chunks of layers per stage.")] = 1,
    kv_multiplier: Annotated[
        int, typer.Option("--kv-multiplier", help="NxD: times each key/value head is repeated (with --qkv-linear).")
    ] = 1,
    qkv_linear: Annotated[bool, typer.Option("--qkv-linear", help="NxD: the GQA layer, weight_q/_k/_v.")] = False,
    fuse_qkv: Annotated[bool, typer.Option("--fuse-qkv", help="NxD: weight_qkv of the GQA layer.")] = False,
    coalesce_qkv: Annotated[bool, typer.Option("--coalesce-qkv", help="NxD: one qkv_proj.weight (MHA).")] = False,
    xser: Annotated[bool, typer.Option("--xser", help="NxD: every tensor in a file of its own.")] = False,
    layout: Annotated[str, typer.Option("--layout", help="NxD: v1 or v2.")] = "v2",
    tag: Annotated[str, typer.Option("--tag", help="NxD v2: the tag folder, with its markers.")] = "",
    head_order: Annotated[
        str, typer.Option("--head-order", help="NxD: trn1, or trn2 (never tried on hardware).")
    ] = "trn1",
) -> None:
    """Convert a model between formats, in one pass and little memory."""
    from lt_ckpt.dtypes import parse_float
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.formats import FORMATS, Wish, convert_to

    if to not in FORMATS:
        raise CheckpointError(f"--to {to}: not one of {', '.join(FORMATS)}")
    nxd = {
        "--tp": tp != 1,
        "--pp": pp != 1,
        "--virtual-pp": virtual_pp != 1,
        "--kv-multiplier": kv_multiplier != 1,
        "--qkv-linear": qkv_linear,
        "--fuse-qkv": fuse_qkv,
        "--coalesce-qkv": coalesce_qkv,
        "--xser": xser,
        "--layout": layout != "v2",
        "--tag": bool(tag),
        "--head-order": head_order != "trn1",
    }
    useless = [name for name, given in nxd.items() if given and to != "nxd"]
    if useless:
        raise CheckpointError(f"{', '.join(useless)}: has no effect with --to {to}; leave it out, or use --to nxd")
    options = None
    if to == "nxd":
        from lt_ckpt.nxd_options import NxdOptions

        if coalesce_qkv and (qkv_linear or fuse_qkv):
            raise CheckpointError("--coalesce-qkv and --qkv-linear exclude each other: MHA has one, GQA the other")
        if fuse_qkv and not qkv_linear:
            raise CheckpointError("--fuse-qkv has no effect without --qkv-linear; give both")
        grouped = "gqa_fused" if fuse_qkv else "gqa"
        options = NxdOptions(
            tp=tp,
            pp=pp,
            virtual_pp=virtual_pp,
            kv_multiplier=kv_multiplier,
            qkv=grouped if qkv_linear else "coalesced" if coalesce_qkv else "separate",
            layout=cast("Literal['v1', 'v2']", layout),
            xser=xser,
            tag=tag,
            head_order=cast("Literal['trn1', 'trn2']", head_order),
        )
    source = _open(path, config)
    wish = Wish(
        format=to,
        dtype=parse_float(dtype) if dtype else None,
        max_shard_bytes=int(max_shard_gb * 1e9),
        nxd=options,
    )
    with _progress(f"converting to {to}") as progress:
        made = convert_to(source, out, wish, progress=progress)
    _say(f"{source.format} {path} converted to {to}: {made}")


@app.command()
def export(
    path: ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    config: ConfigOption = None,
    dtype: DtypeOption = "",
    max_shard_gb: Annotated[float, typer.Option("--max-shard-gb", help="Most GB of tensors per file.")] = 5.0,
) -> None:
    """Write the weights as a Hugging Face folder, with the tokenizer and the generation config."""
    from lt_ckpt.dtypes import parse_float
    from lt_ckpt.formats import Wish, convert_to

    source = _open(path, config)
    wish = Wish(format="hf", dtype=parse_float(dtype) if dtype else None, max_shard_bytes=int(max_shard_gb * 1e9))
    with _progress("exporting") as progress:
        made = convert_to(source, out, wish, progress=progress)
    step = f" step {source.about['step']}" if "step" in source.about else ""
    _say(f"exported{step} to {made}")


@app.command()
def prune(
    path: Annotated[Path, typer.Argument(help="A folder of checkpoints, or a run.")],
    keep_last: Annotated[int, typer.Option("--keep-last", help="How many of the newest to keep.", min=1)],
    keep_every: Annotated[int, typer.Option("--keep-every", help="Also keep steps that this divides.", min=0)] = 0,
) -> None:
    """Remove old checkpoints; the newest good one stays whatever happens."""
    from lt_ckpt.discover import checkpoint_root
    from lt_ckpt.discover import prune as prune_root

    gone = prune_root(checkpoint_root(path), last=keep_last, every=keep_every)
    for folder in gone:
        _say(f"removed {folder}")
    _say(f"{len(gone)} removed")
