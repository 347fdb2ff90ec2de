"""The bill of materials of a run: what was wired, from which package and source, with which options, and why.

``bill``      makes it          ``sources``  hashes of implementations and models
``tally``     counts results    ``machine``  versions, machine, git
``recorder``  writes run.json   ``nodes``    a bill as the things that can differ, each with what it follows from
``diff``      compares two      ``replay``   starts a run again from its run.json

Importing ``minivllm`` imports nothing of this.
"""
