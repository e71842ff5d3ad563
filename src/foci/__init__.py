"""The names a user meets, nothing else."""
