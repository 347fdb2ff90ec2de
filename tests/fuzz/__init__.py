"""Generate engine configurations and workloads, and check the answers: ``python tests/fuzz/run.py --help``.

``cases.case_of(seed, device, dtype)`` is plain data with engines, requests and the way they are driven.  A worker
process plays it, so that a crash or a hang counts as a fault.  Every answer is checked:

* With ``batch_invariant`` tokens and log-probabilities equal those of the request alone in a plain engine.  A plain
  engine has no captures, run-ahead, drafts or cached prefixes, and enough blocks.  Among equal logits the lower id
  comes first.  A client that left has the beginning of the answer.
* Without it, in float32, another token is accepted if the plain engine's logits show that rounding decides.
* In every mode the request ends, with the right number of outputs, for the given reason, and at the length that follows
  from it.  Each token was allowed.  Text has the requested form.  Log-probabilities are possible, in order, and add up.
  Streamed pieces equal the answer.  An error also occurs for the request alone.
* Afterwards nothing runs or waits, no block is held, the check of the cache passes, and the engine works.

* Changes of weights, pauses and sleep change no answer; a set of other weights changes all later ones (``weights``).

The kinds of faults are wrong token, mask, nan, device assert, count, finish, text, logprob, ties (choice and order of
equal log-probabilities), taps, stream, leak, weights, dead, exception, died (the process) and hung.
"""
