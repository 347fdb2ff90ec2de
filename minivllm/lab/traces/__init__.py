"""Traces of requests: when they come, how long they are, which prefixes they share.

    trace.py       requests as columns                        read.py      which format a file has, and where it is
    formats.py     the readers of published formats           write.py     the same formats, from a trace
    synthetic.py   a seeded generator                         presets.py   its parameters for known kinds of traffic

``samples/`` holds a few dozen rows in each format, which ``write.py`` made from the generator: ``sample:azure`` ...
"""
