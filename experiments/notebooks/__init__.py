"""Notebooks of the studies, each paired with a script of the same name by jupytext."""
