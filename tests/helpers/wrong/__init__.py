"""Wrong plug-ins with one planted fault each, all of which the conformance kit must catch.

Each module has ``SEAM``, ``FAULTS`` (class -> the tests of the suite that catch it) and ``RIGHT`` (further classes that
must pass).  It may have ``DEVICE``, if this is not the first claimed device, and ``SUITE`` (class -> overrides of its
author's test class).
"""
