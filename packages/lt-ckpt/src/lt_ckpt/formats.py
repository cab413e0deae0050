"""Format registry: detection of the format at a path, opening, and conversion.

Detection uses names only: `hf://` is a model of the Hugging Face hub, a folder with COMMIT (or a folder of checkpoints,
or a run) is ours, `.metadata` indicates torch.distributed.checkpoint, config.json with safetensors Hugging Face, rank
files NxD, `consolidated.*.pth` Meta; a file is a torch-saved state dict.
"""

import os
import pkgutil
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lt_ckpt import files
from lt_ckpt.confined_files import resolve_confined
from lt_ckpt.errors import CheckpointError, translate_os_errors
from lt_ckpt.hash_list import HashList, read_hash_list
from lt_ckpt.hf.folder import CONFIG, INDEX_FILE, SINGLE_FILE, WEIGHT_FILES, is_model_file, read_aux_files, read_json
from lt_ckpt.source import Source
from lt_model.hf import check_not_quantized

FORMATS = ("hf", "nxd", "lt", "dcp", "pt")
HUB = "hf://"
_OPENERS = {
    "hf": "lt_ckpt.hf.format:open_hf",
    "nxd": "lt_ckpt.nxd.format:open_nxd",
    "dcp": "lt_ckpt.dcp.format:open_dcp",
    "pt": "lt_ckpt.hf.format:open_hf",
    "meta": "lt_ckpt.meta_llama.format:open_meta",
}
"""Format → the function that opens it; imported when it is needed, torch with it."""
RANK_FILE = re.compile(r"(^|_)tp_rank_\d+_pp_rank_\d+")
MAX_SEARCH_DEPTH = 3


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Options of a conversion.

    Attributes:
        format: One of `FORMATS`.
        dtype: Safetensors code to cast the weights to; None: as stored.
        max_shard_bytes: Maximum bytes of tensors per file (hf).
        nxd: The degrees and choices of an NxD target (`lt_ckpt.nxd.options.NxdOptions`).
        dp: NxD: also write the optimizer's ZeRO-1 state, for this many data-parallel ranks; 0: weights only.
        allow_replica_mismatch: Use the first rank's replica where a source's replicas of a tensor differ, instead of
            refusing.
        allow_overflow: Let finite values beyond the range of `dtype` become infinite, instead of refusing.
        verify: Compare the source's files with their checksums first.
    """

    format: str
    dtype: str | None = None
    max_shard_bytes: int = 5 * 10**9
    nxd: Any = None
    dp: int = 0
    allow_replica_mismatch: bool = False
    allow_overflow: bool = False
    verify: bool = True


def detect_format(path: Path) -> str:
    """Return the format of a path: one of `FORMATS`, or `meta`.

    Raises:
        CheckpointError: The path does not exist, may not be looked at, or its format is unknown.
    """
    with translate_os_errors("reading", path):
        return _detect_format(path)


def _detect_format(path: Path) -> str:
    from lt_ckpt.discovery import checkpoint_root, list_steps
    from lt_ckpt.folders import COMMIT

    if path.is_file():
        if path.suffix == ".safetensors" or path.name in (CONFIG, INDEX_FILE):
            raise CheckpointError(
                f"{path}: one file of a Hugging Face model; give its folder, {path.parent}, with {CONFIG} and "
                f"{SINGLE_FILE} or {INDEX_FILE}"
            )
        return "pt"
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such file or folder; a model of the Hugging Face hub is written {HUB}ORG/NAME"
        )
    if (path / COMMIT).is_file() or list_steps(checkpoint_root(path)):
        return "lt"
    if (path / ".metadata").is_file():
        return "dcp"
    if any(path.glob("consolidated.*.pth")):
        return "meta"
    if any((path / name).is_file() for name in WEIGHT_FILES):
        return "hf"
    if _has_rank_files(path, MAX_SEARCH_DEPTH):
        return "nxd"
    raise CheckpointError(
        f"{path}: unknown checkpoint format: no COMMIT (lt), .metadata (torch.distributed.checkpoint), "
        f"{', '.join(WEIGHT_FILES)} (Hugging Face), tp_rank_XX_pp_rank_XX (NxD) or consolidated.*.pth "
        "(Meta) in it"
    )


def _has_rank_files(folder: Path, levels: int) -> bool:
    entries = list(os.scandir(folder))
    if any(RANK_FILE.search(entry.name) for entry in entries):
        return True
    inner = (path for path in map(Path, entries) if path.is_dir())  # False for a link to itself, unlike the entry's own
    return levels > 1 and any(_has_rank_files(path, levels - 1) for path in inner)


def open_source(
    path: str | os.PathLike[str],
    *,
    config: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    master_weights: bool = False,
    optimizer: bool | None = False,
    verify: bool = True,
    progress: files.ProgressCallback | None = None,
) -> Source:
    """Open a model in any format, or on the Hugging Face hub.

    Args:
        path: A file or folder; or `hf://org/name@revision`, which is downloaded first.
        config: A config.json, or a folder with one, for formats that have none (NxD, a .pt, DCP, Meta). The tokenizer's
            files and generation_config.json beside it belong to the model too.
        cache_dir: Cache of hub models; by default the user's cache folder.
        master_weights: Of an NxD checkpoint, the fp32 master weights of its ZeRO-1 state instead of the model files; of
            one of ours, its group `master`.
        optimizer: Of an NxD checkpoint, also the moments of its ZeRO-1 state; None: if it has one.
        verify: Hash the files of a hub model, and the checkpoints of a run, newest first, until one is undamaged. False
            where another process did that, or where only headers and configuration are needed.
        progress: Called with the bytes downloaded or verified.

    Raises:
        CheckpointError: Unknown format, damaged files, or a missing configuration.
        lt_model.ModelError: The configuration is of no supported family.
    """
    given_config = None if config is None else read_config(Path(config))
    nxd = {"master_weights": master_weights, "optimizer": optimizer}
    if str(path).startswith(HUB):
        from lt_ckpt.hub.model import fetch_model

        fetched = fetch_model(str(path), cache=cache_dir, verify=verify, progress=progress)
        source = open_source(fetched.path, config=config, **nxd)
        return replace(source, format_info={**source.format_info, **fetched.about})
    path = Path(path)
    kind = detect_format(path)
    has_masters, has_state = kind in ("nxd", "lt"), kind in ("nxd", "lt", "dcp")
    if (master_weights and not has_masters) or (optimizer and not has_state):
        raise CheckpointError(f"{path}: --optimizer and --master-weights have no effect on {kind}")
    if kind == "lt":
        from lt_ckpt.discovery import describe_fallbacks, resolve_checkpoint
        from lt_ckpt.llama_tensors import MASTER_WEIGHTS, select_group
        from lt_ckpt.lt_format import open_lt

        checkpoint, rejected = resolve_checkpoint(path, verify=verify, progress=progress)
        source = replace(open_lt(checkpoint), fallbacks=describe_fallbacks(checkpoint, rejected))
        return select_group(source, MASTER_WEIGHTS) if master_weights else source
    folder = path.parent if kind == "pt" else _model_folder(path, kind)
    hash_list = _read_hash_list(folder, config_is_given=config is not None) if kind in ("hf", "dcp", "nxd") else None
    has_config = (folder / CONFIG).is_file()
    known = given_config or (read_json(folder / CONFIG) if has_config else None)
    if known is None:
        if kind == "pt":  # perhaps no file of torch at all
            from lt_ckpt.torchfile.file import load_pt

            load_pt(path)
        raise CheckpointError(
            f"{path}: has no model configuration ({CONFIG}); give the model's Hugging Face one (--config config.json; "
            "in a recipe model.init_config)"
        )
    check_not_quantized(known, str(folder / CONFIG if config is None else config))
    source: Source = pkgutil.resolve_name(_OPENERS[kind])(path, config=known, **(nxd if kind == "nxd" else {}))
    aux_files = read_aux_files(folder) if has_config or kind != "pt" else {}
    if config is not None and kind != "hf":
        aux_files |= read_aux_files(Path(config) if Path(config).is_dir() else Path(config).parent)
    if kind != "pt":  # whose file the user has named
        for file in source.files():
            resolve_confined(source.root, file)
    return replace(source, aux_files=aux_files, hash_list=hash_list)


def read_config(path: Path) -> dict[str, Any]:
    """Read a config.json, which may be a link if it is named itself, or the one in a folder."""
    return read_json(path / CONFIG if path.is_dir() else Path(os.path.realpath(path)))


def _read_hash_list(folder: Path, *, config_is_given: bool) -> HashList | None:
    """Read the list of hashes in a folder, and compare the small files that opening reads as wholes.

    A configuration that is given replaces the folder's, which may then differ.

    Raises:
        CheckpointError: The list is malformed, or one of those files is missing or differs.
    """
    found = read_hash_list(folder)
    if found is None:
        return None
    for file in found.hashes:
        if file == ".metadata" or (is_model_file(file) and not (file == CONFIG and config_is_given)):
            found.check_file(file)
    return found


def _model_folder(path: Path, format_name: str) -> Path:
    """Return the folder of a model's files: of a folder of tags, the tag that is opened."""
    if format_name != "nxd" or (path / CONFIG).is_file():
        return path
    from lt_ckpt.nxd.discovery import find_nxd_files

    return find_nxd_files(path).root


def convert_checkpoint(
    source: Source,
    out: str | os.PathLike[str],
    options: ConvertOptions,
    *,
    progress: files.ProgressCallback | None = None,
) -> Path:
    """Convert a source.

    Args:
        source: What to convert.
        out: The folder to make; for `pt` the file; for `lt` the folder of checkpoints to save into.
        options: Format and options of the output.
        progress: Called with the bytes written.

    Returns:
        The path of the output.

    Raises:
        CheckpointError: The options cannot be met, or the disk fails; nothing is left behind.
    """
    from lt_ckpt.checksums import check_undamaged
    from lt_ckpt.comparison import find_replica_mismatches
    from lt_ckpt.conversion import convert
    from lt_ckpt.hf.format import hf_target, pt_target
    from lt_ckpt.llama_tensors import check_tied_head

    if options.verify:
        check_undamaged(source, progress=progress)
    if not options.allow_replica_mismatch:
        for mismatch in find_replica_mismatches(source, progress=progress):
            raise CheckpointError(
                f"{source.path}: {mismatch}; the ranks diverged in training, or the configuration is not this model's; "
                "--allow-replica-mismatch uses the first rank's replica"
            )
    if options.format in ("hf", "lt") and source.model.tie_word_embeddings:
        check_tied_head(source)
    if options.format == "lt":
        from lt_ckpt.lt_format import save_lt

        return save_lt(source, out, dtype=options.dtype, allow_overflow=options.allow_overflow, progress=progress)
    if options.format == "hf":
        target = hf_target(source, dtype=options.dtype, max_shard_bytes=options.max_shard_bytes)
    elif options.format == "nxd":
        from lt_ckpt.nxd.format import nxd_target

        target = nxd_target(source, options.nxd, dtype=options.dtype)
        if options.dp:
            from lt_ckpt.nxd.zero1_writer import add_optimizer_states

            source, target = add_optimizer_states(source, target, options.nxd, options.dp)
    elif options.format == "dcp":
        from lt_ckpt.dcp.format import dcp_target

        target = dcp_target(source, dtype=options.dtype)
    elif options.format == "pt":
        target = pt_target(source, Path(out).name, dtype=options.dtype)
    else:
        raise CheckpointError(f"format {options.format!r} is not one of {', '.join(FORMATS)}")
    target = replace(target, allow_overflow=options.allow_overflow)
    return convert(source, target, out, progress=progress)
