"""Render-only target `k8s`; manifests are submitted with kubectl."""

from __future__ import annotations

from lt_launch.errors import LaunchError
from lt_launch.job import Pipeline, with_container_env
from lt_launch.k8s.manifest import manifests
from lt_launch.k8s.options import KubernetesOptions
from lt_launch.profile import Profile
from lt_launch.target import LaunchTarget, RenderedLaunch


class KubernetesTarget(LaunchTarget):
    """Launch target that renders Kubernetes manifests."""

    name = "k8s"

    def render(self, pipeline: Pipeline, profile: Profile) -> RenderedLaunch:
        """Render one YAML file and the kubectl command that submits it.

        Raises:
            LaunchError: PyYAML is missing; RecipeError: the job is incomplete.
        """
        try:
            import yaml
        except ModuleNotFoundError as exc:
            raise LaunchError("--on k8s needs PyYAML: pip install 'lt-launch[k8s]'") from exc

        class Plain(yaml.SafeDumper):
            """YAML dumper with multi-line text as blocks and without anchors."""

            def ignore_aliases(self, data: object) -> bool:
                return True

        def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
            style = "|" if "\n" in value else None
            return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

        Plain.add_representer(str, text)
        job = with_container_env(pipeline.single_job, target="Kubernetes", env=profile.env)
        options = profile.options("k8s", KubernetesOptions)
        documents = manifests(job, options, profile.python)
        document = yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=1000)
        file = f"{job.name}.yaml"
        commands = (("kubectl", "apply", "-f", file),)
        return RenderedLaunch(files={file: document}, commands=commands, notes=profile.container_notes)
