"""Parameters of requests that plug-ins declare.  Parameters of other packages work as built-in ones."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from plugin_helpers import install

from minivllm import LLM, RequestError, SamplingParams
from minivllm.cli import main
from minivllm.config import load_config
from minivllm.config.schema import config_schema
from minivllm.config.server import ServerConfig
from minivllm.core import declared_params
from minivllm.core.interfaces.params import NAMES, is_own
from minivllm.errors import ConfigError, PluginError
from minivllm.frontend.record.tally import plain_params
from minivllm.registration.parameters import Param
from minivllm.registration.spec import KINDS, REQUESTED, Spec
from minivllm.registry import Catalog
from minivllm.server.openai.bodies import CompletionBody, read
from minivllm.server.openai.fields import check
from minivllm.server.openai.params import make_params
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)

SPEC = """
from minivllm.registration.spec import ANY, Param, Spec
AWAY = Spec(
    "away_impl:Away", (1, 2), "pushes one token away", limits={"device": ANY}, features=frozenset({"graph_safe"}),
    params=(
        Param("xtc_probability", float, 0.0, ge=0, le=9, summary="off its logit"),
        Param("away_token", int, 3, ge=0, summary="which token"),
    ),
)
"""
IMPL = """
from away_spec import AWAY
from minivllm.core.interfaces.sampling import Column, Processor, Row

class Away(Processor):
    reads = AWAY.reads

    def columns(self):
        return {"by": Column(), "token": Column(dtype="int64")}

    def bind(self, params, prompt_len):
        return Row({"by": params.xtc_probability, "token": params.away_token}) if params.xtc_probability else None

    def apply(self, logits, rows, state):
        logits.scatter_add_(1, state["token"][rows.slots][:, None], -1e4 * state["by"][rows.slots][:, None])
"""


@pytest.fixture
def away(tmp_path, monkeypatch):
    """A package with a processor that has two parameters of its own, installed."""
    points = {"minivllm.processor": {"away": "away_spec:AWAY"}}
    install(tmp_path / "site", "acme", points, away_spec=SPEC, away_impl=IMPL)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(declared_params, "_chosen", {})
    monkeypatch.setattr(declared_params, "_installed", None)
    return tmp_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("tiny")
    tiny_dir(made, "qwen3", vocab_size=64)
    return str(made)


def engine(folder, **options):
    size = dict(skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=40, max_num_seqs=4)
    return LLM(folder, **size, max_num_batched_tokens=64, **options)


def test_what_a_package_declares_is_served_as_what_is_built_in(away, folder):
    plain = dict(temperature=0, max_tokens=6, ignore_eos=True)
    with engine(folder, processors=["penalties", "acme/away"]) as llm:
        first = llm.generate([5, 6, 7], SamplingParams(**plain), use_tqdm=False)[0].tokens
        pushed = SamplingParams(**plain, xtc_probability=1, away_token=first[0])
        assert (pushed.xtc_probability, pushed.away_token) == (1.0, first[0])
        assert first[0] not in llm.generate([5, 6, 7], pushed, use_tqdm=False)[0].tokens
        in_extra = SamplingParams(**plain, extra={"xtc_probability": 1, "away_token": first[0]})
        assert in_extra == pushed
        assert llm.generate([5, 6, 7], in_extra, use_tqdm=False)[0].tokens[0] != first[0]


@pytest.mark.parametrize("how", [lambda **kw: SamplingParams(**kw), lambda **kw: SamplingParams(extra=kw)])
def test_a_value_out_of_range_is_refused_by_name_where_it_is_given(away, how):
    SamplingParams(xtc_probability=1.0)  # the package has been looked at
    for name, value, want in (
        ("xtc_probability", 10, "xtc_probability=10: expected a number at least 0 and at most 9"),
        ("xtc_probability", "x", "xtc_probability='x': expected a finite number: a number at least 0 and at most 9"),
        ("away_token", 1.5, "away_token=1.5: expected a whole number at least 0"),
        ("away_token", None, "away_token=None: expected a whole number at least 0"),
    ):
        with pytest.raises(RequestError) as info:
            how(**{name: value})
        assert (str(info.value), info.value.param) == (want, name)


def test_a_parameter_that_nothing_here_reads_is_refused_with_who_does(away, folder):
    with engine(folder) as llm:
        for requested, who in (
            (dict(xtc_probability=1.0), "processor 'acme/away'"),
            (dict(mirostat_tau=2.0), "sampler 'mirostat'"),
            (dict(typical_p=0.5), "sampler 'typical'"),
        ):
            (name,) = requested
            with pytest.raises(RequestError, match=f"{name} is set, but no .* add one that does, {who}") as info:
                llm.generate([1, 2], SamplingParams(**requested), use_tqdm=False)
            assert info.value.param == name


def test_it_stands_in_files_in_bodies_and_in_what_is_shown(away, capsys):
    file = away / "config.toml"
    file.write_text("[sampling]\nxtc_probability = 0.5\n")
    assert load_config([file]).sampling == {"xtc_probability": 0.5}
    file.write_text("[sampling]\nxtc_probability = 11\n")
    with pytest.raises(ConfigError, match="xtc_probability=11: expected a number at least 0 and at most 9"):
        load_config([file])
    declared_params.installed()
    body = read(CompletionBody, {"prompt": "a", "xtc_probability": 0.5, "options": {"away_token": 4}})
    assert check(body, ["xtc_probability", "away_token"]) == (
        {"extra": {"xtc_probability": 0.5, "away_token": 4}},
        [],
    )
    assert [w["field"] for w in check(body, ["temperature"])[1]] == ["xtc_probability", "away_token"]
    assert main(["plugins", "show", "acme/away"]) == 0
    assert "xtc_probability: float, default 0.0, at least 0, at most 9: off its logit" in capsys.readouterr().out
    sampling = config_schema(Catalog.discover())["properties"]["sampling"]["properties"]
    assert (sampling["xtc_probability"]["maximum"], sampling["mirostat_tau"]["anyOf"][0]["maximum"]) == (9, 64)


@pytest.mark.parametrize("name", ["mirostat_tau", "xtc_probability"])
@pytest.mark.parametrize("how", [lambda requested: requested, lambda requested: {"vllm_xargs": requested}])
def test_a_body_counts_before_the_defaults_of_a_server(away, name, how):
    declared_params.installed()
    info, state = SimpleNamespace(vocab_size=64, max_logprobs=5), {"tenant": "", "trace": None}
    for requested, want in (({}, 0.5), ({name: 0.25}, 0.25)):
        body = read(CompletionBody, {"prompt": "a", **how(requested)})
        passed, _ = check(body, [name])
        made = make_params(body, passed, None, None, state, info, ServerConfig(), {name: 0.5})
        assert made.extra == {name: want}


def test_a_name_is_not_looked_for_in_other_packages_while_requests_are_served(away, monkeypatch):
    """A name in ``extra`` that no chosen plug-in declares is unchanged, because an import would delay all requests."""
    monkeypatch.setattr(Catalog, "discover", lambda *_: pytest.fail("the metadata was asked"))
    assert SamplingParams(extra={"xtc_probability": "x"}).extra == {"xtc_probability": "x"}
    assert SamplingParams(mirostat_tau=3, typical_p=0.5).changed_parameters() == ["mirostat_tau", "typical_p"]


# ---- what can be declared --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["min_p", "n", "extra", "changed_parameters", "make", "greedy"])
def test_a_name_that_all_requests_have_cannot_be_declared(name):
    assert "choose another name" in declared_params.fault("sampler", Param(name, float, 0.0), is_own)


def test_a_name_has_one_meaning(away):
    tau = declared_params.builtin()["mirostat_tau"].param
    assert not declared_params.fault("sampler", dataclasses.replace(tau, summary="in other words"), is_own)
    other = declared_params.fault("sampler", dataclasses.replace(tau, le=9), is_own)
    assert "otherwise than sampler 'mirostat': declare float, default None, above 0, at most 64" in other
    registry = Catalog.discover()["processor"]
    (entry,) = (e for e in registry.entries if e.dist == "acme")
    wrong = dataclasses.replace(registry.spec(entry), params=(dataclasses.replace(tau, le=9),))
    from minivllm.registry import Candidate

    with pytest.raises(PluginError, match=r"processor 'acme/away' .* declares the parameter 'mirostat_tau' otherwise"):
        declared_params.choose("processor", Candidate(entry, wrong), is_own)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(REQUESTED)))
def test_only_seams_that_see_requests_declare_parameters(kind):
    assert "has no request parameters" in declared_params.fault(kind, Param("surely_new", float, 0.0), is_own)


def test_what_is_built_in_declares_what_its_class_reads():
    from minivllm.registry import import_target

    for kind in REQUESTED:
        registry = Catalog.discover(environ={})[kind]
        for entry in (e for e in registry.entries if e.builtin):
            spec = registry.spec(entry)
            if kind == "compressor":  # the engine reads the budget of a request
                assert spec.reads == (set() if entry.name == "none" else {"kv_budget"}), entry.name
            else:
                assert import_target(spec.impl).reads - NAMES == spec.reads, entry.name


@pytest.mark.parametrize(
    "wrong",
    [
        dict(name="no name", kind=float), dict(name="_x", kind=float), dict(name=5, kind=float),
        dict(name="x", kind=object), dict(name="x", kind=float, default=2.0, le=1), dict(name="x", kind=str, ge=0),
        dict(name="x", kind=str, default="c", choices=("a", "b")), dict(name="x", kind=bool, default=1),
    ],
)  # fmt: skip
def test_a_declaration_that_contradicts_itself_is_refused_where_it_is_written(wrong):
    with pytest.raises(TypeError, match="Param"):
        Param(**wrong)


def test_a_spec_holds_declarations_alone():
    with pytest.raises(TypeError, match="params"):
        Spec("a:B", (1, 2), "x", params=["mirostat_tau"])


@pytest.mark.parametrize(
    ("param", "good", "bad", "want"),
    [
        (Param("x", bool, False), (True, False), (1, None, "yes"), "True or False"),
        (Param("x", str, "a", choices=("a", "b")), ("a", "b"), ("c", 1, None), "one of 'a', 'b'"),
        (Param("x", list), ([1], (1, 2), None), ("ab", 5, {1: 2}), "a list"),
        (Param("x", dict), ({}, {"a": 1}, None), ([1], "a"), "a mapping"),
        (Param("x", int, gt=0, lt=5), (1, 4, None), (0, 5, True, 1.0), "a whole number above 0 and below 5"),
        (Param("x", float, ge=1), (1, 2.5, None), (0.5, float("nan"), True, 10**400), "a number at least 1"),
    ],
)  # fmt: skip
def test_a_kind_takes_its_values_and_refuses_others_in_words(param, good, bad, want):
    for value in good:
        assert param.check(value) == value
    for value in bad:
        with pytest.raises(RequestError) as info:
            param.check(value)
        assert str(info.value).endswith(f"expected {want}") and info.value.param == "x"


# ---- in SamplingParams -----------------------------------------------------------------------------------------------


def test_a_declared_parameter_is_kept_where_it_is_not_neutral():
    requested = SamplingParams(mirostat_tau=5, mirostat_eta=0.1, typical_p=1.0, no_repeat_ngram_size=0)
    assert requested.extra == {"mirostat_tau": 5.0} and requested.changed_parameters() == ["mirostat_tau"]
    assert (requested.mirostat_eta, requested.typical_p, requested.temperature_schedule) == (0.1, 1.0, None)
    assert dataclasses.replace(requested, mirostat_tau=None) == SamplingParams()
    assert SamplingParams(mirostat_tau=4.0, extra={"mirostat_tau": 2.0}).mirostat_tau == 4.0
    for again in (copy.copy(requested), copy.deepcopy(requested), pickle.loads(pickle.dumps(requested))):
        assert again == requested and again.mirostat_tau == 5.0


def test_numbers_of_other_libraries_become_plain_ones():
    import numpy as np

    requested = SamplingParams(typical_p=np.float32(0.5), no_repeat_ngram_size=np.int64(3))
    assert json.dumps(plain_params(requested)) == '{"typical_p": 0.5, "no_repeat_ngram_size": 3}'


def test_a_declared_parameter_can_be_set_later_and_an_unknown_name_cannot():
    requested = SamplingParams()
    requested.typical_p = 0.5
    assert requested == SamplingParams(typical_p=0.5)
    requested.typical_p = 1.0
    assert requested == SamplingParams()
    with pytest.raises(RequestError, match="typical_p"):
        requested.typical_p = 5
    for name in ("temprature", "_private"):
        with pytest.raises(AttributeError, match="has no parameter"):
            setattr(requested, name, 1)
        assert not hasattr(requested, name)


def test_an_unknown_keyword_is_refused_with_the_nearest_of_all_names():
    for make in (SamplingParams, SamplingParams.make):
        with pytest.raises(RequestError, match=r"unknown sampling parameter 'mirostat_tua'.*'mirostat_tau'") as info:
            make(mirostat_tua=3.0)
        assert info.value.param == "mirostat_tua"


def test_half_a_character_in_a_declared_parameter_is_refused_by_its_name():
    with pytest.raises(RequestError, match="surrogate") as info:
        SamplingParams(temperature_schedule={"kind": "\ud800"})
    assert info.value.param == "temperature_schedule"


def test_what_is_declared_after_a_request_was_written_is_checked_before_it_is_served(away, folder):
    early = SamplingParams(temperature=0, max_tokens=2, extra={"xtc_probability": "x"})
    with engine(folder, processors=["acme/away"]) as llm:
        with pytest.raises(RequestError, match="xtc_probability='x': expected a finite number") as info:
            llm.generate([1, 2], early, use_tqdm=False)
        assert info.value.param == "xtc_probability"
