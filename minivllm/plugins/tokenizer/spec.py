"""Describe the built-in tokenizers."""

from minivllm.registration.spec import ANY, Needs, Spec

HERE = "minivllm.plugins.tokenizer."
FOLDER = {"format": frozenset({"folder"}), "tokenizer_class": ANY}

GGUF = Spec(
    impl=HERE + "gguf:GgufTokenizer",
    api=(1, 0),
    summary="the vocabulary in a GGUF file, as llama.cpp reads it",
    limits={"format": frozenset({"gguf"}), "tokenizer_class": ANY},
)
HF = Spec(
    impl=HERE + "hf:HfTokenizer",
    api=(1, 0),
    summary="tokenizer.json of a directory, or older files that transformers converts",
    priority=10,
    limits=FOLDER,
)
MISTRAL = Spec(
    impl=HERE + "mistral:MistralTokenizer",
    api=(1, 0),
    summary="tekken.json of a directory, read by mistral-common",
    limits=FOLDER,
    features=frozenset({"lossless"}),
    needs=(Needs("mistral_common", "1.5", "pip install 'minivllm[mistral]'", dist="mistral-common"),),
)
