"""What a run may cost: nodes x hours x a price that the person wrote down, with its date.

The price file is TOML:

    date = 2026-11-01
    currency = "USD"
    [per_node_hour]
    "ml.p5.48xlarge" = 60.0
    default = 3.5
    [device]                        # optional: which device a machine has, as `lt train plan` names them
    "ml.p5.48xlarge" = "h100"

What may be spent at most is the job's time limit; what a job that trains is expected to take is what `lt train plan`
makes of its recipe. Prices are the person's; none comes with lt-launch, and none is looked up.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lt_launch.backend import Finding
from lt_launch.errors import LaunchError
from lt_launch.job import Job, Pipeline
from lt_launch.profile import Profile

__all__ = ["Prices", "estimate", "read_prices"]

OLD_DAYS = 90


@dataclass(frozen=True, kw_only=True)
class Prices:
    """A price file."""

    date: datetime.date
    currency: str
    per_node_hour: Mapping[str, float]
    """By machine type; "default" for all others."""
    device: Mapping[str, str]
    """The device of a machine type."""

    def of(self, machine: str) -> float | None:
        """The price of a node's hour."""
        return self.per_node_hour.get(machine, self.per_node_hour.get("default"))

    def device_of(self, machine: str) -> str:
        """The device of a machine; "" where it is not known."""
        return self.device.get(machine, self.device.get("default", ""))


def read_prices(path: Path) -> Prices:
    """Read a price file.

    Raises:
        LaunchError: it cannot be read, or lacks the date, or a price is no number.
    """
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
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


def estimate(pipeline: Pipeline, profile: Profile, *, today: datetime.date | None = None) -> Iterator[Finding]:
    """What each stage may cost, and the sum; nothing where the profile names no price file."""
    file = profile.table("prices").get("file")
    if file is None:
        return
    prices = read_prices(Path(str(file)).expanduser())
    total, open_ended = 0.0, []
    for stage in pipeline.stages:
        job = stage.job
        price = prices.of(job.resources.instance_type)
        if price is not None and job.trains:
            yield from _planned(job, price, prices)
        if price is None or not job.time_limit_s:
            open_ended.append(stage.name)
            continue
        hours = job.time_limit_s / 3600 * job.nodes * (stage.array or 1)
        total += hours * price
        found = f"{stage.name}: at most {hours:g} node hours x {price:g} = {hours * price:.2f} {prices.currency}"
        yield Finding(level="ok", what="cost", found=found)
    yield _sum(prices, total, open_ended, ((today or datetime.date.today()) - prices.date).days)


def _sum(prices: Prices, total: float, open_ended: list[str], age_days: int) -> Finding:
    text = f"at most {total:.2f} {prices.currency} for one attempt of each stage, at prices of {prices.date}"
    if open_ended:
        remedy = "set time_limit, and a price for their machine type"
        return Finding(level="warning", what="cost", found=f"{text}, without {', '.join(open_ended)}", remedy=remedy)
    if age_days > OLD_DAYS:
        remedy = "look the prices up again"
        return Finding(level="warning", what="cost", found=f"{text}, {age_days} days old", remedy=remedy)
    return Finding(level="ok", what="cost", found=text)


def _planned(job: Job, price: float, prices: Prices) -> Iterator[Finding]:
    """What `lt train plan` expects a job that trains to take."""
    device = prices.device_of(job.resources.instance_type)
    if not device or not job.recipe:
        return
    from lt_trainer.errors import RecipeError
    from lt_trainer.planning.devices import planned_device
    from lt_trainer.planning.plan import make
    from lt_trainer.recipe import Resolved, from_dict

    recipe = from_dict(tomllib.loads(job.recipe), source=f"the recipe of {job.name}")
    try:
        plan = make(
            Resolved(recipe=recipe, origins={}),
            device=planned_device(device),
            devices=job.procs_per_node,
            nodes=job.nodes,
        )
    except RecipeError as exc:
        yield Finding(level="warning", what="plan", found=f"{job.name}: {exc}")
        return
    hours = plan.time.seconds / 3600
    cost = hours * job.nodes * price
    found = (
        f"{job.name}: {hours:.3g} h on {job.nodes} x {job.procs_per_node} {device} as lt train plan sees it "
        f"(MFU {100 * plan.time.mfu:.0f}%, {plan.time.mfu_source}) = {cost:.2f} {prices.currency}"
    )
    if not plan.fits:
        yield Finding(level="wrong", what="plan", found=f"{job.name} does not fit {device}", remedy="lt train plan")
    elif job.time_limit_s and job.time_limit_s < plan.time.seconds:
        remedy = "it will be started again and again; raise time_limit, or mean it so"
        yield Finding(level="warning", what="plan", found=f"{found}, more than its time limit", remedy=remedy)
    else:
        yield Finding(level="ok", what="plan", found=found)
