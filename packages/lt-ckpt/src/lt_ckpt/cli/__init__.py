"""Command line `lt-ckpt`, also `lt ckpt`.

Only the command line and its printing are here and in `convert.py`; the work is in the other modules,
which are imported when a command runs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lt_ckpt.cli.convert import convert
from lt_ckpt.cli.terminal import (
    ConfigOption,
    DtypeOption,
    MasterOption,
    ModelArgument,
    OverflowOption,
    ShardOption,
    open_model,
    progress_bar,
)
from lt_ckpt.terminal_text import echo, echo_error
from lt_model.command_app import CommandApp, path_text

if TYPE_CHECKING:
    from lt_ckpt.source import Source

app = CommandApp(name="lt-ckpt", add_completion=True, help="Inspect, verify, compare, convert and move checkpoints.")


app.command()(convert)


@app.command()
def inspect(
    path: ModelArgument,
    config: ConfigOption = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="Also list every tensor.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, with the recipe, as JSON.")] = False,
) -> None:
    """Show the content of a checkpoint or any other model, from its headers: no hash is compared."""
    import json

    from lt_ckpt.discovery import describe_fallbacks, resolve_checkpoint
    from lt_ckpt.formats import HUB, detect_format
    from lt_ckpt.summary import summarize_checkpoint, summarize_source, summary_lines, tensor_lines

    if not path.startswith(HUB) and detect_format(Path(path)) == "lt":
        checkpoint, rejected = resolve_checkpoint(path, verify=False)
        for sentence in describe_fallbacks(checkpoint, rejected):
            echo_error(sentence)
        summary = summarize_checkpoint(checkpoint)
        specs = {group: checkpoint.specs(group) for group in checkpoint.groups}
    else:
        source = open_model(path, config, optimizer=None)
        summary = summarize_source(source)
        specs = {name: group.specs for name, group in source.groups.items()}
    if as_json:
        listed = {"tensors": {g: {n: [s.dtype, list(s.shape)] for n, s in t.items()} for g, t in specs.items()}}
        echo(json.dumps({**summary, **(listed if tensors else {})}, indent=2))
        return
    echo("\n".join([*summary_lines(summary), *(tensor_lines(specs) if tensors else [])]))


@app.command()
def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint, a folder of checkpoints, a run, or any other model.",
            parser=path_text,
        ),
    ],
    config: ConfigOption = None,
    against: Annotated[
        str,
        typer.Option(
            "--against",
            metavar="MODEL",
            help="A model in any format whose tensors must be the same, bit for bit.",
            parser=path_text,
        ),
    ] = "",
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Require optimizer state; with --against, compare it too.")
    ] = False,
) -> None:
    """Check every byte, with the optimizer's, against its checksum, or a conversion against its source."""
    from lt_ckpt.formats import HUB, detect_format

    ours = not path.startswith(HUB) and detect_format(Path(path)) == "lt"
    if ours:
        _verify_hashes(Path(path))
    if against or optimizer or not ours:
        _verify_model(path, against, config, optimizer=optimizer, is_hashed=ours)


def _verify_hashes(path: Path) -> None:
    from lt_ckpt.discovery import checkpoint_root, list_steps
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.integrity import verify as verify_checkpoint
    from lt_ckpt.summary import format_bytes

    bad = 0
    paths = [found for _, found in list_steps(checkpoint_root(path))] or [path]
    for folder in paths:
        with progress_bar(f"verifying {folder.name}") as progress:
            report = verify_checkpoint(folder, progress=progress)
        for problem in report.problems:
            echo(f"broken: {problem}")
        for name in report.extra_files:
            echo(f"extra: {folder / name} is not part of the checkpoint")
        bad += not report.is_ok
        if report.is_ok:
            echo(f"ok: {folder}: {report.n_files} files, {format_bytes(report.n_bytes)}")
    if bad:
        raise CheckpointError(f"{path}: {bad} of {len(paths)} checkpoints did not verify")


def _verify_model(path: str, against: str, config: Path | None, *, optimizer: bool, is_hashed: bool) -> None:
    """Check completeness (by opening), checksums unless `is_hashed`, replicas, and equality with another model."""
    from lt_ckpt.checksums import describe_checksums, iter_damages
    from lt_ckpt.comparison import compare, find_replica_mismatches
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.model_files import carries_files, find_differences

    source = open_model(path, config, optimizer=None, verify=not is_hashed)
    if optimizer and source.groups.keys() == {"weights"}:
        raise CheckpointError(f"{path}: has no optimizer state; leave out --optimizer to verify the weights")
    with progress_bar("checking") as progress:
        problems = [] if is_hashed else list(iter_damages(source, progress=progress))
    with progress_bar("comparing replicas") as progress:
        problems += find_replica_mismatches(source, progress=progress)
    if against:
        other = open_model(against, config, optimizer=None) if optimizer else open_model(against, config)
        problems += find_differences(source, other)
        for side in (source, other):
            if not carries_files(side):
                echo(f"not compared: {side.path} has no tokenizer and no generation config")
        with progress_bar("comparing") as progress:
            left = _select_groups(source, other, optimizer=optimizer)
            right = _select_groups(other, source, optimizer=optimizer)
            found = list(compare(left, right, progress=progress))
        problems += [
            f"{c.name}: {c.problem or f'{c.n_different} of {c.n_elements} elements differ'}"
            for c in found
            if not c.is_equal
        ]
    for problem in problems:
        echo(f"broken: {problem}")
    if problems:
        raise CheckpointError(f"{path}: {len(problems)} problems")
    same = f", every tensor and model file equal to {against}" if against else ""
    n_tensors = ", ".join(f"{len(group.specs)} tensors of {kind}" for kind, group in source.groups.items())
    echo(f"ok: {path} ({source.format}): {n_tensors}, all present{same}; {describe_checksums(source)}")


def _select_groups(source: "Source", other: "Source", *, optimizer: bool) -> "Source":
    """Return a source with the groups to compare; fp32 weights stand for masters that only `other` has."""
    from dataclasses import replace

    from lt_ckpt.llama_tensors import MASTER_WEIGHTS

    if not optimizer:
        return replace(source, groups={"weights": source.weights})
    is_fp32 = all(spec.dtype == "F32" for spec in source.weights.specs.values())
    if is_fp32 and MASTER_WEIGHTS in other.groups and MASTER_WEIGHTS not in source.groups:
        return replace(source, groups={**source.groups, MASTER_WEIGHTS: source.weights})
    return source


@app.command()
def diff(a: ModelArgument, b: ModelArgument, config: ConfigOption = None) -> None:
    """Compare two models in any formats tensor by tensor; exit code 1 if they differ."""
    from lt_ckpt.comparison import compare

    left, right = open_model(a, config), open_model(b, config)
    differ = n_tensors = 0
    alone = left.groups.keys() ^ right.groups.keys()  # such as the optimizer's: one line each, not one a tensor
    for kind in sorted(alone):
        has, lacks = (left, right) if kind in left.groups else (right, left)
        echo(f"{kind}: {len(has.groups[kind].specs)} tensors, not in {lacks.path}")
    with progress_bar("comparing") as progress:
        for c in compare(left, right, progress=progress):
            n_tensors += 1
            differ += not c.is_equal
            if c.name.partition("/")[0] in alone:
                continue
            if c.problem:
                echo(f"{c.name}: {c.problem}")
            elif not c.is_equal or c.dtypes[0] != c.dtypes[1]:
                types = c.dtypes[0] if c.dtypes[0] == c.dtypes[1] else f"{c.dtypes[0]} and {c.dtypes[1]}"
                difference = f"{c.n_different} of {c.n_elements} differ, max abs {c.max_abs_diff:.6g}"
                echo(f"{c.name} ({types}): {'equal values' if c.is_equal else difference}")
    echo(f"{n_tensors - differ} of {n_tensors} tensors are equal")
    if differ:
        raise typer.Exit(1)


@app.command()
def export(
    path: ModelArgument,
    out: Annotated[Path, typer.Option("--out", help="Folder to make.")],
    config: ConfigOption = None,
    dtype: DtypeOption = "",
    allow_overflow: OverflowOption = False,
    max_shard_gb: ShardOption = 5.0,
    master_weights: MasterOption = False,
) -> None:
    """Write the weights as a Hugging Face folder, with the tokenizer and the generation config."""
    convert(path, out, "hf", config, dtype, allow_overflow, max_shard_gb, master_weights=master_weights)


@app.command()
def prune(
    path: Annotated[Path, typer.Argument(help="A folder of checkpoints, or a run.")],
    keep_last: Annotated[int, typer.Option("--keep-last", help="How many of the newest to keep.", min=1)],
    keep_every: Annotated[int, typer.Option("--keep-every", help="Also keep steps that this divides.", min=0)] = 0,
) -> None:
    """Remove old checkpoints; the newest valid one always stays."""
    from lt_ckpt.discovery import checkpoint_root
    from lt_ckpt.discovery import prune_checkpoints as prune_root
    from lt_ckpt.errors import CheckpointError

    if not path.is_dir():
        raise CheckpointError(f"{path}: is no folder; give a folder of checkpoints, or a run")
    root = checkpoint_root(path)
    with progress_bar("verifying") as progress:
        removed = prune_root(root, keep_last=keep_last, keep_every=keep_every, progress=progress)
    for folder in removed:
        echo(f"removed {folder}")
    echo(f"{len(removed)} removed")


@app.command()
def upload(
    path: Annotated[Path, typer.Argument(help="A checkpoint, or any finished folder.")],
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of the folder to make, or hf://org/name[@branch].")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what differs there.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A new hf:// repository is public, not private.")] = False,
) -> None:
    """Copy a folder to S3 or to a Hugging Face hub; what is there is not sent again."""
    from lt_ckpt.errors import CheckpointError

    if url.startswith("hf://"):
        from lt_ckpt.hub.upload import upload_to_hub

        report = upload_to_hub(path, url, overwrite=overwrite, public=public)
        moved = _describe("sent", len(report.uploaded), report.n_bytes, len(report.skipped))
        at = f", commit {report.commit}" if report.commit else ""
        echo(f"{path} uploaded to {report.address}: {moved}{at}, verified")
        return
    if public:
        raise CheckpointError(f"--public is for hf://, not for {url}; leave it out")
    from lt_ckpt.s3 import transfer

    with progress_bar(f"uploading {path.name}") as progress:
        done = transfer.upload(path, url, overwrite=overwrite, progress=progress)
    echo(f"{path} uploaded to {done.url}: {_describe('sent', len(done.sent), done.n_bytes, len(done.kept))}")


@app.command()
def download(
    url: Annotated[str, typer.Argument(help="s3://bucket/prefix of a checkpoint, or of a folder of them.")],
    out: Annotated[Path, typer.Argument(help="The folder to make; with --latest the folder of checkpoints.")],
    latest: Annotated[bool, typer.Option("--latest", help="The newest valid checkpoint below the address.")] = False,
) -> None:
    """Download a checkpoint from S3 and verify it before it gets its name."""
    from lt_ckpt.errors import CheckpointError
    from lt_ckpt.s3 import transfer

    with progress_bar("downloading") as progress:
        if latest:
            done, rejected = transfer.download_latest(url, out, progress=progress)
            for item in rejected:
                echo(f"skipped {item.url}: {item.reason}")
            if done is None:
                raise CheckpointError(f"{url}: no valid checkpoint below it")
        else:
            done = transfer.download(url, out, progress=progress)
    moved = _describe("received", len(done.fetched), done.n_bytes, done.files - len(done.fetched))
    echo(f"{url} downloaded to {done.path}: {moved}, verified")


def _describe(word: str, n_files: int, n_bytes: int, n_kept: int) -> str:
    from lt_ckpt.summary import format_bytes

    return f"{n_files} files {word} ({format_bytes(n_bytes)}), {n_kept} already present"
