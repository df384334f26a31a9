"""Processes and their walls: zygote, group supervisor, Landlock, seccomp, limits, hang reports.  Knows no kernels."""
