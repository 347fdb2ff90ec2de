"""Block-sparse decode attention.  Nothing is imported here: asking for the spec must cost nothing."""
