"""Writes the kernels: one list (families x types, filtered by what is legal) becomes sources, registry and manifest.

Needs neither torch, numpy nor a compiler. ``python -m generator --help`` says how to run it.
"""
