"""The site's Markdown, written from the registry, docstrings, results/ and docs/; Sphinx makes it a site."""
