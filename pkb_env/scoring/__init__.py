"""Stored rollouts under other rewards: nothing is run again."""
