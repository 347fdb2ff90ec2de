"""What the built-in grammar libraries say about themselves."""

from minivllm.registration.spec import Needs, Spec

HERE = "minivllm.plugins.grammar"
FORMS = frozenset({"json", "regex", "choice", "grammar"})

LLGUIDANCE = Spec(
    impl=f"{HERE}.llguidance_plugin:LLGuidance",
    api=(1, 2),
    summary="llguidance: an Earley parser over derivatives of regular expressions; compiles in a millisecond",
    options=f"{HERE}.options:GrammarOptions",
    priority=20,
    features=FORMS | {"reply"},
    needs=(Needs("llguidance", "1.8", "pip install -U llguidance"),),
)
XGRAMMAR = Spec(
    impl=f"{HERE}.xgrammar_plugin:XGrammar",
    api=(1, 2),
    summary="XGrammar: masks that do not depend on the stack are computed when a grammar is compiled",
    options=f"{HERE}.options:GrammarOptions",
    priority=10,
    features=FORMS,
    needs=(Needs("xgrammar", "0.2", 'pip install "minivllm[xgrammar]"'),),
)
