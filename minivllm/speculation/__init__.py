"""Speculative decoding: when it pays (``control``, on the host) and the draft model (``own_model``, on the device).

The rest is where steps are made: ``core.planner``, ``core.drafting``, ``core.publisher``.
"""
