"""Slurm target: sbatch scripts that need no lt-launch on the nodes, and status without accounting."""
