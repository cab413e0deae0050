"""What `lt train plan` prints of any engine's plan.

Plans of the gpu engine are made here (`plan.py`). Another engine makes its own: its spec has a `plan` function with
the arguments of `plan_recipe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lt_model.devices import DEVICES, DeviceModel
from lt_trainer.config.recipe import ResolvedRecipe
from lt_trainer.config.section import suggest
from lt_trainer.engine import World, engine_names, engine_spec
from lt_trainer.errors import RecipeError
from lt_trainer.planning.plan import make_plan, plan_to_dict
from lt_trainer.planning.plan_text import format_plan


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Finished plan: whether every device has enough memory, and all of it as text and as JSON values."""

    fits: bool
    text: str
    values: dict[str, Any]


def plan_recipe(
    resolved: ResolvedRecipe, *, device: str, devices: int, nodes: int | None, mfu: float | None
) -> PlanResult:
    """Make the plan of a recipe.

    Args:
        resolved: the resolved recipe.
        device: name of the device model.
        devices: devices per node.
        nodes: number of nodes; the recipe's parallel.n_nodes if None.
        mfu: measured MFU, or None to assume one.

    Raises:
        RecipeError: invalid recipe or device, or the engine has no plans.
    """
    recipe = resolved.recipe
    if recipe.run.engine == "gpu":
        model, recipe = find_device(device), recipe.with_nodes(nodes or recipe.parallel.n_nodes)
        if "gpu" in engine_names():
            world = World(size=devices * recipe.parallel.n_nodes, local_size=devices)
            try:
                engine_spec("gpu").check(recipe, world)
            except RecipeError as exc:
                raise exc.with_origins(resolved.origins) from exc
        plan = make_plan(resolved, device=model, devices=devices, nodes=nodes, mfu=mfu)
        return PlanResult(fits=plan.fits, text=format_plan(plan), values=plan_to_dict(plan))
    engine_plan = getattr(engine_spec(recipe.run.engine), "plan", None)
    if engine_plan is None:
        raise RecipeError(
            "this engine has no plans",
            values={"run.engine": recipe.run.engine},
            origins=resolved.origins,
            remedy="plan with --set run.engine=gpu",
        )
    return engine_plan(resolved, device=device, devices=devices, nodes=nodes, mfu=mfu)


def find_device(name: str) -> DeviceModel:
    """Return the device called `name` (case-insensitive).

    Raises:
        RecipeError: unknown device.
    """
    if name.lower() in DEVICES:
        return DEVICES[name.lower()]
    suggestion = suggest(name, DEVICES)
    hint = f"did you mean {suggestion}? " if suggestion else ""
    raise RecipeError("unknown device", values={"--device": name}, remedy=f"{hint}choose one of {', '.join(DEVICES)}")
