"""The page at ``/`` and that of the API at ``/docs``: static files (``static/``), and the live state of the engine."""
