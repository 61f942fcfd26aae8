"""Ridgeline's ops in models of Hugging Face's transformers: `patch(model)`, `unpatch(model)`, `explain(model)`,
`load_quantized(folder)`.

transformers is imported when one of them is called; `pip install ridgeline[hf]` installs it.
"""

from ridgeline.hf.checkpoints import load_quantized
from ridgeline.hf.patching import explain, on_meta, patch, unpatch
from ridgeline.hf.report import Report, Row

__all__ = ["Report", "Row", "explain", "load_quantized", "on_meta", "patch", "unpatch"]
