"""Toys: one file for each extension point, written from CONTRIBUTING.md alone.

Each has a ``CONTRACT``: the kind of thing it is, and a function that makes one. The tests of the
contract find it by that; nothing else knows of it.
"""
