"""`python -m vestige` is the same program as `vestige`."""

from vestige.cli import main

main()
