"""The bundled history: a small real indexer and the sixty commits of its life. Pure: texts in, bytes out.

``history.py`` puts the commits in order, ``native.py`` and ``fused.py`` hold one story each, ``files/`` the longer
sources, ``edits.py`` what a commit may do to a tree, ``stream.py`` the form that ``git fast-import`` reads.
"""
