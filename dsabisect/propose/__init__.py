"""Revert, hunk and gate proposals."""
