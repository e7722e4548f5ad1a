"""`python -m everystop` is the `everystop` command."""

from everystop.cli import main

main()
