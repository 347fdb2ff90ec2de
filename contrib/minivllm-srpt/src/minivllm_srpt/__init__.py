"""Shortest remaining predicted time first.  This module imports nothing, so that reading the spec costs nothing."""
