"""Any model, any two formats, any cut: there and back is the same bits, and nothing but the format differs."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nxd_cuts import cuts
from nxd_cuts import models as configs

from lt_ckpt.comparison import compare, find_replica_mismatches
from lt_ckpt.formats import FORMATS, ConvertOptions, convert_checkpoint, open_source
from lt_ckpt.nxd.options import NxdOptions

HEAD = "lm_head.weight"


def made(source: Path, out: Path, kind: str, config: Path, cut: NxdOptions) -> Path:
    opened = open_source(source, config=config if needs_config(source) else None)
    convert_checkpoint(opened, out, ConvertOptions(format=kind, nxd=cut, max_shard_bytes=700))
    return out


def needs_config(path: Path) -> bool:
    return path.is_file() or not ((path / "config.json").is_file() or list(path.glob("step-*/COMMIT")))


def assert_equal(a: Path, b: Path, config: Path) -> None:
    left, right = (open_source(path, config=config if needs_config(path) else None) for path in (a, b))
    found = list(compare(left, right))
    assert [c.name for c in found if not c.is_equal] == []
    assert len({c.name for c in found} - {HEAD}) >= len(left.weights.specs) - 1
    assert [c.dtypes for c in found if c.dtypes[0] != c.dtypes[1]] == []
    assert list(find_replica_mismatches(right)) == []


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(FORMATS, 2)))
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_there_and_back_is_the_same_bits(models: Any, first: str, second: str, data: st.DataObject) -> None:
    config, dtype = data.draw(configs()), data.draw(st.sampled_from(["BF16", "F32", "F16", "F64"]))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        start = models.make(root / "hf", dtype=dtype, **config.to_dict())
        a = made(start, root / ("a.pt" if first == "pt" else "a"), first, start, data.draw(cuts(config)))
        b = made(a, root / ("b.pt" if second == "pt" else "b"), second, start, data.draw(cuts(config)))
        back = made(b, root / ("c.pt" if first == "pt" else "c"), first, start, data.draw(cuts(config)))
        for path in (a, b, back):
            assert_equal(start, path, start)
