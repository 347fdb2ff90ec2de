"""Traces of requests: their arrival times, their lengths and the prefixes that they share.

    trace.py       the columns of a trace                 read.py      choose the reader of a file
    formats.py     readers of published formats           write.py     writers of the same formats
    synthetic.py   a seeded generator                     presets.py   generator parameters for known kinds of traffic

``samples/`` holds a few dozen rows in each format.  ``write.py`` made them with the generator.  A user reads them as
``sample:azure`` and so on.
"""
