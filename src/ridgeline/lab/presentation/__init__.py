"""Writes the figures for readers: the report, the README, the generated pages and the type stub."""
