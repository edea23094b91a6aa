"""Checkpoints of distributed training as plain Zarr v3: saved in parallel, loaded into any layout, sliced, mounted."""
