"""The HTTP layer: connections, headers, API keys, request bodies and event streams.

It does not depend on OpenAI's protocol (``server.openai``) or on the engine (``server.link``).
"""
