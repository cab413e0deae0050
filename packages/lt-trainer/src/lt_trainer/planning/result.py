"""Engine-independent result of `lt train plan`: fit, text and JSON values.

Plans of the gpu engine are made here (`plan.py`). Another engine makes its own: its spec has a `plan` function with
the arguments of `plan_recipe`, which returns a `PlanResult`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lt_trainer.config.recipe import ResolvedRecipe
from lt_trainer.engine import World, engine_names, engine_spec
from lt_trainer.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """Finished plan.

    Attributes:
        fits: every device has enough memory.
        to_text: returns the plan as text.
        to_dict: returns the plan as JSON values.
    """

    fits: bool
    to_text: Callable[[], str]
    to_dict: Callable[[], dict[str, Any]]


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
    engine = resolved.recipe.run.engine
    if engine == "gpu":
        from lt_trainer.planning.devices import find_device
        from lt_trainer.planning.plan import make_plan, plan_to_dict
        from lt_trainer.planning.plan_text import format_plan

        planned = find_device(device)
        if engine in engine_names():
            _check_engine(resolved, devices=devices, nodes=nodes)
        plan = make_plan(resolved, device=planned, devices=devices, nodes=nodes, mfu=mfu)
        return PlanResult(fits=plan.fits, to_text=lambda: format_plan(plan), to_dict=lambda: plan_to_dict(plan))
    engine_plan = getattr(engine_spec(engine), "plan", None)
    if engine_plan is None:
        raise RecipeError(
            "this engine has no plans",
            values={"run.engine": engine},
            origins=resolved.origins,
            remedy="plan with --set run.engine=gpu",
        )
    return engine_plan(resolved, device=device, devices=devices, nodes=nodes, mfu=mfu)


def _check_engine(resolved: ResolvedRecipe, *, devices: int, nodes: int | None) -> None:
    """Raise the RecipeError with which the engine would refuse these ranks."""
    nodes = nodes or resolved.recipe.parallel.n_nodes
    recipe = replace(resolved.recipe, parallel=replace(resolved.recipe.parallel, n_nodes=nodes))
    try:
        engine_spec(recipe.run.engine).check(recipe, World(size=devices * nodes, local_size=devices))
    except RecipeError as exc:
        raise exc.with_origins(resolved.origins) from exc
