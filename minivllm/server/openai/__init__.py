"""OpenAI's API and what vLLM's users know beside it: bodies to requests of the engine, streams of tokens to answers."""
