"""The six real targets and the embedded one: which native transformers class each is, and loading them, strictly.

SDAR is a Qwen3 with another mask, LLaDA2.0-mini is a GLM-4-MoE, LLaDA is a Llama without the causal mask, and Dream is
a Qwen2 whose logits are shifted by one: the table FAMILIES says so, so that no code from the hub is ever run. Every
file is checked before it is used, as a target that is not whole would write plausible nonsense.

What this file leaves out: quantised weights; decoding (dlm.py).
"""

import json
import os
import re
import statistics
from dataclasses import dataclass

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, SarvamMoEConfig
from transformers.utils import is_accelerate_available, logging

from dlm import Target
from full import FullTarget

HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True)
class Family:
    """One kind of target, as a class that transformers has, run with our attention function.

    model, config: the native classes; fields: what the configuration reads from config.json (`native=hub` where the
    hub's name differs); attention, shift: see Target; known: fields that are the same in every checkpoint of the kind,
    for what its files leave out and for random weights; end: the token that ends a turn, if its eos ids lack it; chat:
    the prompt around a message {}, where the tokenizer brings no template; rename: hub tensor names to native ones.
    """

    model: type
    config: type
    fields: str
    known: dict
    chat: str
    attention: str = "block"
    shift: bool = False
    tokenizer: type = Qwen2Tokenizer
    end: str = ""
    rename: dict | None = None


SHARED_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "rms_norm_eps max_position_embeddings tie_word_embeddings "
)
SDAR = Family(  # a Qwen3 that sees both ways inside a block
    model=Qwen3ForCausalLM,
    config=Qwen3Config,
    fields=SHARED_FIELDS + "head_dim attention_bias bos_token_id eos_token_id",
    known=dict(
        vocab_size=151936, num_key_value_heads=8, head_dim=128, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6,
        max_position_embeddings=32768, tie_word_embeddings=False, attention_bias=False, bos_token_id=151643,
        eos_token_id=151643, mask_token_id=151669, stop_token_ids=[151645, 151643],
    ),
    chat="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    end="<|im_end|>",
)  # fmt: skip
LLADA2 = Family(  # a GLM-4-MoE, named SarvamMoE where a checkpoint's tensors are called as here; sees like SDAR
    model=Glm4MoeForCausalLM,
    config=SarvamMoEConfig,
    fields=SHARED_FIELDS + "head_dim attention_bias=use_qkv_bias use_qk_norm n_routed_experts=num_experts "
    "n_shared_experts=num_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group "
    "topk_group norm_topk_prob routed_scaling_factor",
    known=dict(
        vocab_size=157184, hidden_size=2048, intermediate_size=5120, num_hidden_layers=20, num_attention_heads=16,
        num_key_value_heads=4, head_dim=128, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=600000,
        partial_rotary_factor=0.5, max_position_embeddings=32768, tie_word_embeddings=False, use_qkv_bias=False,
        use_qk_norm=True, num_experts=256, num_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=512,
        first_k_dense_replace=1, n_group=8, topk_group=4, norm_topk_prob=True, routed_scaling_factor=2.5,
        block_size=32, mask_token_id=156895, stop_token_ids=[156892],
    ),
    chat="<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>{}<|role_end|><role>ASSISTANT</role>",
    tokenizer=PreTrainedTokenizerFast,
)  # fmt: skip
LLADA = Family(  # a Llama without the causal mask
    model=LlamaForCausalLM,
    config=LlamaConfig,
    fields="vocab_size=embedding_size hidden_size=d_model intermediate_size=mlp_hidden_size num_hidden_layers=n_layers "
    "num_attention_heads=n_heads num_key_value_heads=n_kv_heads hidden_act=activation_type rms_norm_eps "
    "max_position_embeddings=max_sequence_length tie_word_embeddings=weight_tying attention_bias=include_qkv_bias",
    known=dict(
        embedding_size=126464, d_model=4096, mlp_hidden_size=12288, n_layers=32, n_heads=32, n_kv_heads=32,
        activation_type="silu", rms_norm_eps=1e-5, max_sequence_length=4096, weight_tying=False, rope_theta=5e5,
        include_qkv_bias=False, block_size=32, mask_token_id=126336, stop_token_ids=[126081, 126348],
    ),
    chat="<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    attention="full",
    tokenizer=PreTrainedTokenizerFast,
    end="<|eot_id|>",
    rename={  # in this order: the block's ff_out is not the top one
        r"^model\.transformer\.ff_out": "lm_head",
        r"^model\.transformer\.wte": "model.embed_tokens",
        r"^model\.transformer\.ln_f": "model.norm",
        r"^model\.transformer\.blocks": "model.layers",
        r"\.([qkv]_proj)": r".self_attn.\1",
        r"\.attn_out": ".self_attn.o_proj",
        r"\.ff_proj": ".mlp.gate_proj",
        r"\.up_proj": ".mlp.up_proj",
        r"\.ff_out": ".mlp.down_proj",
        r"\.attn_norm": ".input_layernorm",
        r"\.ff_norm": ".post_attention_layernorm",
    },
)  # fmt: skip
DREAM = Family(  # a Qwen2 without the causal mask, which still predicts the next position
    model=Qwen2ForCausalLM,
    config=Qwen2Config,
    fields=SHARED_FIELDS.strip(),
    known=dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=131072,
        tie_word_embeddings=False, block_size=32, mask_token_id=151666, stop_token_ids=[151645, 151643],
    ),
    chat="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    attention="full",
    shift=True,
    end="<|im_end|>",
)  # fmt: skip
FAMILIES = {"sdar": SDAR, "qwen3": SDAR, "llada2_moe": LLADA2, "llada": LLADA, "Dream": DREAM}  # by model_type
EMBEDDED = os.path.join(HERE, "checkpoints", "target")
HUB = {  # alias: (hub id, model_type, sizes in which the checkpoints of a family differ)
    "sdar-8b": ("JetLM/SDAR-8B-Chat-b32", "sdar", (4096, 12288, 36, 32)),
    "sdar-4b": ("JetLM/SDAR-4B-Chat-b32", "sdar", (2560, 9728, 36, 32)),
    "sdar-1.7b": ("JetLM/SDAR-1.7B-Chat-b32", "sdar", (2048, 6144, 28, 16)),
    "llada2.0-mini": ("inclusionAI/LLaDA2.0-mini", "llada2_moe", ()),
    "llada-8b": ("GSAI-ML/LLaDA-8B-Instruct", "llada", ()),
    "dream-7b": ("Dream-org/Dream-v0-Instruct-7B", "Dream", ()),
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def load(name, device="cpu", dtype=torch.float32, block_size=None, random_weights=False):
    """A Target from an alias, a hub id or a folder in the hub's layout (config.json, safetensors, tokenizer files).

    device: "cpu", "cuda", "cuda:1" or "auto" (the layers spread over all GPUs, which needs accelerate). block_size: L,
    where neither config.json nor the hub's name (-b16) says it. random_weights: a model of the right size at once and
    without a download, to measure time and memory; its texts mean nothing. Raises ValueError or FileNotFoundError with
    one sentence if the name is unknown, the hub cannot be reached, a file is missing or broken, or a tensor is missing,
    surplus or of the wrong shape.
    """
    check_device(device)
    path, raw = known_config(name) if random_weights and name in HUB else read_folder(find_folder(name))
    folder, model_type = os.path.dirname(path), raw.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"{path} is of model_type {model_type!r}: give a target of one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    config = native_config(path, raw, family)
    tokenizer = load_tokenizer(folder, family)
    size = choose_block_size(path, raw, HUB.get(name, [name])[0], block_size, random_weights)
    mask_id, stop_ids = read_ids(path, raw, family, tokenizer, config.vocab_size)
    make = random_model if random_weights else load_weights
    model = make(family, folder, config, device, dtype)
    if family is LLADA2 and dtype == torch.float64:  # the grouped product of experts knows no float64
        model.set_experts_implementation("eager")
    ids = (model, tokenizer, size, mask_id, stop_ids)
    target = FullTarget(*ids, family.shift) if family.attention == "full" else Target(*ids)
    target.whole_softmax = model_type != "qwen3"  # the embedded target was trained without [MASK] in it
    if tokenizer is not None:  # some number their tokens with gaps
        target.n_ids = 1 + max(tokenizer.get_vocab().values())
    return target


def is_embedded(name):
    """True for the embedded target and for others that train.py target wrote."""
    path = os.path.join(EMBEDDED if name == "embedded" else name, "config.json")
    return os.path.isfile(path) and read_json(path).get("model_type") == "qwen3"


def check_device(device):
    """Refuse a device that is not there before anything is read."""
    if device == "auto":
        if not is_accelerate_available():
            raise ValueError("device auto needs the package accelerate: pip install accelerate, or name one device")
        return
    try:
        if torch.empty(0, device=device).device.type not in ("cpu", "cuda"):
            raise ValueError("only cpu and cuda are known here")
    except Exception as error:  # torch has several for this
        raise ValueError(f"device {device!r} cannot be used ({one_line(error)}): give cpu, cuda:0 or auto") from None


def one_line(error):
    """What was raised as one short line, for the sentences that are shown."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def check_name(name):
    """Refuse a name that is neither an alias nor a checkpoint's folder nor like a hub id."""
    folder, hub = EMBEDDED if name == "embedded" else name, HUB.get(name, [name])[0]
    if os.path.isfile(os.path.join(folder, "config.json")):
        return
    if os.path.isdir(folder) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", hub):
        raise FileNotFoundError(
            f"no model {name!r}: give a folder with a config.json, a hub id, or one of {', '.join(['embedded', *HUB])}"
        )


def find_folder(name):
    """The folder of a checkpoint: `name` itself, the embedded one, or the local copy of a hub repository."""
    folder = EMBEDDED if name == "embedded" else name
    if os.path.isfile(os.path.join(folder, "config.json")):
        return folder
    check_name(name)
    hub = HUB.get(name, [name])[0]
    files = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # no code, no pickles
    try:
        folder = snapshot_download(hub, allow_patterns=files, local_files_only=True)
        if os.path.isfile(os.path.join(folder, "config.json")) and not missing_weights(folder):
            return folder  # whole, so the network is not asked
    except Exception:  # not there, or not whole
        pass
    try:
        return snapshot_download(hub, allow_patterns=files)
    except Exception as error:  # no network, no such repository, no access, no room
        raise FileNotFoundError(
            f"cannot fetch {hub} from the hub ({one_line(error)}): check the name and the network, or give a folder"
        ) from None


def read_folder(folder):
    """(path of the folder's config.json, its fields)."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{folder} holds no config.json: fetch the model again")
    return path, read_json(path)


def read_json(path):
    """The object in a JSON file, as a dict."""
    try:
        with open(path) as file:
            raw = json.load(file)
        if not isinstance(raw, dict):
            raise TypeError("it holds no object")
        return raw
    except Exception as error:  # whatever a broken file makes the library raise
        raise ValueError(f"{path} is not a usable configuration ({one_line(error)}): fetch it again") from None


def known_config(alias):
    """What read_folder would give for an alias, from the table."""
    _, model_type, sizes = HUB[alias]
    return "the table in targets.py", {"model_type": model_type} | FAMILIES[model_type].known | dict(zip(SIZES, sizes))


def native_config(path, raw, family):
    """The native configuration of a config.json's fields; every field that shapes the model must be there."""
    try:
        if raw.get("rope_scaling"):
            raise ValueError("rope_scaling is not supported")
        rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw["rope_theta"]}
        if "partial_rotary_factor" in raw:
            rope = rope | {"partial_rotary_factor": raw["partial_rotary_factor"]}
        names = (field.split("=") for field in family.fields.split())
        return family.config(**{name[0]: raw[name[-1]] for name in names}, rope_parameters=rope, pad_token_id=None)
    except Exception as error:  # whatever a broken file makes the library raise
        raise ValueError(f"{path} is not a usable configuration ({one_line(error)}): fetch it again") from None


def choose_block_size(path, raw, name, asked, random_weights):
    """L: as asked for, as in the name of SDAR's hub repositories (…-b16), as in config.json, or the family's; what is
    asked for must not contradict the two others."""
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ValueError(f"block size {asked!r} is not usable: give a whole number of at least 1")
    suffix, named = re.search(r"SDAR-.+-b(\d+)$", name.rstrip(os.sep)), raw.get("block_size")
    if named is not None and (type(named) is not int or named < 1):
        raise ValueError(f"{path} names no usable block_size: correct it")
    said = int(suffix[1]) if suffix else named  # siblings may share a config.json, not a name
    if asked and said and asked != said and not random_weights:
        raise ValueError(f"block size {asked} is not that of {name}, {said}: give {said}, or another model")
    size = asked or said or FAMILIES[raw["model_type"]].known.get("block_size")
    if size is None:
        raise ValueError(f"{path} names no block_size: add it, or give the block size")
    return size


def read_ids(path, raw, family, tokenizer, vocab_size):
    """(id of the mask, set of stop ids): from config.json, generation_config.json and the tokenizer, in this order,
    and from the table where none of them says it."""
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    generation = os.path.join(os.path.dirname(path), "generation_config.json")
    generation = read_json(generation) if os.path.isfile(generation) else {}
    masks = [vocabulary[token] for token in vocabulary if re.fullmatch(r"(?i)<\|?(mdm_)?mask\|?>", token)]
    mask_id = next((i for i in [raw.get("mask_token_id"), *masks] if i is not None), family.known["mask_token_id"])
    said = (raw.get("stop_token_ids"), generation.get("eos_token_id"), raw.get("eos_token_id"), raw.get("pad_token_id"))
    stops = next((ids for ids in said if ids is not None), family.known["stop_token_ids"])
    stops = set(stops if isinstance(stops, list) else [stops])
    stops |= {vocabulary[family.end]} if family.end in vocabulary else set()
    ids = {mask_id} | stops
    if not stops or mask_id in stops or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise ValueError(
            f"{path} needs a mask_token_id and stop ids that differ and lie under {vocab_size}: correct it"
        )
    return mask_id, stops


def load_tokenizer(folder, family):
    """The tokenizer in `folder`, or None if there is none; tried on one chat so that a broken file or template shows
    now, as a ValueError."""
    if not any(os.path.exists(os.path.join(folder, file)) for file in ("tokenizer.json", "vocab.json")):
        return None
    try:
        tokenizer = family.tokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not tokenizer.chat_template:
            before, after = family.chat.split("{}")
            tokenizer.chat_template = f"{{{{ {before!r} + messages[0].content + {after!r} }}}}"
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "?"}], add_generation_prompt=True, tokenize=False
        )
        assert "?" in chat, "the chat template drops the message"
        check_added_tokens(folder, tokenizer)
        return tokenizer
    except Exception as error:  # whatever a broken file makes the libraries raise
        raise ValueError(
            f"the tokenizer in {folder} cannot be used ({one_line(error)}): fetch its files again"
        ) from None


def check_added_tokens(folder, tokenizer):
    """Compare the ids of the added tokens with tokenizer_config.json: the library counts them on from the vocabulary,
    so that a vocabulary which is not whole would shift them."""
    path = os.path.join(folder, "tokenizer_config.json")
    named = read_json(path).get("added_tokens_decoder", {}) if os.path.isfile(path) else {}
    for number, token in named.items():
        got = tokenizer.convert_tokens_to_ids(token["content"])
        assert got == int(number), f"token {token['content']} has id {got}, not {number}"


def missing_weights(folder):
    """Names of the safetensors files that `folder` should hold and does not."""
    index = os.path.join(folder, "model.safetensors.index.json")
    names = {"model.safetensors"}
    if os.path.isfile(index):
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"{index} names no weight_map: fetch it again")
        names = set(map(str, shards.values()))
    return sorted(name for name in names if not os.path.isfile(os.path.join(folder, name)))


def read_shapes(folder):
    """{name: shape} of all tensors in the safetensors of `folder`, from their headers."""
    shapes = {}
    try:
        for file in sorted(file for file in os.listdir(folder) if file.endswith(".safetensors")):
            with safe_open(os.path.join(folder, file), "pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    except Exception as error:  # a truncated file
        raise ValueError(f"the weights in {folder} cannot be read ({one_line(error)}): fetch them again") from None
    return shapes


def odd_tensor(shapes, config):
    """What the library would pass over, or not name, among tensors {name: shape}; or None if all is well: a layer or
    an expert too many, an expert that is missing, a shape unlike that of the same tensor in the other layers."""
    alike, experts = {}, {}  # by the name without numbers: all shapes; by the name without the expert: all experts
    for name, shape in shapes.items():
        layer, expert = (re.search(rf"\.{part}\.(\d+)\.", name) for part in ("(?:layers|blocks)", "experts"))
        if layer and int(layer[1]) >= config.num_hidden_layers:
            return f"surplus tensor {name}"
        if expert:
            experts.setdefault(name.replace(expert[0], ".experts.{}."), set()).add(int(expert[1]))
        alike.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(shape)
    right = set(range(getattr(config, "n_routed_experts", 0)))
    for name, found in experts.items():
        if found != right:
            kind = "missing" if right - found else "surplus"
            return f"{kind} tensor {name.format(min(right ^ found))}"
    usual = {name: statistics.mode(many) for name, many in alike.items()}
    for name, shape in shapes.items():
        expected = usual[re.sub(r"\.\d+\.", ".*.", name)]
        if shape != expected:
            return f"tensor {name} has shape {shape}, elsewhere {expected}"
    return None


def check_weights(folder, config):
    """Refuse weights that are not whole, from the names of the files and the headers in them."""
    missing = missing_weights(folder)
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} file(s) of weights, first {missing[0]}: fetch the weights again"
        )
    odd = odd_tensor(read_shapes(folder), config)
    if odd:
        raise ValueError(f"the weights in {folder} do not fit config.json: {odd}: correct one")


def load_weights(family, folder, config, device, dtype):
    """The model with the safetensors of `folder`, strictly: a missing, surplus or misshaped tensor is an error that
    names it."""
    logging.disable_progress_bar()
    check_weights(folder, config)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # the library's report of many lines, of which we say the first
    try:
        model, info = family.model.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="block_units",
            key_mapping=family.rename,
            device_map="auto" if device == "auto" else None,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # a truncated file, or sizes no model can have
        raise ValueError(f"the weights in {folder} cannot be read ({one_line(error)}): fetch them again") from None
    finally:
        logging.set_verbosity(verbosity)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            first = sorted(info[kind], key=str)[0]
            raise ValueError(
                f"the weights in {folder} do not fit config.json: {kind.replace('_', ' ')}, first {first}: correct one"
            )
    return gather(model) if device == "auto" else model.to(device)


def gather(model):
    """`model`, whose layers lie on several devices, with what it gives out always on the first of them."""
    for module in (model.model.norm, model.lm_head):
        module.register_forward_hook(lambda module, inputs, output: output.to(model.device))
    return model


def random_model(family, folder, config, device, dtype):
    """The model with random weights, made in `dtype` on `device` at once: N(0, 0.02²), norms 1, biases 0."""
    if device == "auto":
        raise ValueError("random weights go on one device: give cpu or cuda:0 as the device")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="block_units")
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # its buffers are computed, not stored
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.02)
        for name, tensor in model.state_dict().items():
            if tensor.ndim == 1:
                tensor.fill_(float("norm" in name))
    return model
