"""The papers' figures as comparisons: one module per system, each a declarative list. `reproduce.py` runs them.

To add one: a module beside this one with `FIGURES`, and its name in `reproduce.MODULES`.
"""
