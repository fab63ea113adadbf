"""Weights of a target: safetensors in the hub's layout, loaded strictly, or random ones.

A checkpoint that is not whole is never filled up or cut to size: the library does so with a
warning, or silently, and the texts would still read well. So names, shapes and dtypes are compared
from the headers of the files, and the library's report of what did not fit becomes an error.

What this file leaves out: which native class it is, its configuration and tokenizer (targets.py);
quantised weights.
"""

import math
import os
import re
import statistics

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.activations import ACT2FN
from transformers.utils import is_accelerate_available, logging

from command import read_json, reason

MOST_LAYERS, MOST = 1000, 1 << 24  # of what config.json counts; no checkpoint comes near
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")  # a cast from other dtypes would not mean the same numbers


# ------------------------------------------------------------------------------- before the loading


def check_device(device):
    """Refuse a device that is not there before anything is read."""
    if device == "auto":
        if not is_accelerate_available():
            raise ValueError("device auto needs accelerate: pip install it, or name one device")
        return
    try:
        if torch.empty(0, device=device).device.type not in ("cpu", "cuda"):
            raise ValueError("only cpu and cuda are known here")
    except Exception as error:  # torch has several for this
        message = f"device {device!r} cannot be used ({reason(error)}): give cpu, cuda:0 or auto"
        raise ValueError(message) from None


def check_sizes(fields, rope):
    """ValueError for native `fields` with which the library would hang, divide by zero, or load a
    model that cannot run."""
    for name, value in fields.items():
        most = MOST_LAYERS if name == "num_hidden_layers" else MOST
        least = 0 if name == "first_k_dense_replace" or type(value) is float else 1
        counts = type(value) in (int, float) and not name.endswith("_id")
        if counts and not least <= value <= most:
            raise ValueError(f"{name} is {value}")
    if fields["hidden_act"] not in ACT2FN:
        raise ValueError(f"hidden_act is {fields['hidden_act']!r}")
    heads = fields["num_attention_heads"]
    if heads % fields["num_key_value_heads"]:
        raise ValueError("num_attention_heads is no multiple of the key-value heads")
    head_dim = fields.get("head_dim", fields["hidden_size"] / heads)
    rotary = head_dim * rope.get("partial_rotary_factor", 1)  # dimensions that RoPE turns, in pairs
    if not 0 < rotary <= head_dim or rotary % 2:
        raise ValueError(f"RoPE turns {rotary} of {head_dim} dimensions")
    if type(rope["rope_theta"]) is bool or not 0 < rope["rope_theta"] < 1e30:
        raise ValueError(f"rope_theta is {rope['rope_theta']}")
    if "n_group" in fields:
        check_experts(fields)


def check_experts(fields):
    """ValueError unless a token can choose its experts: groups of at least 2 (a group is scored by
    its two best), of which some are chosen, and of them the experts."""
    groups, chosen = fields["n_group"], fields["topk_group"]
    each, rest = divmod(fields["n_routed_experts"], groups)
    if rest or each < 2:
        raise ValueError(f"n_group is {groups} for {fields['n_routed_experts']} experts")
    if chosen > groups:
        raise ValueError(f"topk_group is {chosen} of {groups}")
    if fields["num_experts_per_tok"] > chosen * each:
        raise ValueError(f"num_experts_per_tok is {fields['num_experts_per_tok']}")


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
    """Refuse weights that are not whole, from the names of the files and the headers in them.
    Returns how many numbers they hold."""
    lost = missing(folder)
    if lost:
        raise FileNotFoundError(
            f"{folder} lacks {len(lost)} file(s) of weights, first {lost[0]}: fetch the weights "
            "again"
        )
    if os.path.exists(os.path.join(folder, "adapter_config.json")):  # another model, for peft
        message = "merge the adapter into the weights, or remove it"
        raise ValueError(f"{folder} holds an adapter_config.json beside the weights: {message}")
    shapes, dtypes = read_headers(folder)
    odd = odd_dtype(dtypes) or odd_layer(shapes, config) or odd_expert(shapes, config)
    odd = odd or odd_shape(shapes)
    if odd:
        raise ValueError(unfit(folder, odd))
    held, needed = count(shapes), numbers(bare_model(config, torch.float32))
    if needed > 2 * held:  # the library would make room for all of it before it compares
        raise ValueError(unfit(folder, unequal(held, needed)))
    return held


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


def unfit(folder, odd):
    return f"the weights in {folder} do not fit config.json: {odd}: correct one"


def unequal(held, needed):
    return f"the files hold {held} numbers, its model {needed}"


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


def count(shapes):
    """How many numbers tensors {name: shape} hold.

    >>> count({"model.norm.weight": (64,), "lm_head.weight": (97, 64), "scale": ()})
    6273
    """
    return sum(math.prod(shape) for shape in shapes.values())


def numbers(model):
    """How many numbers a model's files hold, a tied head not counted."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return count(shapes)


# ------------------------------------------------------------------------------------- real weights


def load_weights(family, folder, config, device, dtype):
    """The model of a targets.Family with the safetensors of `folder`, strictly: a missing, surplus
    or misshaped tensor is an error that names it."""
    held = check_weights(folder, config)
    model, info = read_quietly(
        family.model, folder, config=config, dtype=dtype, attn_implementation="block_units",
        key_mapping=family.rename, device_map="auto" if device == "auto" else None,
        use_safetensors=True, local_files_only=True, output_loading_info=True,
        ignore_mismatched_sizes=True, generation_config=GenerationConfig(),  # its own is not read
    )  # fmt: skip
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            first = sorted(info[kind], key=str)[0]
            raise ValueError(unfit(folder, f"{kind.replace('_', ' ')}, first {first}"))
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    # the library unties them where the files hold both and they differ
    if config.tie_word_embeddings and not torch.equal(head.cpu(), embedding.cpu()):
        raise ValueError(
            f"the weights in {folder} hold an lm_head of their own, but config.json ties it to the "
            "embedding: correct one"
        )
    # of two tensors for one place the library takes one and names neither
    needed = numbers(model)
    if held not in (needed, needed + head.numel() * config.tie_word_embeddings):
        raise ValueError(unfit(folder, unequal(held, needed)))
    try:
        return gather(model) if device == "auto" else model.to(device)
    except RuntimeError as error:
        raise ValueError(no_room(device, error)) from None


def no_room(device, error):
    return f"the model finds no room on {device} ({reason(error)}): give a smaller model or dtype"


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
    try:
        model = bare_model(config, dtype).to_empty(device=device)
    except RuntimeError as error:
        raise ValueError(no_room(device, error)) from None
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


def bare_model(config, dtype):
    """The model without memory for its numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="block_units"
        )
