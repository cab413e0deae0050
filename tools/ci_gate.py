"""The single job that branch protection requires: every planned CI job ran and passed.

    NEEDS='${{ toJSON(needs) }}' python tools/ci_gate.py

A skipped job passes only if the plan left nothing for it to do; GitHub itself counts every skipped job as passed, also
one that was skipped because the job before it failed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

PLANNED_JOBS = {"package": "packages", "workspace": "workspace"}
"""Jobs that the plan may leave out, and the plan output that decides it."""


def find_failed_jobs(needs: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each job that did not run and pass as planned."""
    outputs = needs.get("plan", {}).get("outputs", {})
    problems: list[str] = []
    for job in ("plan", *PLANNED_JOBS):
        if job not in needs:
            problems.append(f"{job} is not in the needs of the gate job")
    for job, state in needs.items():
        planned = json.loads(outputs.get(PLANNED_JOBS[job], "true")) if job in PLANNED_JOBS else True
        allowed = "success" if planned else "skipped"
        if state["result"] != allowed:
            problems.append(f"{job}: {state['result']}; expected {allowed}")
    return problems


if __name__ == "__main__":
    found = find_failed_jobs(json.loads(os.environ["NEEDS"]))
    print("\n".join(found) or "all planned jobs passed")
    sys.exit(bool(found))
