"""Cost estimate of a run: nodes x hours x a price from the user's dated price file.

The price file is TOML:

    date = 2026-11-01
    currency = "USD"
    [per_node_hour]
    "ml.p5.48xlarge" = 60.0
    default = 3.5
    [device]                        # optional: device of a machine, named as in `lt train plan`
    "ml.p5.48xlarge" = "h100"

The upper bound follows from the job's time limit, the expected cost of a training job from the `lt train plan` of its
recipe. lt-launch ships no prices and fetches none.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline
from lt_launch.profile import Profile
from lt_launch.target import Finding
from lt_trainer.files import parse_toml, read_text

__all__ = ["Prices", "estimate_costs", "read_prices"]

MAX_PRICE_AGE_DAYS = 90


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices and devices by machine type, from a price file."""

    date: datetime.date
    currency: str
    per_node_hour: Mapping[str, float]
    """By machine type; "default" for all others."""
    device: Mapping[str, str]
    """The device of a machine type."""

    def price_of(self, machine: str) -> float | None:
        """Return the price of one node-hour; None if the file has none."""
        return self.per_node_hour.get(machine, self.per_node_hour.get("default"))

    def device_of(self, machine: str) -> str:
        """Return the device of a machine type, or "" if unknown."""
        return self.device.get(machine, self.device.get("default", ""))


def read_prices(path: Path) -> Prices:
    """Read a price file.

    Raises:
        LaunchError: it cannot be read, has no date, or a price is not a number.
    """
    try:
        table: dict[str, Any] = parse_toml(read_text(path))
    except (OSError, ValueError) as exc:
        raise LaunchError(f"prices.file = {str(path)!r}: cannot be read ({exc}); give a TOML file") from exc
    date, prices, devices = table.get("date"), table.get("per_node_hour"), table.get("device", {})
    if not isinstance(date, datetime.date) or not isinstance(prices, dict) or not isinstance(devices, dict):
        raise LaunchError(f"prices.file = {str(path)!r}: it needs date = 2026-11-01 and a table [per_node_hour]")
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < float("inf"):
            raise LaunchError(f"prices.file = {str(path)!r}: per_node_hour.{name} = {price!r} is not a price")
    return Prices(
        date=date,
        currency=str(table.get("currency", "")),
        per_node_hour={name: float(price) for name, price in prices.items()},
        device={name: str(device) for name, device in devices.items()},
    )


def estimate_costs(pipeline: Pipeline, profile: Profile, *, today: datetime.date | None = None) -> Iterator[Finding]:
    """Yield the cost of each stage and the total; nothing if the profile names no price file."""
    file = profile.table("prices").get("file")
    if file is None:
        return
    prices = read_prices(Path(str(file)).expanduser())
    total, open_ended = 0.0, []
    for stage in pipeline.stages:
        job = stage.job
        price = prices.price_of(job.resources.instance_type)
        if price is not None and job.is_training:
            yield from _plan_findings(job, price, prices)
        if price is None or not job.time_limit_s:
            open_ended.append(stage.name)
            continue
        hours = job.time_limit_s / 3600 * job.nodes * (stage.array or 1)
        total += hours * price
        text = f"{stage.name}: at most {hours:g} node hours x {price:g} = {hours * price:.2f} {prices.currency}"
        yield Finding(level="ok", check="cost", detail=text)
    yield _total_finding(prices, total, open_ended, ((today or datetime.date.today()) - prices.date).days)


def _total_finding(prices: Prices, total: float, open_ended: list[str], age_days: int) -> Finding:
    text = f"at most {total:.2f} {prices.currency} for one attempt of each stage, at prices of {prices.date}"
    if open_ended:
        remedy = "set time_limit, and a price for their machine type"
        return Finding(level="warning", check="cost", detail=f"{text}, without {', '.join(open_ended)}", remedy=remedy)
    if age_days > MAX_PRICE_AGE_DAYS:
        remedy = "look the prices up again"
        return Finding(level="warning", check="cost", detail=f"{text}, {age_days} days old", remedy=remedy)
    return Finding(level="ok", check="cost", detail=text)


def _plan_findings(job: Job, price: float, prices: Prices) -> Iterator[Finding]:
    """Yield the duration and cost that `lt train plan` predicts for a training job."""
    device = prices.device_of(job.resources.instance_type)
    if not device or not job.recipe:
        return
    from lt_trainer.config.recipe import ResolvedRecipe, from_dict
    from lt_trainer.errors import RecipeError
    from lt_trainer.planning.plan import make_plan
    from lt_trainer.planning.result import find_device

    recipe = from_dict(tomllib.loads(job.recipe), source=f"the recipe of {job.name}")
    try:
        plan = make_plan(
            ResolvedRecipe(recipe=recipe, origins={}),
            device=find_device(device),
            devices=job.procs_per_node,
            nodes=job.nodes,
        )
    except RecipeError as exc:
        yield Finding(level="warning", check="plan", detail=f"{job.name}: {exc}")
        return
    hours = plan.time.seconds / 3600
    cost = hours * job.nodes * price
    text = (
        f"{job.name}: {hours:.3g} h on {job.nodes} x {job.procs_per_node} {device} estimated by lt train plan "
        f"(MFU {100 * plan.time.mfu:.0f}%, {plan.time.mfu_source}) = {cost:.2f} {prices.currency}"
    )
    if not plan.fits:
        yield Finding(level="error", check="plan", detail=f"{job.name} does not fit {device}", remedy="lt train plan")
    elif job.time_limit_s and job.time_limit_s < plan.time.seconds:
        remedy = "it will be restarted repeatedly; raise time_limit unless this is intended"
        yield Finding(level="warning", check="plan", detail=f"{text}, more than its time limit", remedy=remedy)
    else:
        yield Finding(level="ok", check="plan", detail=text)
