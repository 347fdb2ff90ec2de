"""The built-in adapter methods."""
