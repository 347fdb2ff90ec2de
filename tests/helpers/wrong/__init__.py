"""Wrong plug-ins, one planted fault each: the conformance kit must catch every one of them.

Each module has ``SEAM``, ``FAULTS`` (class -> the tests of the suite that catch it) and ``RIGHT`` (classes beside the
built-ins that must pass); ``DEVICE`` if it is not the first that is claimed, and ``SUITE`` (class -> what its author's
test class overrides).
"""
