"""The search for a better document: sources of candidates, the race between them, and the choice of
a source.
"""
