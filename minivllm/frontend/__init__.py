"""The Python interfaces ``LLM`` and ``AsyncLLM``: they convert text to requests of the engine, and its tokens to
text."""
