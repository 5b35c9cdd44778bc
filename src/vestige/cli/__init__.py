"""The command line, one small file per command. It parses, calls and prints."""

from vestige.cli.app import app, main

__all__ = ["app", "main"]
