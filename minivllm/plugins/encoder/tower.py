"""An image encoder that consists of modules of transformers: a vision tower and a projector.

Only the weights of the encoder are read, and nothing from the model's directory is run.  The text model of the wrapper
is built without layers and dropped.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm import files
from minivllm.core.interfaces.encoder import EncoderContext, ImageEncoder, ImageFacts
from minivllm.errors import ModelError, describe_error, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from PIL.Image import Image
    from torch import Tensor

PROCESSOR = "preprocessor_config.json"  # file of a checkpoint's image processor
CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"  # model types of towers
TEXT = "language_model"
# spellings of older checkpoints for the names of transformers' modules
SPELLINGS = (("vision_tower.", "vision_tower.vision_model."),)
PREFIXES = ("", "model.")
DUMMY_STD = 0.02  # standard deviation of dummy weights


class TowerEncoder(ImageEncoder):
    """The tower and the projector of a checkpoint, whose processor prepares the images."""

    def __init__(self, options: Any, ctx: EncoderContext) -> None:
        super().__init__(options, ctx)
        self.folder = Path(ctx.folder)
        self.model: Any = None  # the modules, after ``load``
        self._processor: Any = None
        self._whole: Any = None
        self._lock = threading.Lock()

    @property
    def family(self) -> str:
        """Return the model type of the checkpoint."""
        return str(self.ctx.config.get("model_type"))

    @property
    def whole(self) -> Any:
        """Return transformers' configuration of the whole checkpoint.  ModelError if it cannot be read."""
        if self._whole is None:
            self._whole = whole_config(self.ctx.config)
        return self._whole

    def facts(self) -> ImageFacts:
        """Return the facts of the checkpoint's images.  ModelError for fields or files that cannot be served."""
        if not files.is_there(self.folder / PROCESSOR):
            raise ModelError(f"the checkpoint has no {PROCESSOR}")
        token = getattr(self.whole, "image_token_id", None)
        if token is None:
            raise ModelError("config.json has no image_token_id")
        return self.facts_with(int(token))

    @abstractmethod
    def facts_with(self, token: int) -> ImageFacts:
        """Return the facts of a checkpoint: how a prompt contains an image; ``token`` is the id of an image token."""

    def processed(self, image: Image, **fields: Any) -> Mapping[str, Any]:
        """Return the arrays that the checkpoint's image processor makes of an image.

        ``fields`` replace settings of the processor.
        """
        self._load_processor()
        found: Mapping[str, Any] = self._processor(images=[image], return_tensors="np", **fields)
        return found

    def load(self, device: str, dtype: str) -> int:
        """Build the modules with the weights of the checkpoint on a device, and return their bytes."""
        import torch

        model = text_free_model(self.folder, self.ctx.config, getattr(torch, dtype))
        with torch.no_grad():
            fill(self.folder, model.state_dict())
        return self._serve(model, device)

    def load_dummy(self, device: str, dtype: str, seed: int) -> int:
        """Build the modules with random weights on a device, and return their bytes."""
        import torch

        model = text_free_model(self.folder, self.ctx.config, getattr(torch, dtype)).to(device)
        draw_weights(model.named_parameters(), device, seed)
        return self._serve(model, device)

    def _serve(self, model: Any, device: str) -> int:
        """Move the modules to a device, and return the bytes of their weights."""
        from minivllm.device.layers.tower_attention import use_in_modules

        self.model = model.eval().requires_grad_(False).to(device)
        self.dtype = next(model.parameters()).dtype
        vision = self.whole.vision_config
        heads = getattr(vision, "num_attention_heads", None) or vision.num_heads
        use_in_modules(model, getattr(vision, "embed_dim", vision.hidden_size) // heads)
        return sum(p.numel() * p.element_size() for p in model.parameters())

    def encode(self, values: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """Return the features of an image.  Convolutions of float32 on a GPU use float32 products, as the matrix
        products do."""
        import torch

        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return torch.stack(self.features(values, shape)).to(self.dtype)

    @abstractmethod
    def features(self, values: Tensor, shape: tuple[int, int, int]) -> list[Tensor]:
        """Return the features [tokens, hidden] of an image, one tensor for each level; ``values`` f32 [n] are its
        pixels or patches.

        The first level is the embeddings of the image's tokens, and further levels are added behind layers of the text
        model.
        """

    def _load_processor(self) -> None:
        """Load the processor of the checkpoint, once.  No code from the model's directory is run."""
        with self._lock:
            if self._processor is not None:
                return
            from transformers import AutoImageProcessor

            try:
                with quiet():
                    self._processor = AutoImageProcessor.from_pretrained(
                        self.folder, local_files_only=True, trust_remote_code=False
                    )
            except Exception as exc:  # transformers raises errors of many types
                raise ModelError(f"{PROCESSOR} cannot be read: {describe_error(exc)}") from exc


def whole_config(raw: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a whole checkpoint.  ModelError if it cannot be read."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[str(raw["model_type"])].from_dict(copy.deepcopy(dict(raw)))
    except Exception as exc:  # transformers checks fields with errors of many types
        raise ModelError(f"config.json: {str(exc).splitlines()[0]}") from exc


def check_tower(whole: Any, accepted: Sequence[str]) -> None:
    """Raise ModelError if the vision tower of a checkpoint has another type than the accepted ones."""
    found = whole.vision_config.model_type
    if found not in accepted:
        raise ModelError(f"vision_config.model_type={shown(found)}: expected {' or '.join(accepted)}")


def text_free_model(folder: Path, raw: Mapping[str, Any], dtype: Any) -> Any:
    """Return the modules of a checkpoint without its text model.  Their weights are not set.

    ModelError for wrong fields of config.json."""
    from transformers import AutoModel
    from transformers.initialization import no_init_weights

    fields = whole_config(raw).to_dict()
    # without layers and with a small vocabulary, because this text model is dropped
    fields["text_config"].update(
        num_hidden_layers=0,
        vocab_size=8,
        layer_types=[],
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    try:
        with no_init_weights():  # drawing initial weights takes seconds
            model = AutoModel.from_config(whole_config(fields), dtype=dtype)
    except Exception as exc:  # modules of transformers raise errors of many types on wrong fields
        raise ModelError(f"{folder}: the image encoder cannot be built: {str(exc).splitlines()[0]}") from exc
    if hasattr(model, TEXT):
        delattr(model, TEXT)
    return model


def draw_weights(named: Iterable[tuple[str, Tensor]], device: str, seed: int) -> None:
    """Draw normal weights of standard deviation 0.02 from a seed.  Biases become zero, and norms one."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in named:
            if weight.dim() > 1:
                weight.normal_(0, DUMMY_STD, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)


def fill(folder: Path, wanted: dict[str, Tensor]) -> None:
    """Copy the tensors of a checkpoint to those of the encoder.  ModelError if a tensor is missing or has another
    shape."""
    from minivllm.device.loading.tensor_files import checkpoint_tensors

    names = {spelled: name for name in wanted for spelled in _spelled(name)}
    missing = set(wanted)
    for source, tensor in checkpoint_tensors(folder):
        name = names.get(source)
        if name is None:
            continue
        if tensor.shape != wanted[name].shape or not tensor.is_floating_point():
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ModelError(f"{folder}: {source} is {found}; expected floats {list(wanted[name].shape)}")
        wanted[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ModelError(f"{folder}: the image encoder lacks {len(missing)} tensors, such as {shown(min(missing))}")


def _spelled(name: str) -> Iterator[str]:
    """Yield the names that checkpoints have for a tensor of the encoder."""
    for prefix in PREFIXES:
        yield prefix + name
        for new, old in SPELLINGS:
            if name.startswith(new):
                yield prefix + old + name.removeprefix(new)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' notes about missing libraries that it can replace."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
