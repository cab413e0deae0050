"""The `lt-ckpt` command (also `lt ckpt`): inspect, verify, diff, convert, export, prune, resplit, upload, download.

Only the command line and its printing live here and in `cli_convert.py` and `cli_remote.py`; the work is in the
modules, which are imported when a command runs.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lt_ckpt.cli.convert import convert, resplit
from lt_ckpt.cli.remote import download, upload
from lt_ckpt.cli.terminal import ConfigOption, DtypeOption, ModelArgument, open_model, progress_bar, say

if TYPE_CHECKING:
    from lt_ckpt.checkpoint import Checkpoint
    from lt_ckpt.source import Source

app = typer.Typer(
    name="lt-ckpt",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Inspect, verify, compare, convert and move checkpoints.",
)


def _resolve(path: Path) -> "Checkpoint":
    from lt_ckpt.discover import resolve

    found, rejected = resolve(path)
    for item in rejected:
        sys.stderr.write(f"passed over {item.path}: {item.reason}\n")
    return found


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
        source = open_model(path, config)
        summary, specs = summarize_source(source), {name: group.specs for name, group in source.groups.items()}
    if as_json:
        listed = {"tensors": {g: {n: [s.dtype, list(s.shape)] for n, s in t.items()} for g, t in specs.items()}}
        say(json.dumps({**summary.to_dict(), **(listed if tensors else {})}, indent=2))
        return
    say("\n".join([*summary.lines(), *(tensor_lines(specs) if tensors else [])]))


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
        with progress_bar(f"verifying {folder.name}") as progress:
            report = verify_checkpoint(folder, progress=progress)
        for problem in report.problems:
            say(f"broken: {problem}")
        for name in report.extra:
            say(f"extra: {folder / name} is not part of the checkpoint")
        bad += not report.ok
        if report.ok:
            say(f"ok: {folder}: {report.n_files} files, {size(report.n_bytes)}")
    if bad:
        raise CheckpointError(f"{path}: {bad} of {len(paths)} checkpoints did not verify")


def _verify_model(path: str, against: str, config: Path | None, logits: bool) -> None:
    """Completeness (which opening a model checks), checksums, equal copies, and equality with another model."""
    from lt_ckpt.checksums import carries_checksums, damaged_files
    from lt_ckpt.comparison import compare, config_differences, unequal_copies
    from lt_ckpt.errors import CheckpointError

    source = open_model(path, config)
    with progress_bar("checking") as progress:
        problems = list(damaged_files(source, progress=progress))
    with progress_bar("comparing copies") as progress:
        problems += unequal_copies(source, progress=progress)
    if against:
        other = open_model(against, config)
        problems += config_differences(source, other)
        with progress_bar("comparing") as progress:
            found = [c for c in compare(source, other, progress=progress) if c.name.count("/") == 0]
        problems += [
            f"{c.name}: {c.problem or f'{c.n_different} of {c.n_elements} elements differ'}"
            for c in found
            if not c.equal
        ]
        if logits:
            problems += _compare_logits(source, other)
    for problem in problems:
        say(f"broken: {problem}")
    if problems:
        raise CheckpointError(f"{path}: {len(problems)} problems")
    sums = "every checksum right" if carries_checksums(source) else "its files have no checksums"
    same = f"every tensor equal to {against}" if against else f"every file and tensor there, {sums}"
    say(f"ok: {path}: {len(source.weights.specs)} tensors ({source.format}), {same}")


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
        say(f"{name}: largest difference {largest:.3g} ({relative:.3g} of the largest value)")
        if largest:
            problems.append(f"{name} differs by {largest:.3g}")
    return problems[:1]  # what follows it follows from it


@app.command()
def diff(a: ModelArgument, b: ModelArgument, config: ConfigOption = None) -> None:
    """Compare two models tensor by tensor, whatever their formats; exit code 1 when they differ."""
    from lt_ckpt.comparison import compare

    left, right = open_model(a, config), open_model(b, config)
    differ = n_tensors = 0
    with progress_bar("comparing") as progress:
        for c in compare(left, right, progress=progress):
            n_tensors += 1
            differ += not c.equal
            if c.problem:
                say(f"{c.name}: {c.problem}")
            elif not c.equal or c.dtypes[0] != c.dtypes[1]:
                types = c.dtypes[0] if c.dtypes[0] == c.dtypes[1] else f"{c.dtypes[0]} and {c.dtypes[1]}"
                told = f"{c.n_different} of {c.n_elements} differ, max abs {c.max_abs:.6g}, relative {c.relative:.3g}"
                say(f"{c.name} ({types}): {'equal values' if c.equal else told}")
    say(f"{n_tensors - differ} of {n_tensors} tensors are equal")
    if differ:
        raise typer.Exit(1)


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

    source = open_model(path, config)
    wish = Wish(format="hf", dtype=parse_float(dtype) if dtype else None, max_shard_bytes=int(max_shard_gb * 1e9))
    with progress_bar("exporting") as progress:
        made = convert_to(source, out, wish, progress=progress)
    step = f" step {source.about['step']}" if "step" in source.about else ""
    say(f"exported{step} to {made}")


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
        say(f"removed {folder}")
    say(f"{len(gone)} removed")


for _added in (convert, resplit, upload, download):
    app.command()(_added)
