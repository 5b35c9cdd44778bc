"""The door: where a clipped sum becomes a noisy release, and nowhere else."""
