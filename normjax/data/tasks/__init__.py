"""Synthetic sources of tokens whose least possible loss is known exactly."""
