"""The built-in image encoders."""
