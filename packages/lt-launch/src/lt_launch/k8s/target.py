"""The target `k8s`: render only. What is rendered goes to the cluster with kubectl."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

from lt_launch.backend import Finding, Launch, Node, Rendered, StageStatus
from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline, for_containers
from lt_launch.k8s.manifest import manifests
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.profile import Profile

__all__ = ["KubernetesBackend"]


class KubernetesBackend:
    """Manifests."""

    name = "k8s"

    def render(self, pipeline: Pipeline, profile: Profile) -> Rendered:
        """One file of YAML, and the kubectl command that sends it.

        Raises:
            LaunchError: PyYAML is missing; RecipeError: the job lacks something.
        """
        try:
            import yaml
        except ModuleNotFoundError as exc:
            raise LaunchError("--on k8s needs PyYAML: pip install 'lt-launch[k8s]'") from exc

        class Plain(yaml.SafeDumper):
            """Text of several lines as a block; no anchors."""

            def ignore_aliases(self, data: object) -> bool:
                return True

        def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
            style = "|" if "\n" in value else None
            return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

        Plain.add_representer(str, text)
        job = for_containers(pipeline.only, target="Kubernetes", env=profile.env)
        made = manifests(job, profile.options("k8s", KubernetesOptions), profile.python)
        document = yaml.dump_all(made, Dumper=Plain, sort_keys=False, width=1000)
        file = f"{job.name}.yaml"
        commands = (("kubectl", "apply", "-f", file),)
        return Rendered(files={file: document}, commands=commands, notes=profile.left_out_of_containers)

    def submit(self, launch: Launch, rendered: Rendered, *, detach: bool) -> tuple[Mapping[str, str], int]:
        """Nothing is sent."""
        _render_only("kubectl apply -f FILE")

    def status(self, launch: Launch) -> tuple[StageStatus, ...]:
        """Nothing is asked."""
        _render_only("kubectl get trainjob NAME, or hyperpodpytorchjob NAME")

    def logs(self, launch: Launch, *, stage: str, rank: int, follow: bool) -> Iterator[str]:
        """Nothing is asked."""
        _render_only("kubectl logs -f POD")

    def cancel(self, launch: Launch) -> Iterable[str]:
        """Nothing is asked."""
        _render_only("kubectl delete -f FILE")

    def list(self, profile: Profile) -> Iterable[StageStatus]:
        """Nothing is asked."""
        _render_only("kubectl get trainjobs,hyperpodpytorchjobs")

    def nodes(self, profile: Profile) -> Iterable[Node]:
        """Nothing is asked."""
        _render_only("kubectl get nodes")

    def doctor(self, profile: Profile, pipeline: Pipeline | None) -> Iterator[Finding]:
        """Whether it can be rendered."""
        if pipeline is not None:
            self.render(pipeline, profile)
        yield Finding(level="ok", what="manifest", found="nothing more is looked at: the cluster is not asked")


def _render_only(instead: str) -> NoReturn:
    raise LaunchError(f"lt launch only renders for Kubernetes (lt launch render --on k8s); use {instead}")
