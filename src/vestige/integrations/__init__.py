"""Trainers of other libraries with Vestige inside: one module for each, imported on its own.

`vestige.integrations.transformers` needs the extra `hf`, `vestige.integrations.lightning` the extra
`lightning`. docs/trainers.md shows how each is used, and what it logs.
"""
