"""Structured output: what a client may ask for, and its compilation under limits, away from the engine's loop.

Imports nothing heavy.
"""
