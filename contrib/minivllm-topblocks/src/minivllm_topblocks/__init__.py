"""Block-sparse decode attention.  This module imports nothing, so that reading the spec costs nothing."""
