"""The six real targets and the embedded one: which native transformers class each is, and loading.

SDAR is a Qwen3 with another mask, LLaDA2.0-mini is a GLM-4-MoE, LLaDA is a Llama without the causal
mask, and Dream is a Qwen2 whose logits are shifted by one: the table FAMILIES says so, so that no
code from the hub is ever run. Every file is checked before it is used, as a target that is not
whole would write plausible nonsense.

What this file leaves out: the files of weights (weights.py); decoding (dlm.py); quantised weights.
"""

import os
import re
from dataclasses import dataclass

import torch
from huggingface_hub import snapshot_download
from transformers import Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM, SarvamMoEConfig

import weights
from command import HERE, content_id, read_json, read_text, reason
from dlm import Target
from full import FullTarget
from weights import check_device

TEXTS = (  # the files that `load` reads, besides the weights
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip


# ------------------------------------------------------------------------------------ what there is


@dataclass(frozen=True)
class Family:
    """One kind of target, as a class that transformers has, run with our attention function."""

    model: type  # the native class
    config: type  # the native configuration
    fields: str  # what it reads from config.json, `native=hub` where the hub's name differs
    known: dict  # what is the same in every checkpoint: for gaps in the files, and random weights
    only: dict  # fields of which the native class computes this value alone, if they are there
    chat: str  # the prompt around a message {}, where the tokenizer brings no template
    attention: str = "block"  # "full": sees the whole canvas (full.py)
    shift: bool = False  # True: the logits at a position speak of the next one
    tokenizer: type = Qwen2Tokenizer
    end: str = ""  # the token that ends a turn, if the eos ids lack it
    rename: dict | None = None  # {pattern in the hub's tensor names: the native one}


SHARED_FIELDS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads hidden_act rms_norm_eps max_position_embeddings tie_word_embeddings "
)
PLAIN = {"use_sliding_window": False, "partial_rotary_factor": 1}
SDAR = Family(  # a Qwen3 that sees both ways inside a block
    model=Qwen3ForCausalLM,
    config=Qwen3Config,
    fields=SHARED_FIELDS + "head_dim attention_bias bos_token_id eos_token_id",
    known=dict(
        vocab_size=151936, num_key_value_heads=8, head_dim=128, hidden_act="silu",
        rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=32768,
        tie_word_embeddings=False, attention_bias=False, bos_token_id=151643, eos_token_id=151643,
        mask_token_id=151669, stop_token_ids=[151645, 151643],
    ),
    only=PLAIN,
    chat="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    end="<|im_end|>",
)  # fmt: skip
# a GLM-4-MoE that sees like SDAR, named SarvamMoE where a checkpoint's tensors are called as here
LLADA2 = Family(
    model=Glm4MoeForCausalLM,
    config=SarvamMoEConfig,
    fields=SHARED_FIELDS + "head_dim attention_bias=use_qkv_bias use_qk_norm "
    "n_routed_experts=num_experts n_shared_experts=num_shared_experts num_experts_per_tok "
    "moe_intermediate_size first_k_dense_replace n_group topk_group norm_topk_prob "
    "routed_scaling_factor",
    known=dict(
        vocab_size=157184, hidden_size=2048, intermediate_size=5120, num_hidden_layers=20,
        num_attention_heads=16, num_key_value_heads=4, head_dim=128, hidden_act="silu",
        rms_norm_eps=1e-6, rope_theta=600000, partial_rotary_factor=0.5,
        max_position_embeddings=32768, tie_word_embeddings=False, use_qkv_bias=False,
        use_qk_norm=True, num_experts=256, num_shared_experts=1, num_experts_per_tok=8,
        moe_intermediate_size=512, first_k_dense_replace=1, n_group=8, topk_group=4,
        norm_topk_prob=True, routed_scaling_factor=2.5, block_size=32, mask_token_id=156895,
        stop_token_ids=[156892],
    ),
    only=dict(
        score_function="sigmoid", moe_router_enable_expert_bias=True, use_rmsnorm=True,
        use_bias=False, norm_head=False, use_sliding_window=False,
    ),
    chat="<role>SYSTEM</role>detailed thinking off<|role_end|>"
    "<role>HUMAN</role>{}<|role_end|><role>ASSISTANT</role>",
    tokenizer=PreTrainedTokenizerFast,
)  # fmt: skip
LLADA = Family(  # a Llama without the causal mask
    model=LlamaForCausalLM,
    config=LlamaConfig,
    fields="vocab_size=embedding_size hidden_size=d_model intermediate_size=mlp_hidden_size "
    "num_hidden_layers=n_layers num_attention_heads=n_heads num_key_value_heads=n_kv_heads "
    "hidden_act=activation_type rms_norm_eps max_position_embeddings=max_sequence_length "
    "tie_word_embeddings=weight_tying attention_bias=include_qkv_bias",
    known=dict(
        embedding_size=126464, d_model=4096, mlp_hidden_size=12288, n_layers=32, n_heads=32,
        n_kv_heads=32, activation_type="silu", rms_norm_eps=1e-5, max_sequence_length=4096,
        weight_tying=False, rope_theta=5e5, include_qkv_bias=False, block_size=32,
        mask_token_id=126336, stop_token_ids=[126081, 126348],
    ),
    only=dict(
        rope=True, layer_norm_type="rms", block_type="llama", alibi=False, include_bias=False,
        scale_logits=False, input_emb_norm=False, attention_layer_norm=False,
        multi_query_attention=False, clip_qkv=None,
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
    fields=SHARED_FIELDS,
    known=dict(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=28, num_key_value_heads=4, hidden_act="silu", rms_norm_eps=1e-6,
        rope_theta=1e6, max_position_embeddings=131072, tie_word_embeddings=False, block_size=32,
        mask_token_id=151666, stop_token_ids=[151645, 151643],
    ),
    only=PLAIN,
    chat="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    attention="full",
    shift=True,
    end="<|im_end|>",
)  # fmt: skip
FAMILIES = {  # by config.json's model_type; qwen3: the embedded target and what pretrain.py writes
    "sdar": SDAR, "qwen3": SDAR, "llada2_moe": LLADA2, "llada": LLADA, "Dream": DREAM,
}  # fmt: skip
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


# ------------------------------------------------------------------------------------------ loading


def load(name, device="cpu", dtype=torch.float32, block_size=None, random_weights=False):
    """A Target from an alias, a hub id or a folder in the hub's layout (config.json, safetensors,
    tokenizer files).

    device: "cpu", "cuda", "cuda:1" or "auto" (the layers spread over all GPUs, which needs
    accelerate). block_size: L, where neither config.json nor the hub's name (-b16) says it.
    random_weights: a model of the right size at once and without a download, to measure time and
    memory; its texts mean nothing. Raises ValueError or FileNotFoundError with one sentence if the
    name is unknown, the hub cannot be reached, a file is missing or broken, or weights and
    configuration contradict each other.
    """
    check_device(device)
    name = str(name)  # a path serves too
    folder = None if random_weights and name in HUB else find_folder(name)
    path, raw = known_config(name) if folder is None else read_folder(folder)
    family = family_of(path, raw)
    config = native_config(path, raw, family)
    tokenizer = load_tokenizer(folder, family) if folder else None
    hub = HUB.get(name, [name])[0]
    size = choose_block_size(path, raw, hub, block_size, random_weights)
    mask_id, stop_ids = read_ids(path, raw, family, tokenizer, config.vocab_size)
    if random_weights:
        model = weights.random_model(config, device, dtype)
    else:
        model = weights.load_weights(family, folder, config, device, dtype)
    if family is LLADA2 and dtype == torch.float64:  # the grouped product of experts knows none
        model.set_experts_implementation("eager")
    if family.attention == "full":
        target = FullTarget(model, tokenizer, size, mask_id, stop_ids, shift=family.shift)
    else:
        target = Target(model, tokenizer, size, mask_id, stop_ids)
    # the embedded target was trained without [MASK] in its softmax
    target.whole_softmax = raw["model_type"] != "qwen3"
    if tokenizer is not None:  # some number their tokens with gaps
        target.n_ids = 1 + max(tokenizer.get_vocab().values())
    return target


def identity(name, random_weights=False):
    """Hex digits that stand for what `load` reads of a target: configuration, tokenizer, weights.

    A target from the table alone has none of these; the code's own id stands for it.
    """
    name = str(name)
    if random_weights and name in HUB:
        return content_id()
    folder = find_folder(name)
    names = TEXTS if random_weights else (*TEXTS, weights.INDEX, *weights.weight_files(folder))
    return content_id(*(os.path.join(folder, name) for name in names))


def is_embedded(name):
    """True for the embedded target and for others that were trained from scratch here."""
    path = os.path.join(EMBEDDED if name == "embedded" else name, "config.json")
    return os.path.isfile(path) and read_json(path).get("model_type") == "qwen3"


# ------------------------------------------------------------------------------ finding its folder


def check_name(name):
    """Refuse a name that is neither an alias nor a checkpoint's folder nor like a hub id."""
    folder, hub = EMBEDDED if name == "embedded" else name, HUB.get(name, [name])[0]
    if os.path.isfile(os.path.join(folder, "config.json")):
        return
    if os.path.isdir(folder) or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", hub):
        known = ", ".join(["embedded", *HUB])
        raise FileNotFoundError(
            f"no model {name!r}: give a folder with a config.json, a hub id, or one of {known}"
        )


def find_folder(name):
    """The folder of a checkpoint: `name` itself, the embedded one, or a hub repository's copy."""
    folder = EMBEDDED if name == "embedded" else name
    if os.path.isfile(os.path.join(folder, "config.json")):
        return folder
    check_name(name)
    hub = HUB.get(name, [name])[0]
    files = ["*.json", "*.safetensors", "*.txt", "*.jinja"]  # no code, no pickles
    try:
        folder = snapshot_download(hub, allow_patterns=files, local_files_only=True)
        # whole, so the network is not asked
        if os.path.isfile(os.path.join(folder, "config.json")) and not weights.missing(folder):
            return folder
    except Exception:  # not there, or not whole
        pass
    try:
        return snapshot_download(hub, allow_patterns=files)
    except Exception as error:  # no network, no such repository, no access, no room
        raise FileNotFoundError(
            f"cannot fetch {hub} from the hub ({reason(error)}): check the name and the network, "
            "or give a folder"
        ) from None


# ------------------------------------------------------------------------------- its configuration


def read_folder(folder):
    """(path of the folder's config.json, its fields)."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{folder} holds no config.json: fetch the model again")
    for name in (*TEXTS, weights.INDEX):  # a link whose file is gone would pass for no file
        link = os.path.join(folder, name)
        if os.path.islink(link) and not os.path.exists(link):
            raise FileNotFoundError(f"{link} is a link to nothing: fetch the model again")
    return path, read_json(path)


def known_config(alias):
    """What read_folder would give for an alias, from the table."""
    _, model_type, sizes = HUB[alias]
    fields = FAMILIES[model_type].known | dict(zip(SIZES, sizes))
    return "the table in targets.py", {"model_type": model_type} | fields


def family_of(path, raw):
    """The Family of a config.json's fields. ValueError for any other kind of model."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"{path} is of model_type {kind!r}: give a target of one of {known}")
    if raw.get("quantization_config"):
        message = "quantised weights cannot be read here: give the model in bfloat16"
        raise ValueError(f"{path} holds a quantization_config, but {message}")
    return FAMILIES[kind]


def native_config(path, raw, family):
    """The native configuration of a config.json's fields; all that shape the model must be there.

    ValueError for one that is missing, of a wrong type, or of a size that no model has.
    """
    try:
        rope = rope_of(raw, family)
        names = [field.split("=") for field in family.fields.split()]
        fields = {name[0]: raw[name[-1]] for name in names}
        weights.check_sizes(fields, rope)
        for name, right in family.only.items():
            if raw.get(name) not in (None, right):
                raise ValueError(f"{name} is {raw[name]!r}: only {right!r} is computed here")
        return family.config(**fields, rope_parameters=rope, pad_token_id=None)
    except Exception as error:  # whatever a broken file makes the library raise
        message = f"{path} is not a usable configuration ({reason(error)}): fetch it again"
        raise ValueError(message) from None


def rope_of(raw, family):
    """The rotary embedding's parameters, in the library's words, from either form of a config."""
    if raw.get("rope_scaling"):
        raise ValueError("rope_scaling is not supported")
    rope = raw.get("rope_parameters") or {"rope_type": "default", "rope_theta": raw["rope_theta"]}
    if rope["rope_type"] != "default":
        raise ValueError(f"rope_type {rope['rope_type']} is not supported")
    if raw.get("partial_rotary_factor") is not None:
        rope = rope | {"partial_rotary_factor": raw["partial_rotary_factor"]}
    if "partial_rotary_factor" in family.known and "partial_rotary_factor" not in rope:
        raise ValueError("partial_rotary_factor is missing")  # without it RoPE would turn all
    return rope


def choose_block_size(path, raw, name, asked, random_weights):
    """L: as asked for, as in the name of SDAR's hub repositories (…-b16), as in config.json, or the
    family's; what is asked for must not contradict the two others."""
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ValueError(f"block size {asked!r} is not usable: give a whole number from 1 on")
    named = raw.get("block_size")
    if named is not None and (type(named) is not int or named < 1):
        raise ValueError(f"{path} names no usable block_size: correct it")
    suffix = re.search(r"SDAR-.+-b(\d+)$", name.rstrip(os.sep))
    said = int(suffix[1]) if suffix else named  # siblings may share a config.json, not a name
    if asked and said and asked != said and not random_weights:
        message = f"block size {asked} is not that of {name}, {said}"
        raise ValueError(f"{message}: give {said}, or another model")
    size = asked or said or FAMILIES[raw["model_type"]].known.get("block_size")
    if size is None:
        raise ValueError(f"{path} names no block_size: add it, or give the block size")
    return size


def read_ids(path, raw, family, tokenizer, vocab_size):
    """(id of the mask, set of stop ids): from config.json, generation_config.json and the
    tokenizer, in this order, and from the table where none of them says it."""
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    pattern = r"(?i)<\|?(mdm_)?mask\|?>"
    masks = [vocabulary[token] for token in vocabulary if re.fullmatch(pattern, token)]
    said = [raw.get("mask_token_id"), *masks, family.known["mask_token_id"]]
    mask_id = [i for i in said if i is not None][0]
    if masks and mask_id not in masks:
        said = f"{path} says mask_token_id {mask_id}, but the tokenizer's mask token"
        raise ValueError(f"{said} has id {masks[0]}: correct one")
    folder = os.path.dirname(path)  # "" for the table
    generation = os.path.join(folder, "generation_config.json")
    generation = read_json(generation) if folder and os.path.exists(generation) else {}
    said = [raw.get("stop_token_ids"), generation.get("eos_token_id"), raw.get("eos_token_id"),
            raw.get("pad_token_id"), family.known["stop_token_ids"]]  # fmt: skip
    stops = [ids for ids in said if ids is not None][0]
    stops = list(stops) if isinstance(stops, list) else [stops]
    # the turn's end stops too, which some files name nowhere
    stops += [vocabulary[family.end]] if family.end in vocabulary else []
    usable = all(type(i) is int and 0 <= i < vocab_size for i in [mask_id, *stops])
    if not stops or not usable or mask_id in stops:
        raise ValueError(
            f"{path} needs a mask_token_id and stop ids that differ and lie under {vocab_size}: "
            "correct it"
        )
    return mask_id, set(stops)


# ------------------------------------------------------------------------------------ its tokenizer


def load_tokenizer(folder, family):
    """The tokenizer in `folder`, or None if there is none; tried on one chat so that a broken file
    or template shows now, as a ValueError."""
    names = ("tokenizer.json", "vocab.json")
    if not any(os.path.exists(os.path.join(folder, name)) for name in names):
        return None
    try:
        tokenizer = family.tokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if isinstance(tokenizer.chat_template, str):  # a byte-order mark would lead every prompt
            tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
        if not tokenizer.chat_template:
            before, after = family.chat.split("{}")
            tokenizer.chat_template = f"{{{{ {before!r} + messages[0].content + {after!r} }}}}"
        message = [{"role": "user", "content": "?"}]
        chat = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        if "?" not in chat:
            raise ValueError("the chat template drops the message")
        check_added_tokens(folder, tokenizer)
        check_merges(folder, tokenizer)
        return tokenizer
    except Exception as error:  # whatever a broken file makes the libraries raise
        message = f"the tokenizer in {folder} cannot be used ({reason(error)}): fetch it again"
        raise ValueError(message) from None


def check_added_tokens(folder, tokenizer):
    """Compare the ids of the added tokens with tokenizer_config.json: the library counts them on
    from the vocabulary, so that a vocabulary which is not whole would shift them."""
    path = os.path.join(folder, "tokenizer_config.json")
    named = read_json(path).get("added_tokens_decoder", {}) if os.path.exists(path) else {}
    for number, token in named.items():
        got = tokenizer.convert_tokens_to_ids(token["content"])
        if got != int(number):
            raise ValueError(f"token {token['content']} has id {got}, not {number}")


def check_merges(folder, tokenizer):
    """Find a merge for every word of several characters: where merges.txt is cut off the library
    leaves such words in pieces, and every prompt would be read in other tokens."""
    path = os.path.join(folder, "merges.txt")
    # tokenizer.json holds merges of its own
    if not os.path.exists(path) or os.path.exists(os.path.join(folder, "tokenizer.json")):
        return
    made = {line.replace(" ", "") for line in read_text(path).split("\n")}
    made |= set(tokenizer.get_added_vocab())
    for word in tokenizer.get_vocab():
        if len(word) > 1 and word not in made:
            raise ValueError(f"merges.txt makes no {word!r}")
