"""Parts that run while requests are served: hooks, structured output, text, processes, and the energy account."""
