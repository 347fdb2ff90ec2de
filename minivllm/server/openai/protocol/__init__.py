"""The bodies of requests as OpenAI's clients send them, with the extensions that vLLM's users know.

Types are checked here, ranges where they are known: in ``SamplingParams`` and at the door.  Lists are checked by hand:
a list of a hundred thousand wrong things is one fault, not as many.
"""
