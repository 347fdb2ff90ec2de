"""A generator of engine configurations and workloads, and an oracle: ``python tests/fuzz/run.py --help``.

``cases.case_of(seed, device, dtype)`` is plain data: engines, requests, how they are driven.  It is played by a worker
process, so that one that dies or hangs is a fault like others, and every answer is judged:

* With ``batch_invariant`` it is, token for token, what the request answers alone in a plain engine: no captures,
  nothing ahead, no drafts, no cached prefix, ample blocks; log-probabilities too.  Of equal logits the lower id comes
  first.  A client that left has the beginning of it.
* Without, in float32, another token is accepted where the plain engine's logits say that rounding decides.
* Whatever the mode: the request ends, as often as was asked, for the reason that is given, at the length that follows;
  each token was allowed; text has the form that was asked for; log-probabilities are possible, in order, and add up;
  what was streamed is the answer; an error is one that the request has alone, too.
* Afterwards nothing runs or waits, no block is held, the walk over the cache finds nothing, the engine lives.

A fault's kind is one of: wrong token, mask, nan, device assert, count, finish, text, logprob, ties (which of equal
log-probabilities are told, in what order), taps, stream, leak, dead, exception, died (its process), hung.
"""
