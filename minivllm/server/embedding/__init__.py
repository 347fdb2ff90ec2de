"""Embeddings over HTTP: ``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``."""
