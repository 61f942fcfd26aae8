"""The Markdown of the site, written from the registry, docstrings, results and hand-written pages."""
