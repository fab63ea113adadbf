"""Weights of a target: safetensors in the hub's layout, loaded strictly, or random ones.

A checkpoint that is not whole is never filled up or cut to size: the library does so with a
warning, or silently, and the texts would still read well. So names, shapes and dtypes are compared
from the headers of the files, and the library's report of what did not fit becomes an error.

What this file leaves out: which native class it is, its configuration and tokenizer (targets.py);
quantised weights.
"""

import os
import re
import statistics

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from command import read_json, reason

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # a cast from other dtypes would not mean the same numbers


# ------------------------------------------------------------------------------- before the loading


def weight_files(folder):
    """Names of the safetensors files that hold a checkpoint: one, or those that its index names."""
    index = os.path.join(folder, INDEX)
    if not os.path.exists(index):
        return [WHOLE]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all_texts(shards.values()):
        raise ValueError(f"{index} names no weight_map: fetch it again")
    names = sorted(set(shards.values()))
    if WHOLE not in names and os.path.exists(os.path.join(folder, WHOLE)):
        raise ValueError(
            f"{folder} holds {WHOLE} beside an index of other files: remove what is not the model's"
        )
    return names


def all_texts(values):
    return all(isinstance(value, str) for value in values)


def missing(folder):
    """Names of the safetensors files that `folder` should hold and does not."""
    names = weight_files(folder)
    return [name for name in names if not os.path.isfile(os.path.join(folder, name))]


def check_weights(folder, config):
    """Refuse weights that are not whole, from the names of the files and the headers in them."""
    lost = missing(folder)
    if lost:
        raise FileNotFoundError(
            f"{folder} lacks {len(lost)} file(s) of weights, first {lost[0]}: fetch the weights "
            "again"
        )
    shapes, dtypes = read_headers(folder)
    odd = odd_dtype(dtypes) or odd_layer(shapes, config) or odd_expert(shapes, config)
    odd = odd or odd_shape(shapes)
    if odd:
        raise ValueError(f"the weights in {folder} do not fit config.json: {odd}: correct one")


def read_headers(folder):
    """({name: shape}, {name: dtype}) of all tensors in the checkpoint's files."""
    shapes, dtypes = {}, {}
    try:
        for file in weight_files(folder):
            with safe_open(os.path.join(folder, file), "pt") as tensors:
                for name in tensors.keys():
                    if name in shapes:
                        raise ValueError(f"two files hold a tensor {name}")
                    header = tensors.get_slice(name)
                    shapes[name] = tuple(header.get_shape())
                    dtypes[name] = header.get_dtype()
    except Exception as error:  # a truncated file
        raise ValueError(unreadable(folder, error)) from None
    return shapes, dtypes


def unreadable(folder, error):
    return f"the weights in {folder} cannot be read ({reason(error)}): fetch them again"


def odd_dtype(dtypes):
    """Says which tensor is no floating-point one, or None.

    >>> odd_dtype({"model.norm.weight": "BF16", "lm_head.weight": "I8"})
    'tensor lm_head.weight is of dtype I8'
    """
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            return f"tensor {name} is of dtype {dtype}"
    return None


def odd_layer(shapes, config):
    """Says what layer the library would pass over, or not find, among tensors {name: shape}."""
    found = {}  # layer: one of its tensors
    for name in shapes:
        layer = re.search(r"\.(?:layers|blocks)\.(\d+)\.", name)
        if layer:
            found.setdefault(int(layer[1]), name)
    for layer in sorted(found):
        if layer >= config.num_hidden_layers:
            return f"surplus tensor {found[layer]}"
    for layer in range(config.num_hidden_layers):
        if layer not in found:
            return f"missing tensors of layer {layer}"
    return None


def odd_expert(shapes, config):
    """Says what expert is missing or too many; the library stacks what it finds."""
    found = {}  # {name without the expert's number: its experts}
    for name in shapes:
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if expert:
            found.setdefault(name.replace(expert[0], ".experts.{}."), set()).add(int(expert[1]))
    right = set(range(getattr(config, "n_routed_experts", 0)))
    for name, experts in found.items():
        if experts != right:
            kind = "missing" if right - experts else "surplus"
            return f"{kind} tensor {name.format(min(right ^ experts))}"
    return None


def odd_shape(shapes):
    """Says which tensor has a shape unlike that of the same one in the other layers, or None.

    >>> odd_shape({"layers.0.w": (2, 3), "layers.1.w": (2, 3), "layers.2.w": (3, 2)})
    'tensor layers.2.w has shape (3, 2), elsewhere (2, 3)'
    """
    alike = {}  # {name without numbers: its shapes}
    for name, shape in shapes.items():
        alike.setdefault(numberless(name), []).append(shape)
    usual = {name: statistics.mode(many) for name, many in alike.items()}
    for name, shape in shapes.items():
        if shape != usual[numberless(name)]:
            return f"tensor {name} has shape {shape}, elsewhere {usual[numberless(name)]}"
    return None


def numberless(name):
    return re.sub(r"\.\d+\.", ".*.", name)


# ------------------------------------------------------------------------------------- real weights


def load_weights(family, folder, config, device, dtype):
    """The model of a targets.Family with the safetensors of `folder`, strictly: a missing, surplus
    or misshaped tensor is an error that names it."""
    check_weights(folder, config)
    model, info = read_quietly(
        family.model, folder, config=config, dtype=dtype, attn_implementation="block_units",
        key_mapping=family.rename, device_map="auto" if device == "auto" else None,
        use_safetensors=True, local_files_only=True, output_loading_info=True,
        ignore_mismatched_sizes=True, generation_config=GenerationConfig(),  # its own is not read
    )  # fmt: skip
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            first = sorted(info[kind], key=str)[0]
            raise ValueError(
                f"the weights in {folder} do not fit config.json: {kind.replace('_', ' ')}, first "
                f"{first}: correct one"
            )
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    # the library unties them where the files hold both and they differ
    if config.tie_word_embeddings and not torch.equal(head.cpu(), embedding.cpu()):
        raise ValueError(
            f"the weights in {folder} hold an lm_head of their own, but config.json ties it to the "
            "embedding: correct one"
        )
    return gather(model) if device == "auto" else model.to(device)


def read_quietly(model, folder, **options):
    """model.from_pretrained without the library's bars and reports, of which we say what counts."""
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return model.from_pretrained(folder, **options)
    except Exception as error:  # a truncated file, or sizes no model can have
        raise ValueError(unreadable(folder, error)) from None
    finally:
        logging.set_verbosity(verbosity)


def gather(model):
    """`model`, whose layers lie on several devices, with outputs always on the first of them."""
    for module in (model.model.norm, model.lm_head):
        module.register_forward_hook(lambda module, inputs, output: output.to(model.device))
    return model


# ----------------------------------------------------------------------------------- random weights


def random_model(config, device, dtype):
    """The model with random weights, made in `dtype` on `device` at once: N(0, 0.02²), norms 1,
    biases 0."""
    if device == "auto":
        raise ValueError("random weights go on one device: give cpu or cuda:0 as the device")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="block_units"
        )
    model.to_empty(device=device)
    # its buffers are computed, not stored
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
        for name, tensor in model.state_dict().items():
            if tensor.ndim == 1:
                tensor.fill_(float("norm" in name))
    return model
