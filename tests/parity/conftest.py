"""Beside the test modules nothing here has doctests, and most of it needs torch to be imported."""

collect_ignore = ["tiny_models.py", "maps.py", "replay.py", "comparisons.py", "__main__.py"]
