"""What looks inside of a graph from outside of the engine: observers at work in a ``with`` block.

``minigrad/__init__.py`` exports them; nothing is exported here.
"""
