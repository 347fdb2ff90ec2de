"""Shortest remaining predicted time first.  Nothing is imported here: asking for the spec must cost nothing."""
