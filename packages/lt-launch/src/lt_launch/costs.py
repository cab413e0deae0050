"""What a run may cost: nodes x hours x a price that the person wrote down, with its date.

The price file is TOML:

    date = 2026-11-01
    currency = "USD"
    [per_node_hour]
    "ml.p5.48xlarge" = 60.0
    default = 3.5

Hours are the job's time limit: that is what may be spent at most by one attempt. Prices are the person's; none comes
with lt-launch, and none is looked up.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lt_launch.backend import Finding
from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline
from lt_launch.profile import Profile

__all__ = ["estimate", "read_prices"]

OLD_DAYS = 90


def read_prices(path: Path) -> tuple[datetime.date, str, dict[str, float]]:
    """Date, currency, and prices of a node's hour by machine type.

    Raises:
        LaunchError: it cannot be read, or lacks the date, or a price is no number.
    """
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise LaunchError(f"prices.file = {str(path)!r}: cannot be read ({exc}); give a TOML file") from exc
    date, prices = table.get("date"), table.get("per_node_hour")
    if not isinstance(date, datetime.date) or not isinstance(prices, dict):
        raise LaunchError(f"prices.file = {str(path)!r}: it needs date = 2026-11-01 and a table [per_node_hour]")
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < float("inf"):
            raise LaunchError(f"prices.file = {str(path)!r}: per_node_hour.{name} = {price!r} is not a price")
    return date, str(table.get("currency", "")), {name: float(price) for name, price in prices.items()}


def estimate(pipeline: Pipeline, profile: Profile, *, today: datetime.date | None = None) -> Iterator[Finding]:
    """The most that each stage may cost, and the sum; nothing where the profile names no price file."""
    file = profile.table("prices").get("file")
    if file is None:
        return
    date, currency, prices = read_prices(Path(str(file)).expanduser())
    age = ((today or datetime.date.today()) - date).days
    total, open_ended = 0.0, []
    for stage in pipeline.stages:
        job = stage.job
        price = prices.get(job.resources.instance_type, prices.get("default"))
        if price is None or not job.time_limit_s:
            open_ended.append(stage.name)
            continue
        hours = job.time_limit_s / 3600 * job.nodes * (stage.array or 1)
        total += hours * price
        found = f"{stage.name}: {hours:g} node hours x {price:g} {currency} = {hours * price:.2f} {currency}"
        yield Finding(level="ok", what="cost", found=found)
    text = f"at most {total:.2f} {currency} for one attempt of each stage, at prices of {date}"
    if open_ended:
        remedy = "set time_limit, and a price for their machine type"
        yield Finding(level="warning", what="cost", found=f"{text}, without {', '.join(open_ended)}", remedy=remedy)
    elif age > OLD_DAYS:
        yield Finding(level="warning", what="cost", found=f"{text}, {age} days old", remedy="look the prices up again")
    else:
        yield Finding(level="ok", what="cost", found=text)
