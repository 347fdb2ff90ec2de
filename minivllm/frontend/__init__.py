"""The front doors ``LLM`` and ``AsyncLLM``: text to requests of the engine, its tokens to text."""
