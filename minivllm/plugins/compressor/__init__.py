"""The built-in compressors."""
