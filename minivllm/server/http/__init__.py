"""The wire: connections, headers, keys, bodies and events, whatever is asked in them.

It knows neither OpenAI's shapes (``server.openai``) nor the engine (``server.link``).
"""
