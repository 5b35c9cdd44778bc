"""Runs of `vestige train`: configuration, data, models, the loop, the run folder."""
