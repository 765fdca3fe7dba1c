"""Measurements over several runs: whether they repeat, and how far seeds spread."""
