"""Lessons, and the check of a learner's own kernel against an op's oracle and rungs."""
