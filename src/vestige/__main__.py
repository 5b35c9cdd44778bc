"""`python -m vestige` is the same program as `vestige`."""

from vestige.cli.app import main

main()
