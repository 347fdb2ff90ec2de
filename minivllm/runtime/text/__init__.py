"""Conversion of text to token ids and back: tokenizers, chat templates, detokenizer, stop strings, outputs."""
