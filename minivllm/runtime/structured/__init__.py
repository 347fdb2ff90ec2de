"""Structured output: the forms that a client may request, and their compilation under limits, outside the engine's
loop.

Imports nothing heavy.
"""
