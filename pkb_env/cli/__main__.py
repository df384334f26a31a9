"""`python -m pkb_env.cli`: the command `pkb` without an installed script."""

from pkb_env.cli import main

main()
