"""Checks, times and records implementations on this machine."""
