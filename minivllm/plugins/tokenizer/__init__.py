"""The built-in tokenizers."""
