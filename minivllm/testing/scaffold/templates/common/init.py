"""SUMMARY.

Nothing is imported here: to ask for the spec must cost nothing.
"""
