"""Tests of the built site and of the code on its pages: `make test-docs` runs them, with Sphinx's packages at hand."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sphinx") else ["test_*.py"]
