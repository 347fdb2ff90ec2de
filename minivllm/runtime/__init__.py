"""Parts that run while requests are served: hooks, structured output, text, processes, the account of energy."""
