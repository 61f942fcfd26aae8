"""Whole training steps of Hugging Face models: sizes, processes that take turns, rows and tables."""
