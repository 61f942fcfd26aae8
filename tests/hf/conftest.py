"""Tests of `ridgeline.hf`, which need transformers: `make test-hf` runs them with its two newest minor versions."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]
