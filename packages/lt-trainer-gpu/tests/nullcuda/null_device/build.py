"""Builds the null device: `c/*.c` and a stub for every other CUDA function that torch or Triton need.

The one library takes the place of libcudart, libcublas, libcublasLt, libnccl and libcuda: it is preloaded, so its
symbols come first, and its soname is libcuda.so.1, so a later dlopen of the driver finds it. The stubs are generated
from the symbols that torch's libraries leave undefined. Those in `c/harmless.txt` do nothing, since nothing has to be
done; any other logs "unknown NAME", and a test that sees one in a step fails.

Cost: two seconds.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "c"
NEEDED = re.compile(r"(?:cuda|cublas|nccl)[A-Z]\w*|cu(?!pti|File|[a-z])[A-Z]\w*")

TRIED_WITH = ("2.15.",)
"""Starts of the versions of torch whose needs the stubs are known to meet."""


def _names(file: str) -> list[str]:
    lines = (SOURCES / file).read_text().splitlines()
    return [name for line in lines if not line.startswith("#") for name in line.split()]


def missing() -> str | None:
    """Return the reason why the null device cannot be built here, or None."""
    import torch

    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the null CUDA device is for Linux on x86-64, not {sys.platform} on {platform.machine()}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.__version__.startswith(TRIED_WITH):
        return f"the null CUDA device was tried with torch {', '.join(TRIED_WITH)} only, not {torch.__version__}"
    if absent := [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]:
        return f"no {' and no '.join(absent)} to build the null CUDA device with"
    if not _include_folders():
        return "no CUDA headers among the packages that torch needs"
    return None


def build(folder: Path) -> dict[str, str]:
    """Compile the library into `folder` and return the environment under which processes use it."""
    torch, harmless = _package("torch"), _names("harmless.txt")
    assert torch is not None
    wanted = {name for path in sorted((torch / "lib").glob("*.so")) for name in _symbols(path, "--undefined-only")}
    wanted |= {name for name in harmless if re.match("cu[A-Z]", name)}  # looked up by name
    if (triton := _package("triton")) is not None:
        text = (triton / "backends/nvidia/driver.c").read_text()
        wanted |= set(re.findall(r"\b(cu[A-Z]\w*)\s*\(", text))
    objects = []
    for source in sorted(SOURCES.glob("*.c")):
        objects.append(folder / f"{source.stem}.o")
        _gcc("-c", *(f"-I{path}" for path in _include_folders()), str(source), "-o", str(objects[-1]))
    made = {name for path in objects for name in _symbols(path, "--defined-only")}
    stubs = folder / "stubs.c"
    lines = ['#include "record.h"']
    for name in sorted(wanted - made):
        body = "" if name in harmless else f'record("unknown", "{name}"); '
        lines.append(f"int {name}(void) {{ {body}return 0; }}")
    stubs.write_text("\n".join(lines) + "\n")
    library = folder / "libcuda.so.1"
    _gcc(
        *("-shared", "-Wl,-soname,libcuda.so.1", f"-I{SOURCES}", str(stubs), *map(str, objects)),
        *("-o", str(library), "-ldl", "-lpthread"),
    )
    (folder / "libcuda.so").symlink_to(library)
    nvml, nvml_source = folder / "libnvidia-ml.so.1", folder / "nvml.c"
    nvml_source.write_text("\n".join(f"int {name}(void) {{ return 0; }}" for name in _names("nvml.txt")) + "\n")
    _gcc("-shared", "-Wl,-soname,libnvidia-ml.so.1", str(nvml_source), "-o", str(nvml))
    return {"LD_PRELOAD": f"{library}:{nvml}", "TRITON_LIBCUDA_PATH": str(folder)}


def _gcc(*arguments: str) -> None:
    # -w: parameters that do nothing are the point here.
    command = ["gcc", "-std=gnu2x", "-w", "-fPIC", "-O1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _symbols(path: Path, kind: str) -> set[str]:
    """Return the CUDA names that a library needs or an object defines."""
    dynamic = ["-D"] if path.suffix != ".o" else []
    text = subprocess.run(["nm", *dynamic, kind, str(path)], capture_output=True, text=True, check=True).stdout
    names = (line.split()[-1].split("@")[0] for line in text.splitlines())
    return {name for name in names if NEEDED.fullmatch(name)}


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _include_folders() -> list[Path]:
    """Return the folders of the CUDA, cuBLAS and NCCL headers, from torch's requirements and from Triton."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(path) for path in (spec.submodule_search_locations or [])] if spec is not None else []
    folders = [path for root in roots for path in sorted(root.glob("*/include"))]
    if (triton := _package("triton")) is not None:
        folders.append(triton / "backends/nvidia/include")  # crt/, which CUDA 13's packages lack
    heads = ("cuda_runtime_api.h", "cublas_api.h", "nccl.h", "crt/host_defines.h")
    return folders if all(any((path / head).exists() for path in folders) for head in heads) else []
