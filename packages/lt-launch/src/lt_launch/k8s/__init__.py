"""Kubernetes target: YAML of a training job of Kubeflow, JobSet or HyperPod; kubectl submits it."""
