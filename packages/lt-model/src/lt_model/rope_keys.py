"""Rotary settings of a config.json, in the old spelling of `transformers` and the new one; see `hf.py`.

The old one (to 4.x) has `rope_theta` and the table `rope_scaling`, the new one `rope_parameters`, which in families
with two ropes has a table for each kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lt_model.config import SCALING_FIELDS, ModelConfig, RopeScaling
from lt_model.errors import ModelError
from lt_model.families import COMMON_DEFAULTS, Family

SCALING_KEYS: Mapping[str, str] = {"magnitude": "attention_factor", "score_magnitude": "mscale_all_dim"}
"""Field of `RopeScaling` to key, where they differ."""
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"


def read_rope(values: Mapping[str, Any], row: Family, family: str, max_positions: object) -> dict[str, Any]:
    """Return the rotary fields of `ModelConfig` from the keys of a file that its family reads.

    Raises:
        ModelError: a setting that is not supported, or two spellings that disagree.
    """
    file = _RopeFile(values=values, row=row, family=family, max_positions=max_positions)
    old = file.read_old()
    new = file.read_new()
    if new is None:
        return old
    for name, key in file.old_keys().items():
        if old[name] != new[name]:
            raise ModelError(f"{key} ({old[name]}) and rope_parameters ({new[name]}) disagree; delete one")
    return new


def write_rope(config: ModelConfig, row: Family) -> dict[str, Any]:
    """Return the keys of both spellings."""
    scaling = None
    if config.rope_scaling is not None:
        names = ("factor", *SCALING_FIELDS[config.rope_scaling.kind])
        fields = {SCALING_KEYS.get(name, name): getattr(config.rope_scaling, name) for name in names}
        written = {key: value for key, value in fields.items() if value or key == "truncate"}
        scaling = {"rope_type": config.rope_scaling.kind, **written}
    new = {**(scaling or {"rope_type": "default"}), "rope_theta": config.rope_theta}
    old = {row.theta_key: config.rope_theta, "rope_scaling": scaling}
    if row.partial_key:
        new["partial_rotary_factor"] = config.rotary_fraction
        old[row.partial_key] = config.rotary_fraction
    if not row.has_two_ropes:
        return {**old, "rope_parameters": new}
    local = config.sliding_rope_theta or config.rope_theta
    if row.local_theta_key:
        old[row.local_theta_key] = local
    return {**old, "rope_parameters": {FULL: new, SLIDING: {"rope_type": "default", "rope_theta": local}}}


@dataclass(frozen=True, kw_only=True)
class _RopeFile:
    values: Mapping[str, Any]
    row: Family
    family: str
    max_positions: object

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {**COMMON_DEFAULTS, **self.row.defaults}

    @property
    def fraction_key(self) -> str:
        return self.row.partial_key or "partial_rotary_factor"

    @property
    def outer(self) -> dict[str, Any]:
        """Settings at the top level, by their names within a table."""
        names = {self.row.theta_key: "rope_theta", self.fraction_key: "partial_rotary_factor"}
        return {name: self.values[key] for key, name in names.items() if self.values.get(key) is not None}

    @property
    def outer_local(self) -> dict[str, Any]:
        """The same for sliding layers."""
        theta = self.values.get(self.row.local_theta_key)
        return {} if theta is None else {"rope_theta": theta}

    def old_keys(self) -> dict[str, str]:
        """Return field to key of the old spelling, for the keys that the file has."""
        keys = {"rope_theta": self.row.theta_key, "rotary_fraction": self.fraction_key}
        keys["sliding_rope_theta"] = self.row.local_theta_key
        found = {name: key for name, key in keys.items() if self.values.get(key) is not None}
        says_unscaled = "rope_scaling" in self.values and "rope_theta" in found
        if self.values.get("rope_scaling") is not None or says_unscaled:
            found["rope_scaling"] = "rope_scaling"
        return found

    def read_old(self) -> dict[str, Any]:
        scaling = _read_table(self.values, "rope_scaling")
        if not scaling and self.values.get("rope_parameters") is None:
            scaling = self.defaults.get("rope_scaling", {})
        return self._read("rope_scaling", {**self.outer, **scaling}, self.outer_local)

    def read_new(self) -> dict[str, Any] | None:
        """Return the fields of `rope_parameters`; None where the file has none."""
        table = _read_table(self.values, "rope_parameters")
        full, local = table, {}
        if self.row.has_two_ropes:
            if foreign := sorted(table.keys() - {FULL, SLIDING}):
                raise ModelError(f"rope_parameters of {self.family}: {foreign[0]} must stand in {FULL} or {SLIDING}")
            full = _read_table(table, FULL, "rope_parameters: ")
            local = _read_table(table, SLIDING, "rope_parameters: ")
            self._check_local_theta(local)
        elif not table.keys().isdisjoint({FULL, SLIDING}):
            raise ModelError("rope_parameters differ between layers, which this family has not")
        if not table:
            return None
        return self._read("rope_parameters", {**self.outer, **full}, {**self.outer_local, **local})

    def _check_local_theta(self, local: Mapping[str, Any]) -> None:
        default = self.defaults["rope_theta"]
        theta = self.outer.get("rope_theta", default)
        if not self.row.local_theta_key and "rope_theta" not in local and theta != default:
            raise ModelError(
                f"rope_theta = {theta} of {self.family}: versions of transformers differ in whether sliding layers "
                f"have it; write rope_parameters with a rope_theta in {SLIDING}"
            )

    def _read(self, key: str, full: Mapping[str, Any], local: Mapping[str, Any]) -> dict[str, Any]:
        place = f"{key} of {self.family}"
        theta, fraction = self.defaults["rope_theta"], self.defaults.get(self.fraction_key, 1.0)
        found = {
            "rope_theta": full.get("rope_theta", theta),
            "rope_scaling": self._read_scaling(full, place),
            "rotary_fraction": full.get("partial_rotary_factor", fraction),
        }
        if not self.row.partial_key and found["rotary_fraction"] != 1:
            share = found["rotary_fraction"]
            raise ModelError(f"{place}: partial_rotary_factor = {share!r} is not supported (only 1)")
        if self.row.has_two_ropes:
            found["sliding_rope_theta"] = local.get("rope_theta", self.defaults.get(self.row.local_theta_key, theta))
            if self._read_scaling(local, f"{place}: {SLIDING}"):
                raise ModelError(f"{place}: {SLIDING} is scaled, which is not supported")
        return found

    def _read_scaling(self, rope: Mapping[str, Any], place: str) -> RopeScaling | None:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return None
        if kind not in SCALING_FIELDS:
            known = ", ".join(SCALING_FIELDS)
            raise ModelError(f"{place}: rope_type = {kind!r} is not supported (only default, {known})")
        names = ("factor", *SCALING_FIELDS[kind])
        required = ("factor", "low_freq_factor", "high_freq_factor")
        for name in required if kind == "llama3" else ("factor",):
            if rope.get(name) is None:
                raise ModelError(f"{place}: {name} is missing")
        if "truncate" in names and rope.get("truncate", True) is None:
            _refuse(place, "truncate = null", "transformers takes that for false; write true or false")
        if "magnitude" in names and rope.get("attention_factor") == 0:
            _refuse(place, "attention_factor = 0", "positions would have no effect; delete it")
        fields: dict[str, Any] = {}
        if ORIGINAL in names:
            fields[ORIGINAL] = self._read_original(rope, place)
        for name in names:
            value = rope.get(SCALING_KEYS.get(name, name))
            if value is not None:
                fields[name] = value
        if kind == "yarn" and "magnitude" not in fields and rope.get("mscale") and rope.get("mscale_all_dim"):
            fields["magnitude"] = _divide_magnitudes(rope)
        return RopeScaling(kind=kind, **fields)

    def _read_original(self, rope: Mapping[str, Any], place: str) -> object:
        """Return the length before scaling where the table has none: that at the top level, or the model's."""
        beside = None if self.row.has_two_ropes else self.values.get(ORIGINAL)
        if beside is None:
            return self.max_positions
        own = rope.get(ORIGINAL, beside)
        if own != beside:
            _refuse(place, f"{ORIGINAL} = {own}", f"at the top level it is {beside}; delete one of them")
        return beside


def _divide_magnitudes(rope: Mapping[str, Any]) -> float:
    if rope["factor"] <= 1:
        return 1.0
    one, other = (1.0 + 0.1 * rope[key] * math.log(rope["factor"]) for key in ("mscale", "mscale_all_dim"))
    return one / other


def _refuse(place: str, what: str, problem: str) -> NoReturn:
    raise ModelError(f"{place}: {what}: {problem}")


def _read_table(values: Mapping[str, Any], key: str, place: str = "") -> Mapping[str, Any]:
    table = values.get(key) or {}
    if not isinstance(table, Mapping):
        raise ModelError(f"{place}{key} = {table!r}: must be a table")
    return table
