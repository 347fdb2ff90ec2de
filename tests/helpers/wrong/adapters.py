"""Wrong adapter methods with one fault each, and a right one: LoRA by gathers of padded matrices."""

from __future__ import annotations

import re

import torch

from minivllm.plugin import ANY, AdapterMemory, AdapterMethod, LowRank, Spec, adapter_refusal

SEAM = "adapter"
ROW = "test_each_token_has_the_adapter_of_its_row"
BITS = "test_a_token_without_an_adapter_keeps_its_bits"
BEFORE = "test_a_place_keeps_nothing_of_the_adapter_before"
READ = "test_what_was_read_is_not_changed_by_later_reads_and_stores"
SHARED = "test_processes_share_the_result_of_a_layer"
ALONE = "test_a_batch_invariant_token_does_not_depend_on_others"
REFUSED = "test_folders_that_do_not_fit_are_refused"
LOW = "test_low_rank_products_are_those_of_the_changes"
SERVED = "test_the_engine_serves_it"
FAULTS = {
    "AppliesTheAdapterOfAnotherRow": (ROW, SERVED),
    "ForgetsTheScale": (ROW,),
    "ReadsBehindTheRank": (ROW, BEFORE),
    "KeepsLayersOfTheAdapterBefore": (BEFORE,),
    "StoresInTheNextPlace": (ROW,),
    "GivesRowsWithoutAnAdapterTheLastOne": (ROW, BITS),
    "AppliesTheFirstAdapterToAllTokens": (ROW, SERVED),
    "ScalesInputsInPlace": (ROW,),
    "AddsBothSharesInEachProcess": (SHARED,),
    "AddsAMeanOfTheBatch": (ALONE,),
    "AcceptsAnyField": (REFUSED,),
    "AcceptsAnyShape": (REFUSED,),
    "AcceptsNumbersThatAreNotFinite": (REFUSED,),
    "ReadsIntoOneBuffer": (READ,),
    "DescribesTheMatricesOfAnotherPlace": (LOW,),
    "DescribesMemoryWithGarbageBehindTheRank": (LOW,),
}
RIGHT = ("Gathered",)
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def spec(name):
    traits = {"peft_type": "LORA"}
    return Spec(f"{__name__}:{name}", (1, 0), "for a test of the kit", limits={"device": ANY}, traits=traits)


class Layer:
    """A [places + 1, parts, rank, in] and B [places + 1, out, rank] of a layer; the last place has zeros."""

    def __init__(self, memory, info):
        self.memory, self.info, rows, rank = memory, info, memory.places + 1, memory.rank
        self.a = torch.zeros(rows, len(info.parts), rank, info.in_features, device=info.device)
        self.b = torch.zeros(rows, info.out_features, rank, device=info.device)

    def __call__(self, product, x):
        y, rows = product(x), self.memory.rows
        added = torch.zeros_like(y)
        for part, (name, _) in enumerate(self.info.parts):
            at = self.info.rows[name]
            inner = (self.a[rows, part] * x[:, None]).sum(2)
            added[:, at] = (self.b[rows, at] * inner[:, None]).sum(2)
        return torch.where(self.memory.with_adapter[:, None], y + added, y)


class Memory(AdapterMemory):
    def __init__(self, model, places, rank):
        self.model, self.places, self.rank = model, places, rank
        self.layers = {name: Layer(self, layer.info) for name, layer in model.layers.items()}

    def layer(self, name):
        return self.layers[name]

    def scale(self, config):
        return config["lora_alpha"] / config["r"]

    def read(self, source):
        found = {}
        names = {match[1] for name in source.names if (match := NAME.fullmatch(name))}
        if not names or 2 * len(names) != len(source.names):
            raise adapter_refusal(source.folder, "other tensors")
        for name in names:
            target = source.target(name)
            a, b = (source.tensor(f"base_model.model.{name}.lora_{which}.weight") for which in "AB")
            self.check(source, a, b, target)
            columns = self.columns(target, a)
            for part, rows, share in target.rows(b * self.scale(source.config)):
                found[target.layer, part] = columns.clone(), rows, share.clone()
        return found

    def check(self, source, a, b, target):
        self.check_shapes(source, a, b, target)
        self.check_numbers(source, a, b)

    def check_shapes(self, source, a, b, target):
        rank = source.config["r"]
        if tuple(a.shape) != (rank, target.inputs) or tuple(b.shape) != (target.outputs, rank):
            raise adapter_refusal(source.folder, "another shape")

    def check_numbers(self, source, a, b):
        if not (a.isfinite().all() and b.isfinite().all()):
            raise adapter_refusal(source.folder, "not finite")

    def columns(self, target, a):
        return target.columns(a)

    def clear(self, place):
        for layer in self.layers.values():
            layer.a[place], layer.b[place] = 0, 0

    def store(self, place, loaded):
        self.clear(place)
        for (name, part), (a, rows, b) in loaded.items():
            layer = self.layers[name]
            number = [one for one, _ in layer.info.parts].index(part)
            layer.a[place, number, : len(a)] = a
            layer.b[place, rows, : len(a)] = b

    def begin(self, tokens):
        self.with_adapter = tokens >= 0
        self.rows = torch.where(self.with_adapter, tokens, self.places).long()


class Gathered(AdapterMethod):
    spec, made = spec("Gathered"), Memory

    def check(self, folder, config):
        if set(config) - {"peft_type", "r", "lora_alpha"}:
            raise adapter_refusal(folder, "another field")

    def memory(self, model):
        return self.made(model, self.ctx.places, self.ctx.max_rank)


class RolledMemory(Memory):
    def begin(self, tokens):
        super().begin(tokens.roll(1))


class AppliesTheAdapterOfAnotherRow(Gathered):
    spec, made = spec("AppliesTheAdapterOfAnotherRow"), RolledMemory


class UnscaledMemory(Memory):
    def scale(self, config):
        return 1.0


class ForgetsTheScale(Gathered):
    spec, made = spec("ForgetsTheScale"), UnscaledMemory


class UnpaddedMemory(Memory):
    """A memory whose rows behind an adapter's rank have other numbers."""

    def clear(self, place):
        for layer in self.layers.values():
            layer.a[place], layer.b[place] = 0.3, 0.3


class ReadsBehindTheRank(Gathered):
    spec, made = spec("ReadsBehindTheRank"), UnpaddedMemory


class KeptMemory(Memory):
    def clear(self, place):
        pass


class KeepsLayersOfTheAdapterBefore(Gathered):
    spec, made = spec("KeepsLayersOfTheAdapterBefore"), KeptMemory


class NextMemory(Memory):
    def store(self, place, loaded):
        super().store((place + 1) % self.places, loaded)


class StoresInTheNextPlace(Gathered):
    spec, made = spec("StoresInTheNextPlace"), NextMemory


class LastMemory(Memory):
    """A memory whose row of tokens without an adapter is the last place."""

    def begin(self, tokens):
        super().begin(tokens)
        self.rows = tokens.long()

    def store(self, place, loaded):
        super().store(place, loaded)
        super().store(self.places, loaded)
        self.with_adapter = None

    @property
    def with_adapter(self):
        return torch.ones(len(self.rows), dtype=torch.bool, device=self.rows.device)

    @with_adapter.setter
    def with_adapter(self, value):
        pass


class GivesRowsWithoutAnAdapterTheLastOne(Gathered):
    spec, made = spec("GivesRowsWithoutAnAdapterTheLastOne"), LastMemory


class FirstMemory(Memory):
    def begin(self, tokens):
        super().begin(tokens[:1].expand_as(tokens))


class AppliesTheFirstAdapterToAllTokens(Gathered):
    spec, made = spec("AppliesTheFirstAdapterToAllTokens"), FirstMemory


class InPlace(Layer):
    def __call__(self, product, x):
        y = super().__call__(product, x)
        x.mul_(0.5)
        return y


class InPlaceMemory(Memory):
    def __init__(self, model, places, rank):
        super().__init__(model, places, rank)
        self.layers = {name: InPlace(self, layer.info) for name, layer in model.layers.items()}


class ScalesInputsInPlace(Gathered):
    spec, made = spec("ScalesInputsInPlace"), InPlaceMemory


class TwiceMemory(Memory):
    """A memory that reads the share of rank 0 in each process."""

    def columns(self, target, a):
        return a[:, : a.shape[1] // (a.shape[1] // target.info.in_features)]


class AddsBothSharesInEachProcess(Gathered):
    spec, made = spec("AddsBothSharesInEachProcess"), TwiceMemory


class Mean(Layer):
    def __call__(self, product, x):
        return super().__call__(product, x) + 1e-6 * x.mean() * self.memory.with_adapter[:, None]


class MeanMemory(Memory):
    def __init__(self, model, places, rank):
        super().__init__(model, places, rank)
        self.layers = {name: Mean(self, layer.info) for name, layer in model.layers.items()}


class AddsAMeanOfTheBatch(Gathered):
    spec, made = spec("AddsAMeanOfTheBatch"), MeanMemory


class AcceptsAnyField(Gathered):
    spec = spec("AcceptsAnyField")

    def check(self, folder, config):
        pass


class AnyShapeMemory(Memory):
    def check_shapes(self, source, a, b, target):
        pass

    def columns(self, target, a):
        return target.columns(a)[: self.rank, : self.layers[target.layer].info.in_features]


class AcceptsAnyShape(Gathered):
    spec, made = spec("AcceptsAnyShape"), AnyShapeMemory


class AnyNumberMemory(Memory):
    def check_numbers(self, source, a, b):
        pass


class AcceptsNumbersThatAreNotFinite(Gathered):
    spec, made = spec("AcceptsNumbersThatAreNotFinite"), AnyNumberMemory


class BufferMemory(Memory):
    """A memory that reads every folder into the same dict."""

    def __init__(self, model, places, rank):
        super().__init__(model, places, rank)
        self.buffer = {}

    def read(self, source):
        self.buffer.clear()
        self.buffer.update(super().read(source))
        return self.buffer


class ReadsIntoOneBuffer(Gathered):
    spec, made = spec("ReadsIntoOneBuffer"), BufferMemory


class DescribedMemory(Memory):
    """A memory that describes its matrices, moved by one place."""

    def low_rank(self, name):
        layer = self.layers[name]
        ranks = torch.full((self.places,), self.rank, dtype=torch.int32)
        return LowRank(layer.a[1:], layer.b[1:], ranks)


class DescribesTheMatricesOfAnotherPlace(Gathered):
    spec, made = spec("DescribesTheMatricesOfAnotherPlace"), DescribedMemory


class GarbageMemory(Memory):
    def __init__(self, model, places, rank):
        super().__init__(model, places, rank)
        # stored by ``store``, with numbers behind the rank of an adapter
        self.padded = {name: (torch.ones_like(one.a), torch.ones_like(one.b)) for name, one in self.layers.items()}

    def store(self, place, loaded):
        super().store(place, loaded)
        for (name, _), (a, _, _) in loaded.items():
            for mine, other in zip(self.padded[name], (self.layers[name].a, self.layers[name].b), strict=True):
                rank = slice(None), slice(0, len(a))
                mine[place][rank] = other[place][rank]

    def low_rank(self, name):
        ranks = torch.full((self.places,), self.rank, dtype=torch.int32)
        a, b = self.padded[name]
        return LowRank(a[: self.places], b[: self.places], ranks)


class DescribesMemoryWithGarbageBehindTheRank(Gathered):
    spec, made = spec("DescribesMemoryWithGarbageBehindTheRank"), GarbageMemory
