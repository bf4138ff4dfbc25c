"""Differential testing and bisection for the DeepSeek-sparse-attention indexer."""

__version__ = "0.1.0"
