"""Positions and verdicts only: judge, search, timeline, advice."""
