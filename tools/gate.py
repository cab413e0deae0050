"""The one job that branch protection asks for: whether everything that CI had to run did run and passed.

    NEEDS='${{ toJSON(needs) }}' python tools/gate.py

A job that was skipped passes only where the plan left nothing for it to do; GitHub itself takes a skipped job for a
passed one, also where it was skipped because the one before it failed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["verdict"]

PLANNED = {"package": "packages", "workspace": "workspace"}
"""Jobs that the plan may leave out, and the output of it that says so."""


def verdict(needs: Mapping[str, Any]) -> list[str]:
    """One sentence for each job that did not do what it had to."""
    outputs = needs.get("plan", {}).get("outputs", {})
    wrong: list[str] = []
    for job in ("plan", *PLANNED):
        if job not in needs:
            wrong.append(f"{job} is not among the jobs that the gate needs")
    for job, state in needs.items():
        planned = json.loads(outputs.get(PLANNED[job], "true")) if job in PLANNED else True
        allowed = "success" if planned else "skipped"
        if state["result"] != allowed:
            wrong.append(f"{job}: {state['result']}, where it should be {allowed}")
    return wrong


if __name__ == "__main__":
    found = verdict(json.loads(os.environ["NEEDS"]))
    print("\n".join(found) or "everything that had to run has passed")
    sys.exit(bool(found))
