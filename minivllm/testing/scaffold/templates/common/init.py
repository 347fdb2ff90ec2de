"""SUMMARY.

This module imports nothing, because the engine imports it to read the spec of each plug-in.
"""
