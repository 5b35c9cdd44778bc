"""Memory rules: how much of each earlier release the next query recalls. One rule per file."""
