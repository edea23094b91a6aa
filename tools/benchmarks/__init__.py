"""Measurements of ckptfs beside its peers: one harness, one schema of results, one report."""
