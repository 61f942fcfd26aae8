"""Variants of the kernels on trial, chosen by name in a script; empty for users."""

ON: set[str] = set()
