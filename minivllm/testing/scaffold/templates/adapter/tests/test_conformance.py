import json

import torch
from safetensors.torch import load_file, save_file

from minivllm.testing import AdapterConformance


class TestMyPlugin(AdapterConformance):
    plugin = "my-plugin/my-plugin"

    def write(self, folder, number, layers, points):
        generator = torch.Generator().manual_seed(number)
        names = [list(layers), list(layers)[-1:], list(layers)[:-1]][number]
        folder.mkdir()
        content = json.dumps({"peft_type": "MY_PLUGIN"})
        (folder / "adapter_config.json").write_text(content)
        vectors = {}
        for name in names:
            vectors[name] = torch.randn(layers[name][0], generator=generator)
        save_file(vectors, folder / "adapter_model.safetensors")

    def output(self, folder, name, x, weight, bias):
        y = x @ weight.T + bias
        vectors = load_file(folder / "adapter_model.safetensors")
        if name in vectors:
            return y + vectors[name].double()
        return y
