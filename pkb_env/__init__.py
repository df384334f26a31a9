"""pkb-env."""
