"""Describe the built-in grammar libraries."""

from functools import partial

from minivllm.registration.spec import Needs, Spec

HERE = "minivllm.plugins.grammar"
FORMS = frozenset({"json", "regex", "choice", "grammar"})

_grammar = partial(Spec, api=(1, 2), options=f"{HERE}.options:GrammarOptions")

LLGUIDANCE = _grammar(
    impl=f"{HERE}.llguidance_plugin:LLGuidance",
    summary="llguidance: an Earley parser over derivatives of regular expressions; compiles in a millisecond",
    priority=20,
    features=FORMS | {"reply"},
    needs=(Needs("llguidance", "1.8", "pip install -U llguidance"),),
)
XGRAMMAR = _grammar(
    impl=f"{HERE}.xgrammar_plugin:XGrammar",
    summary="XGrammar: masks that do not depend on the stack are computed when a grammar is compiled",
    priority=10,
    features=FORMS,
    needs=(Needs("xgrammar", "0.2", 'pip install "minivllm[xgrammar]"'),),
)
