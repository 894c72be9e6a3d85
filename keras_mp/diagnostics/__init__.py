"""Seeing what precision does to a training: plots.

Nothing is imported here: `plots` needs matplotlib, which is an extra.
"""
