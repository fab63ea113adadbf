"""Tests of loading targets: the table's facts, ids, block sizes, tokenizers, weights, the hub.

Covered: what the table says of the six real targets, literally; what comes from a checkpoint's
files and what from the table; prompts; random weights; the hub's cache; files that are lost,
broken, too many, or contradict each other, each refused in one sentence; what identifies a target.

Left out: what loaded targets compute and write (test_targets.py). Nothing is downloaded.

    python -m pytest test_loading.py          # under a minute on one core
"""

import json
import os
import shutil
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dlm
import targets
import weights
from decoder import Decoder

CHECKPOINTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints")
TOKENIZER = os.path.join(CHECKPOINTS, "golden-sdar-tokenizer")
FAMILIES = ("sdar", "llada2", "llada", "dream")
L = 8  # block size of the golden checkpoints


# ----------------------------------------------------------------------------------------- helpers


def golden(family, dtype=torch.float32):
    return targets.load(os.path.join(CHECKPOINTS, f"golden-{family}"), dtype=dtype, block_size=L)


def copy(family, folder):
    """A golden checkpoint (or the embedded target) copied to `folder`, to be changed there."""
    source = "target" if family == "embedded" else f"golden-{family}"
    left = shutil.ignore_patterns("expected*")
    shutil.copytree(os.path.join(CHECKPOINTS, source), folder, ignore=left)
    return str(folder)


def write(folder, file, content):
    """Writes a file in `folder`: bytes as they are, anything else as JSON."""
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    with open(os.path.join(folder, file), "wb") as opened:
        opened.write(content)


def read(folder, file):
    with open(os.path.join(folder, file), "rb") as opened:
        return opened.read()


def edit_config(folder, **fields):
    """config.json gets `fields`; None removes one."""
    new = json.loads(read(folder, "config.json")) | fields
    write(folder, "config.json", {key: value for key, value in new.items() if value is not None})


def edit_weights(folder, change):
    """Rewrites model.safetensors with its dict of tensors changed by `change`."""
    path = os.path.join(folder, "model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def remove(folder, file="model.safetensors"):
    os.remove(os.path.join(folder, file))


def truncate(folder, file="model.safetensors", by=1000):
    path = os.path.join(folder, file)
    os.truncate(path, os.path.getsize(path) - by)


SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def shards(folder):
    """Splits the weights of `folder` in two files with an index, as on the hub."""
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    names, places = sorted(tensors), {}
    for i, file in enumerate(SHARDS):
        half = {name: tensors[name] for name in names[i::2]}
        save_file(half, os.path.join(folder, file), metadata={"format": "pt"})
        places |= dict.fromkeys(half, file)
    write(folder, INDEX, {"metadata": {}, "weight_map": places})
    remove(folder)


def one_sentence(error):
    """The message of a raised error is one line of plain words that says what to do."""
    text = str(error.value)
    return "\n" not in text and 20 < len(text) < 500 and ": " in text


def refused(*arguments, named="", **options):
    """`targets.load` must refuse with one sentence in which the pattern `named` is found."""
    with pytest.raises((ValueError, FileNotFoundError), match=named) as error:
        targets.load(*arguments, **options)
    assert one_sentence(error)


# ------------------------------------------------------------------------------ what the table says


FACTS = {  # as published; hidden, inter, layers, heads, key-value heads, head_dim
    "sdar-8b": dict(
        hub="JetLM/SDAR-8B-Chat-b32", sizes=(4096, 12288, 36, 32, 8, 128), vocabulary=151936,
        theta=1e6, eps=1e-6, mask=151669, stops={151645, 151643}, GB=16.4,
    ),
    "sdar-4b": dict(
        hub="JetLM/SDAR-4B-Chat-b32", sizes=(2560, 9728, 36, 32, 8, 128), vocabulary=151936,
        theta=1e6, eps=1e-6, mask=151669, stops={151645, 151643}, GB=8.8,
    ),
    "sdar-1.7b": dict(
        hub="JetLM/SDAR-1.7B-Chat-b32", sizes=(2048, 6144, 28, 16, 8, 128), vocabulary=151936,
        theta=1e6, eps=1e-6, mask=151669, stops={151645, 151643}, GB=4.1,
    ),
    "llada2.0-mini": dict(
        hub="inclusionAI/LLaDA2.0-mini", sizes=(2048, 5120, 20, 16, 4, 128), vocabulary=157184,
        theta=6e5, eps=1e-6, mask=156895, stops={156892}, GB=32.5,
    ),
    "llada-8b": dict(
        hub="GSAI-ML/LLaDA-8B-Instruct", sizes=(4096, 12288, 32, 32, 32, 128), vocabulary=126464,
        theta=5e5, eps=1e-5, mask=126336, stops={126081, 126348}, GB=16.0,
    ),
    "dream-7b": dict(
        hub="Dream-org/Dream-v0-Instruct-7B", sizes=(3584, 18944, 28, 28, 4, 128),
        vocabulary=152064, theta=1e6, eps=1e-6, mask=151666, stops={151645, 151643}, GB=15.2,
    ),
}  # fmt: skip
CLASSES = {
    "sdar": "Qwen3ForCausalLM", "llada2_moe": "Glm4MoeForCausalLM", "llada": "LlamaForCausalLM",
    "Dream": "Qwen2ForCausalLM",
}  # fmt: skip


@pytest.mark.parametrize("alias", FACTS)
def test_the_table(alias):
    """Sizes, ids and RoPE are the published ones, digit by digit, and the sizes add up to the
    published checkpoint's bytes in bfloat16."""
    facts, (path, raw) = FACTS[alias], targets.known_config(alias)
    family = targets.FAMILIES[raw["model_type"]]
    config = targets.native_config(path, raw, family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model) is family.model and family.model.__name__ == CLASSES[raw["model_type"]]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers,
             config.num_attention_heads, config.num_key_value_heads, head_dim)  # fmt: skip
    assert sizes == facts["sizes"] and config.vocab_size == facts["vocabulary"]
    assert config.rope_parameters["rope_theta"] == facts["theta"]
    assert config.rms_norm_eps == facts["eps"] and config.hidden_act == "silu"
    assert not config.tie_word_embeddings
    ids = targets.read_ids(path, raw, family, None, config.vocab_size)
    assert ids == (facts["mask"], facts["stops"])
    hub = targets.HUB[alias][0]
    assert hub == facts["hub"] and targets.choose_block_size(path, raw, hub, None, True) == 32
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 2 * parameters / 1e9 == pytest.approx(facts["GB"], rel=0.015)


def test_the_aliases():
    assert set(targets.HUB) == set(FACTS)
    assert {"qwen3": targets.SDAR, **targets.FAMILIES} == targets.FAMILIES
    assert set(targets.FAMILIES) == {*CLASSES, "qwen3"}


def test_the_experts_in_the_table():
    """LLaDA2.0-mini: 256 experts in 8 groups of which 4 are chosen and in them 8 experts; one
    shared expert; the first layer dense; half of each head turned by RoPE."""
    path, raw = targets.known_config("llada2.0-mini")
    config = targets.native_config(path, raw, targets.LLADA2)
    assert (config.n_routed_experts, config.n_group, config.topk_group) == (256, 8, 4)
    assert (config.num_experts_per_tok, config.moe_intermediate_size) == (8, 512)
    assert (config.n_shared_experts, config.first_k_dense_replace) == (1, 1)
    assert (config.norm_topk_prob, config.routed_scaling_factor) == (True, 2.5)
    assert config.use_qk_norm and not config.attention_bias
    assert config.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("family, attention, shift, mask_id, stop_ids", [
    ("sdar", "block", False, 96, {95}),
    ("llada2", "block", False, 100, {99}),
    ("llada", "full", False, 100, {99}),
    ("dream", "full", True, 100, {98}),
])  # fmt: skip
def test_what_a_target_says_of_itself(family, attention, shift, mask_id, stop_ids):
    """Attention, shift, stop rule, softmax and ids, for the loops that decode with it."""
    target = golden(family)
    assert (target.attention, target.stops) == (attention, attention == "block")
    assert getattr(target, "shift", False) == shift and target.whole_softmax
    assert (target.block_size, target.mask_id, target.stop_ids) == (L, mask_id, stop_ids)
    assert target.n_ids == target.model.config.vocab_size and target.dtype == torch.float32


def test_the_embedded_target():
    """32 positions a block, its ids, and the softmax that it was trained with."""
    target = targets.load("embedded")
    assert (target.block_size, target.mask_id, target.stop_ids) == (32, 479, {476, 478})
    assert not target.whole_softmax and target.n_ids == 480
    assert targets.is_embedded("embedded") and not targets.is_embedded("sdar-8b")
    assert not targets.is_embedded(os.path.join(CHECKPOINTS, "golden-sdar"))


# ----------------------------------------------------------------------------- ids and block sizes


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_from_the_files(family, tmp_path):
    """generation_config.json's list of stop ids counts before config.json's one id; the table only
    fills gaps."""
    folder = copy(family, tmp_path / "ids")
    write(folder, "generation_config.json", {"eos_token_id": [90, 91]})
    assert targets.load(folder, block_size=L).stop_ids == {90, 91}
    remove(folder, "generation_config.json")
    edit_config(folder, eos_token_id=[93, 94])
    assert targets.load(folder, block_size=L).stop_ids == {93, 94}


def real_tokenizer(folder, *left_out):
    """(tokenizer, path of config.json, its fields) of SDAR-8B's own files, some of them missing."""
    shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns(*left_out))
    path, raw = targets.read_folder(str(folder))
    return targets.load_tokenizer(str(folder), targets.SDAR), path, raw


@pytest.mark.parametrize("left_out", ((), ("generation_config.json",)))
def test_the_end_of_a_turn_stops(left_out, tmp_path):
    """SDAR's config.json names <|endoftext|> alone; generation_config.json names <|im_end|> too,
    and where it is missing the tokenizer knows it."""
    tokenizer, path, raw = real_tokenizer(tmp_path / "sdar", *left_out)
    right = (151669, {151643, 151645})
    assert targets.read_ids(path, raw, targets.SDAR, tokenizer, 151936) == right
    raw.pop("mask_token_id")
    assert targets.read_ids(path, raw, targets.SDAR, tokenizer, 151936) == right
    raw.pop("eos_token_id")
    assert targets.read_ids(path, raw, targets.SDAR, tokenizer, 151936) == right


def test_the_mask_of_the_tokenizer(tmp_path):
    """Where config.json names none it counts before the table; where config.json names another id,
    one of them is wrong."""
    tokenizer, path, raw = real_tokenizer(tmp_path / "sdar")
    other = SimpleNamespace(get_vocab=lambda: {"<|mdm_mask|>": 7, "mask": 8, "masked>": 9})
    del raw["mask_token_id"]
    assert targets.read_ids(path, raw, targets.SDAR, other, 151936)[0] == 7
    for wrong in (151668, 151670, 0):
        with pytest.raises(ValueError, match=f"{wrong}.*mask token has id 151669") as error:
            targets.read_ids(path, raw | {"mask_token_id": wrong}, targets.SDAR, tokenizer, 151936)
        assert one_sentence(error)
    folder = copy("embedded", tmp_path / "target")
    edit_config(folder, mask_token_id=470)
    refused(folder, named="470.*479")


@pytest.mark.parametrize("name, config, asked, right", [
    ("JetLM/SDAR-8B-Chat-b32", None, None, 32),
    ("JetLM/SDAR-8B-Chat-b16", None, None, 16),
    ("JetLM/SDAR-8B-Chat-b32", 4, None, 32),
    ("JetLM/SDAR-8B-Chat-b16", None, 16, 16),
    ("models/SDAR-4B-Chat-b8/", None, None, 8),
    ("JetLM/SDAR-8B-Chat", 4, None, 4),
    ("JetLM/SDAR-8B-Chat-b64", 64, 64, 64),
    ("mine-b16", 8, None, 8),
])  # fmt: skip
def test_where_the_block_size_comes_from(name, config, asked, right):
    """As SDAR's names say it, whose config.json may be that of a sibling, else as config.json says
    it."""
    raw = {"model_type": "sdar"} | ({"block_size": config} if config else {})
    assert targets.choose_block_size("config.json", raw, name, asked, False) == right


@pytest.mark.parametrize("model_type", ("llada2_moe", "llada", "Dream"))
def test_the_usual_block_size(model_type):
    """32 for the families whose block size is the decoder's choice."""
    raw = {"model_type": model_type}
    assert targets.choose_block_size("config.json", raw, "x/y", None, False) == 32


@pytest.mark.parametrize("block_size", (0, -8, 2.0, "8", True))
def test_wrong_block_sizes_are_refused(block_size):
    """Only a whole number of at least 1."""
    refused(os.path.join(CHECKPOINTS, "golden-llada"), block_size=block_size, named="block size")


def test_contradicting_block_sizes_are_refused(tmp_path):
    """What the name or config.json says the model was trained with is not overridden."""
    refused(os.path.join(CHECKPOINTS, "golden-sdar"), block_size=16, named="block size 16 .* 8")
    refused("embedded", block_size=8, named="block size 8 .* 32")
    refused(copy("sdar", tmp_path / "SDAR-1.7B-Chat-b32"), block_size=8, named="size 8 .* 32")
    folder = copy("sdar", tmp_path / "none")
    edit_config(folder, block_size=None)
    refused(folder, named="names no block_size")


# ------------------------------------------------------------------------------------------ prompts


def encode(tokenizer, prompt):
    return dlm.Target.encode(SimpleNamespace(tokenizer=tokenizer), prompt).tolist()


def test_the_real_sdar_prompt():
    """SDAR-8B's own template and tokens (its vocabulary cut to what is needed here, with its ids):
    ChatML, no system prompt, no think tags, one token a digit."""
    tokenizer = targets.load_tokenizer(TOKENIZER, targets.SDAR)
    user, answer = [151644, 872, 198], [151645, 198, 151644, 77091, 198]
    sum_ids = [3838, 374, 220, 16, 22, 5519, 220, 17, 20, 30]
    assert encode(tokenizer, "What is 17 plus 25?") == user + sum_ids + answer
    assert encode(tokenizer, "naïve café\n") == user + [3376, 37572, 586, 51950, 198] + answer


def test_the_prompt_of_llada2():
    """The table's template, tokenised: thinking off, then the message."""
    target = golden("llada2")
    shown = target.tokenizer.convert_ids_to_tokens(target.encode("What is t20"))
    system = "<role> SYSTEM </role> detailed thinking off <|role_end|>"
    human = "<role> HUMAN </role> What is t20 <|role_end|>"
    assert shown == [*system.split(), *human.split(), "<role>", "ASSISTANT", "</role>"]


@pytest.mark.parametrize("family, source, right", [
    (targets.SDAR, "golden-sdar-tokenizer",
     "<|im_start|>user\nA {}\n'\"<|im_end|>\n<|im_start|>assistant\n"),
    (targets.DREAM, "golden-sdar-tokenizer",
     "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
     "<|im_start|>user\nA {}\n'\"<|im_end|>\n<|im_start|>assistant\n"),
    (targets.LLADA, "golden-llada2",
     "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nA {}\n'\"<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    (targets.LLADA2, "golden-llada2",
     "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>A {}\n'\""
     "<|role_end|><role>ASSISTANT</role>"),
])  # fmt: skip
def test_templates_in_the_table(family, source, right, tmp_path):
    """A tokenizer without a template gets its family's, which leaves the message as it is."""
    folder = str(tmp_path / "tokenizer")
    left = shutil.ignore_patterns("*.jinja", "*.safetensors")
    shutil.copytree(os.path.join(CHECKPOINTS, source), folder, ignore=left)
    settings = json.loads(read(folder, "tokenizer_config.json"))
    settings.pop("chat_template", None)
    write(folder, "tokenizer_config.json", settings)
    chat = [{"role": "user", "content": "A {}\n'\""}]
    tokenizer = targets.load_tokenizer(folder, family)
    shown = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert shown == right


def test_a_template_of_the_checkpoint_comes_first(tmp_path):
    """A checkpoint's own template is used where there is one; one that drops the message is not."""
    folder = copy("llada2", tmp_path / "own")
    write(folder, "chat_template.jinja", b"<role>{{ messages[0].content }}</role>")
    tokenizer = targets.load_tokenizer(folder, targets.LLADA2)
    shown = tokenizer.convert_ids_to_tokens(encode(tokenizer, "What"))
    assert shown == ["<role>", "What", "</role>"]
    write(folder, "chat_template.jinja", b"<role></role>")
    refused(folder, named="drops the message")


def test_tokens_off_their_ids_are_refused(tmp_path):
    """A vocabulary that is not whole would shift the ids of all added tokens."""
    folder = str(tmp_path / "short")
    shutil.copytree(TOKENIZER, folder)
    words = json.loads(read(folder, "vocab.json"))
    write(folder, "vocab.json", {word: i for word, i in words.items() if i < 151643})
    with pytest.raises(ValueError, match="has id .*, not 1516") as error:
        targets.load_tokenizer(folder, targets.SDAR)
    assert one_sentence(error)


@pytest.mark.parametrize("file", ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"))
@pytest.mark.parametrize("content", (b"{", b"[" * 100_000, b"\xff\xfe{% if"))
def test_broken_tokenizers_are_refused(file, content, tmp_path):
    """Whatever their files make the libraries raise."""
    folder = copy("embedded", tmp_path / "broken")
    write(folder, file, content)
    if file == "chat_template.jinja" and content.startswith((b"{", b"[")):
        return refused(folder, named="drops the message")
    refused(folder, named="tokenizer in .*broken cannot be used|tokenizer_config.json")


# ----------------------------------------------------------------------------------- random weights


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_a_folder(family, tmp_path):
    """A model of the size that config.json says, without weights: N(0, 0.02²), norms 1, and RoPE as
    in the real one."""
    folder, real = copy(family, tmp_path / "bare"), golden(family)
    remove(folder)
    torch.manual_seed(0)
    target = targets.load(folder, dtype=torch.bfloat16, block_size=L, random_weights=True)
    tensors, right = target.model.state_dict(), real.model.state_dict()
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in right.items()}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert target.dtype == torch.bfloat16
    assert tensors["lm_head.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)
    assert (tensors["model.norm.weight"] == 1).all()
    frequencies = [each.model.model.rotary_emb.inv_freq for each in (target, real)]
    assert torch.equal(*frequencies)
    assert (target.mask_id, target.stop_ids) == (real.mask_id, real.stop_ids)
    assert type(target) is type(real)
    assert len(dlm.generate(target, Decoder(gen_len=8), [1, 2, 3, 4, 5, 6, 7, 8]).written) == 8


@pytest.mark.parametrize("alias", ["sdar-8b", "llada2.0-mini", "llada-8b", "dream-7b"])
def test_random_weights_of_an_alias(alias, monkeypatch, tmp_path):
    """From the table alone: no network, no tokenizer, no file, also none that lies in the working
    directory; here with the sizes made small."""
    hub, model_type, _ = targets.HUB[alias]
    small = dict(
        num_hidden_layers=2, hidden_size=16, intermediate_size=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_experts=16, moe_intermediate_size=8, n_layers=2,
        d_model=16, mlp_hidden_size=8, n_heads=4, n_kv_heads=4,
    )  # fmt: skip
    known = targets.FAMILIES[model_type].known
    for name in [name for name in small if name in known]:
        monkeypatch.setitem(known, name, small[name])
    if model_type == "sdar":
        monkeypatch.setitem(targets.HUB, alias, (hub, model_type, (16, 8, 2, 4)))
    asked = lambda *_, **__: pytest.fail("the hub was asked")  # noqa: E731
    monkeypatch.setattr(targets, "snapshot_download", asked)
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "generation_config.json", b"{")
    write(tmp_path, "tokenizer.json", b"{")
    target = targets.load(alias, dtype=torch.bfloat16, random_weights=True)
    assert target.block_size == 32 and target.tokenizer is None
    assert (target.mask_id, target.stop_ids) == (FACTS[alias]["mask"], FACTS[alias]["stops"])
    assert targets.load(alias, random_weights=True, block_size=16).block_size == 16
    assert targets.identity(alias, random_weights=True) == targets.identity("sdar-4b", True)
    if target.attention == "block":
        prefix = target.prefill(list(range(32)))
        assert target.forward([(target.mask_id,) * 32], [1], prefix, {}).states.shape == (1, 32)


# ------------------------------------------------------------------------------------------ the hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub's library and no network; returns a function that puts a golden
    checkpoint in it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(family, hub):
        root, revision = tmp_path / f"models--{hub.replace('/', '--')}", "0" * 40
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text(revision)
        return copy(family, root / "snapshots" / revision)

    return put


@pytest.mark.parametrize("family, alias", [
    ("sdar", "sdar-1.7b"), ("sdar", "sdar-4b"), ("sdar", "sdar-8b"), ("llada2", "llada2.0-mini"),
    ("llada", "llada-8b"), ("dream", "dream-7b"),
])  # fmt: skip
def test_a_cached_checkpoint_needs_no_network(family, alias, cache):
    """By alias and by hub id; SDAR's block size, which its config.json lacks, comes from the
    repository's name."""
    hub, model_type, _ = targets.HUB[alias]
    edit_config(cache(family, hub), block_size=None)
    for name in (alias, hub):
        target = targets.load(name)
        assert target.block_size == 32 and type(target.model).__name__ == CLASSES[model_type]
    if family in ("llada", "dream"):  # the decoder's choice
        assert targets.load(alias, block_size=16).block_size == 16


def test_a_sibling_of_another_block_size(cache):
    """Any repository of the hub can be named; -b16 says the block size."""
    edit_config(cache("sdar", "JetLM/SDAR-8B-Chat-b16"), block_size=None)
    assert targets.load("JetLM/SDAR-8B-Chat-b16").block_size == 16


@pytest.mark.parametrize("name", [*targets.HUB, "JetLM/SDAR-8B-Chat-b16", "no-such/repository"])
def test_an_unreachable_hub_is_one_sentence(name, cache):
    """Neither cached nor to be fetched."""
    refused(name, named="cannot fetch .*/.* from the hub.*network")


def test_an_incomplete_cache_is_not_taken_for_whole(cache, monkeypatch):
    """A download that broke off is fetched on, and without a network refused."""
    folder = cache("llada", "GSAI-ML/LLaDA-8B-Instruct")
    shards(folder)
    remove(folder, SHARDS[1])
    asked, fetch = [], targets.snapshot_download

    def download(hub, local_files_only=False, **options):
        asked.append(local_files_only)
        return fetch(hub, local_files_only=local_files_only, **options)

    monkeypatch.setattr(targets, "snapshot_download", download)
    refused("llada-8b", named=f"{SHARDS[1]}|cannot fetch")
    assert asked == [True, False]


def test_only_data_is_fetched(monkeypatch, tmp_path):
    """No code and no pickle is asked of the hub."""
    asked = []

    def download(hub, allow_patterns, local_files_only=False):
        asked.extend(allow_patterns)
        if local_files_only:
            raise FileNotFoundError("not cached")
        return copy("sdar", tmp_path / "fetched")

    monkeypatch.setattr(targets, "snapshot_download", download)
    assert targets.load("someone/SDAR").mask_id == 96
    assert set(asked) == {"*.json", "*.safetensors", "*.txt", "*.jinja"}


UNKNOWN = ("sdar", "sdar-9b", "nowhere", "nowhere/at/all", "../none", "", CHECKPOINTS)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    """All aliases are listed."""
    known = ".*".join(["no model", "embedded", *targets.HUB])
    for random_weights in (False, True):
        refused(name, random_weights=random_weights, named=known)


@pytest.mark.parametrize("device", ("cuda:99", "gpu", "meta-data", "meta"))
def test_an_unknown_device_is_refused(device):
    """Before anything is read."""
    refused("embedded", device, named=f"{device}.*cannot be used")


def test_several_devices_need_accelerate(monkeypatch):
    """device auto is the library's own placement; it and random weights on several devices are
    refused in words."""
    monkeypatch.setattr(weights, "is_accelerate_available", lambda: False)
    refused("embedded", "auto", named="accelerate")
    monkeypatch.setattr(weights, "is_accelerate_available", lambda: True)
    folder = os.path.join(CHECKPOINTS, "golden-sdar")
    refused(folder, "auto", random_weights=True, named="one device")


def test_outputs_of_a_spread_model_are_gathered():
    """The hooks that bring outputs to the first device leave a model on one device as it is."""
    target = golden("sdar")
    blank = [(target.mask_id,) * L]
    before = target.forward(blank, [0], None, {}).unit(0)
    target.model = weights.gather(target.model)
    assert torch.equal(target.forward(blank, [0], None, {}).unit(0), before)


# -------------------------------------------------------------------------- weights that do not fit


TENSOR = {  # in the second layer: a matrix of each family, by its name on the hub
    "sdar": "model.layers.1.mlp.up_proj.weight",
    "llada2": "model.layers.1.mlp.experts.3.up_proj.weight",
    "llada": "model.transformer.blocks.1.ff_out.weight",
    "dream": "model.layers.1.self_attn.q_proj.bias",
}
TOP = {"llada": "model.transformer.ln_f.weight"}  # elsewhere model.norm.weight
HEAD = {"llada": "model.transformer.ff_out.weight"}  # elsewhere lm_head.weight
NO_FLOATS = (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "fault", ("missing", "surplus", "layer", "third", "misshaped", "top", "transposed")
)
def test_tensors_that_do_not_fit_are_refused(family, fault, tmp_path):
    """A missing, surplus or misshaped tensor is named, and nothing is filled up or cut to size."""
    folder, name = copy(family, tmp_path / "broken"), TENSOR[family]
    top, head = TOP.get(family, "model.norm.weight"), HEAD.get(family, "lm_head.weight")

    def change(t):
        if fault == "missing":
            del t[name]
        elif fault == "surplus":
            t["model.extra.weight"] = torch.zeros(2)
        elif fault == "layer":
            t[name.replace(".1.", ".46.")] = t[name].clone()
        elif fault == "third":  # one layer too many: the models have 3
            t.update({other.replace(".2.", ".3."): t[other].clone() for other in [*t]})
        elif fault == "misshaped":
            t[name] = t[name][:-1].clone()
        elif fault == "top":
            t[top] = torch.zeros(63)
        else:
            t[head] = t[head].T.contiguous()

    named = {
        "missing": f"missing.*layers.1.|missing.*{name}", "surplus": "model.extra.weight",
        "layer": r"surplus.*\.46\.", "third": r"surplus.*\.3\.", "misshaped": name + ".*shape",
        "top": "mismatched.*norm.weight.*63", "transposed": "mismatched.*lm_head",
    }[fault]  # fmt: skip
    edit_weights(folder, change)
    refused(folder, block_size=L, named=named)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_config_json_does_not_count(family, tmp_path):
    """One layer less or more in config.json than in the files."""
    folder, field = copy(family, tmp_path / "layers"), "num_hidden_layers"
    field = "n_layers" if family == "llada" else field
    edit_config(folder, **{field: 2})
    refused(folder, block_size=L, named=r"surplus.*\.2\.")
    edit_config(folder, **{field: 4})
    refused(folder, block_size=L, named="missing.*layer 3")


@pytest.mark.parametrize("experts, named", [(15, r"surplus.*experts\.15"), (17, "n_group"),
                                            (20, r"missing.*experts\.16")])  # fmt: skip
def test_experts_that_config_json_does_not_count(experts, named, tmp_path):
    """The golden LLaDA2 has 16 in 4 groups."""
    folder = copy("llada2", tmp_path / "experts")
    edit_config(folder, num_experts=experts, n_group=3 if experts == 15 else 4)
    refused(folder, block_size=L, named=named)


@pytest.mark.parametrize("dtype", NO_FLOATS)
def test_tensors_that_are_no_floats_are_refused(dtype, tmp_path):
    """The library casts them silently; what they were quantised by is lost."""
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        folder = copy("sdar", tmp_path / name)
        edit_weights(folder, lambda t: t.update({name: t[name].to(dtype)}))
        refused(folder, named=f"{name} is of dtype")


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float64))
def test_floats_of_any_width_are_loaded(dtype, tmp_path):
    folder = copy("sdar", tmp_path / "cast")
    edit_weights(folder, lambda t: t.update({name: t[name].to(dtype) for name in t}))
    target = targets.load(folder)
    right = golden("sdar").model.lm_head.weight.to(dtype).float()
    assert target.dtype == torch.float32 and torch.equal(target.model.lm_head.weight, right)


def test_a_head_that_contradicts_the_configuration_is_refused(tmp_path):
    """tie_word_embeddings says that the head is the embedding: another one in the file is refused,
    the same one written out is read."""
    folder = copy("embedded", tmp_path / "target")
    embedding = "model.embed_tokens.weight"
    edit_weights(folder, lambda t: t.update({"lm_head.weight": t[embedding].clone()}))
    assert torch.equal(targets.load(folder).model.lm_head.weight,
                       targets.load("embedded").model.lm_head.weight)  # fmt: skip
    edit_weights(folder, lambda t: t["lm_head.weight"][3].add_(0.01))
    refused(folder, named="lm_head of their own.*ties")
    edit_config(folder, tie_word_embeddings=False)
    assert targets.load(folder).model.lm_head.weight is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_not_asked_of_untied_files(family, tmp_path):
    """The golden checkpoints have heads of their own."""
    folder = copy(family, tmp_path / "tied")
    edit_config(folder, **{"weight_tying" if family == "llada" else "tie_word_embeddings": True})
    refused(folder, block_size=L, named="lm_head of their own.*ties")


HEADS = [  # family, a tensor beside the right ones that becomes one of them
    ("llada", "lm_head.weight", (101, 64)),
    ("llada", "model.embed_tokens.weight", (101, 64)),
    ("llada", "model.layers.1.mlp.down_proj.weight", (64, 96)),
    ("llada2", "model.layers.1.mlp.experts.gate_up_proj", (16, 48, 64)),
    ("sdar", "model.layers.0.self_attn.rotary_emb.inv_freq", (16,)),
]


@pytest.mark.parametrize("family, name, shape", HEADS)
def test_two_tensors_for_one_place_are_refused(family, name, shape, tmp_path):
    """The library takes one of them, or neither, without a word: LLaDA's head was zeros."""
    folder = copy(family, tmp_path / "twice")
    edit_weights(folder, lambda t: t.update({name: torch.zeros(shape)}))
    refused(folder, block_size=L, named="the files hold .* numbers, its model")


@pytest.mark.parametrize("field", ("vocab_size", "hidden_size", "intermediate_size", "head_dim"))
def test_sizes_beyond_the_files_are_refused_before_room_is_made(field, tmp_path):
    """The library would fill gigabytes with random numbers first."""
    folder = copy("sdar", tmp_path / "huge")
    edit_config(folder, **{field: 1 << 24})
    start = time.perf_counter()
    refused(folder, named="the files hold .* numbers, its model")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize("fields", (dict(hidden_size=1 << 24), dict(vocab_size=1 << 24,
                                    hidden_size=1 << 23)))  # fmt: skip
def test_random_weights_that_find_no_room_are_refused(fields, tmp_path):
    """In one sentence that names the device, not the allocator's lines."""
    folder = copy("sdar", tmp_path / "huge")
    edit_config(folder, intermediate_size=1 << 24, **fields)
    refused(folder, random_weights=True, named="no room on cpu")


def test_weights_that_find_no_room_are_refused(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nSee the manual")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    refused("embedded", named="no room on cpu .*2 GiB. See")


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    """With the package peft the library would load the adapter's base model in place of these."""
    folder = copy("sdar", tmp_path / "adapter")
    write(folder, "adapter_config.json", {"base_model_name_or_path": "x/y", "peft_type": "LORA"})
    refused(folder, named="adapter_config.json.*merge")


# --------------------------------------------------------------------- files lost, broken, too many


@pytest.mark.parametrize("family", FAMILIES)
def test_shards(family, tmp_path):
    """Whole ones are read; truncated and lost ones are refused, and so is a broken index."""
    folder = copy(family, tmp_path / "shards")
    right = targets.load(folder, block_size=L).model.state_dict()
    shards(folder)
    got = targets.load(folder, block_size=L).model.state_dict()
    assert all(torch.equal(got[name], right[name]) for name in right)
    truncate(folder, SHARDS[1], by=100)
    refused(folder, block_size=L, named="cannot be read")
    remove(folder, SHARDS[1])
    refused(folder, block_size=L, named=f"lacks 1 file.*{SHARDS[1]}")


BROKEN = (b"{}", b"{", b"[1]", b'{"weight_map": {"a": 5}}', b'{"weight_map": []}', b"[" * 100_000)


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_index_is_refused(content, tmp_path):
    folder = copy("sdar", tmp_path / "index")
    shards(folder)
    write(folder, INDEX, content)
    refused(folder, named=INDEX)


def test_weights_beside_those_of_the_index_are_refused(tmp_path):
    """The library would load the stray model.safetensors; which of them is the model is not
    guessed."""
    folder = copy("sdar", tmp_path / "stray")
    zeros = {name: torch.zeros_like(t) for name, t in golden("sdar").model.state_dict().items()}
    shards(folder)
    save_file(zeros, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
    refused(folder, named="model.safetensors beside an index")
    remove(folder, INDEX)
    assert not targets.load(folder).model.lm_head.weight.any()  # now it is the only one


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    """Which one counts would be up to the order of the files."""
    folder = copy("sdar", tmp_path / "twice")
    shards(folder)
    path = os.path.join(folder, SHARDS[1])
    tensors = load_file(path) | {"lm_head.weight": torch.zeros(97, 64)}
    save_file(tensors, path, metadata={"format": "pt"})
    refused(folder, named="two files hold a tensor lm_head.weight")


def test_other_safetensors_in_the_folder_do_not_count(tmp_path):
    """training.safetensors, which an interrupted training leaves, is no weight of the model."""
    folder = copy("sdar", tmp_path / "training")
    extra = {"model.layers.7.mlp.up_proj.weight": torch.zeros(3, dtype=torch.int64)}
    save_file(extra, os.path.join(folder, "training.safetensors"))
    right = golden("sdar").model.lm_head.weight
    assert torch.equal(targets.load(folder).model.lm_head.weight, right)


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_weights_are_refused(family, tmp_path):
    folder = copy(family, tmp_path / "broken")
    truncate(folder)
    refused(folder, block_size=L, named="cannot be read")
    write(folder, "model.safetensors", read(folder, "model.safetensors")[:1000])
    refused(folder, block_size=L, named="cannot be read")
    write(folder, "model.safetensors", b"")
    refused(folder, block_size=L, named="cannot be read")
    remove(folder)
    refused(folder, block_size=L, named="lacks.*model.safetensors")


FILES = ("model.safetensors", "config.json", "generation_config.json", INDEX, "tokenizer.json",
         "tokenizer_config.json")  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_folders_in_place_of_files_are_refused(file, tmp_path):
    """In one sentence with the file's or the folder's name."""
    folder = copy("embedded", tmp_path / "odd")
    path = os.path.join(folder, file)
    if os.path.exists(path):
        os.remove(path)
    os.mkdir(path)
    refused(folder, named=folder)


MARK = b"\xef\xbb\xbf"


def test_a_byte_order_mark_is_passed_over(tmp_path):
    """As some editors write it in front of a text."""
    folder = copy("sdar", tmp_path / "mark")
    write(folder, "config.json", MARK + read(folder, "config.json"))
    write(folder, "generation_config.json", MARK + b'{"eos_token_id": [94]}')
    assert targets.load(folder).stop_ids == {94}
    assert not targets.is_embedded(folder)


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    """In front of a template the library would hand it on to every prompt, as three tokens."""
    tokenizer, path, _ = real_tokenizer(tmp_path / "mark")
    right, folder = encode(tokenizer, "What is 17 plus 25?"), os.path.dirname(path)
    write(folder, "chat_template.jinja", MARK + read(folder, "chat_template.jinja"))
    assert encode(targets.load_tokenizer(folder, targets.SDAR), "What is 17 plus 25?") == right


@pytest.mark.parametrize("kept", (0, 1, 100, -2))
def test_merges_that_are_not_whole_are_refused(kept, tmp_path):
    """Without a merge its words fall apart: a prompt would be read in other tokens, silently."""
    _, path, _ = real_tokenizer(tmp_path / "merges")
    folder = os.path.dirname(path)
    lines = read(folder, "merges.txt").split(b"\n")
    write(folder, "merges.txt", b"\n".join(lines[:kept]) + b"\n")
    with pytest.raises(ValueError, match="merges.txt makes no|Merges text file") as error:
        targets.load_tokenizer(folder, targets.SDAR)
    assert one_sentence(error)


@pytest.mark.parametrize("file", ("config.json", "generation_config.json", "tokenizer.json",
                                  "tokenizer_config.json", INDEX))  # fmt: skip
def test_links_to_nothing_are_refused(file, tmp_path):
    """Such as a cache of the hub holds when its blobs were cleared: not taken for absent files."""
    folder = copy("embedded", tmp_path / "links")
    path = os.path.join(folder, file)
    if os.path.exists(path):
        os.remove(path)
    os.symlink(tmp_path / "nowhere", path)
    refused(folder, named="no model" if file == "config.json" else f"{file} is a link to nothing")


def test_a_path_names_a_folder_too(tmp_path):
    """Any other thing than a name or a path is answered like an unknown name."""
    folder = tmp_path / "path"
    copy("sdar", folder)
    assert targets.load(folder).mask_id == 96
    assert targets.identity(folder) == targets.identity(str(folder))
    for name in (None, 5, ["embedded"]):
        refused(name, named="no model .*embedded, sdar-8b")
        with pytest.raises(FileNotFoundError, match="no model"):
            targets.identity(name)


# ------------------------------------------------------------------- configurations that say wrong


def broken_config(family, folder, **fields):
    """A golden checkpoint copied to `folder` with other fields."""
    copy(family, folder)
    edit_config(str(folder), **fields)
    return str(folder)


@pytest.mark.parametrize("content", (b"[1]", b"{", b"\xff\xfe{", b'{"a":' * 100_000, b""))
def test_broken_configurations_are_refused(content, tmp_path):
    """No JSON, no object, no text, nested without end: with the file's name."""
    folder = copy("sdar", tmp_path / "broken")
    write(folder, "config.json", content)
    refused(folder, named="config.json")
    write(folder, "config.json", read(os.path.join(CHECKPOINTS, "golden-sdar"), "config.json"))
    write(folder, "generation_config.json", content)
    refused(folder, named="generation_config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_fields_are_refused(family, tmp_path):
    """Every field that shapes the model must be there; the table does not fill it in."""
    fields = [field.split("=")[-1] for field in targets_of(family).fields.split()] + ["rope_theta"]
    fields += ["partial_rotary_factor"] * (family == "llada2")
    path, raw = targets.read_folder(os.path.join(CHECKPOINTS, f"golden-{family}"))
    for field in fields:
        less = {key: value for key, value in raw.items() if key != field}
        with pytest.raises(ValueError, match=f"config.json.*{field}") as error:
            targets.native_config(path, less, targets_of(family))
        assert one_sentence(error)


def targets_of(family):
    return targets.FAMILIES[{"llada2": "llada2_moe", "dream": "Dream"}.get(family, family)]


WRONG = [  # family, field, value: of a wrong type, or of a size with which no model runs
    *[("sdar", "hidden_size", value) for value in ("wide", 0, -64, 64.0, True, [64], {})],
    *[("sdar", "num_hidden_layers", value) for value in (10**9, 1001, 0, -1, "3", [3], True)],
    *[("sdar", "num_attention_heads", value) for value in (0, 3, -4, "4")],
    *[("sdar", "num_key_value_heads", value) for value in (0, 3, -1, [2])],
    *[("sdar", "head_dim", value) for value in (0, 31, -32, 32.0, "32")],
    *[("sdar", "vocab_size", value) for value in (0, -97, 10**12, "97")],
    *[("sdar", "max_position_embeddings", value) for value in (0, -1, 10**12, "long")],
    *[("sdar", "hidden_act", value) for value in ("relu9", 5, ["silu"])],
    *[("sdar", "rms_norm_eps", value) for value in ("small", -1e-6, float("nan"))],
    *[("sdar", "rope_theta", value) for value in (0, -1, "x", True, [1], float("nan"), 10**400)],
    *[("sdar", "rope_parameters", value) for value in ([1], "x", 7, {"rope_type": "yarn"})],
    ("sdar", "rope_scaling", {"type": "linear", "factor": 2.0}),
    *[("sdar", "tie_word_embeddings", value) for value in ("no", 1)],
    *[("llada2", "n_group", value) for value in (0, 3, -1, 16, "4", [4])],
    *[("llada2", "topk_group", value) for value in (0, 5, "2")],
    *[("llada2", "num_experts_per_tok", value) for value in (0, 9, 999, "4")],
    *[("llada2", "num_experts", value) for value in (0, 15, "16")],
    *[("llada2", "first_k_dense_replace", value) for value in (-1, "1")],
    *[("llada2", "partial_rotary_factor", value) for value in (0, 3, 0.3, "half")],
    *[("llada2", "norm_topk_prob", value) for value in ("yes",)],
    *[("llada2", "routed_scaling_factor", value) for value in ("x", float("inf"))],
    *[("llada", "d_model", value) for value in (0, "wide", 65)],
    *[("llada", "n_layers", value) for value in (10**9, 0)],
    *[("dream", "num_hidden_layers", value) for value in (10**9, 0)],
]


@pytest.mark.parametrize("family, field, value", WRONG)
def test_fields_that_no_model_has_are_refused(family, field, value):
    """At once, with the path of config.json."""
    path, raw = targets.read_folder(os.path.join(CHECKPOINTS, f"golden-{family}"))
    targets.native_config(path, raw, targets_of(family))  # well before it is changed
    with pytest.raises(ValueError, match="config.json is not a usable configuration") as error:
        targets.native_config(path, raw | {field: value}, targets_of(family))
    assert one_sentence(error)


UNLIKE = [  # family, field, value: another computation than that of the native class
    ("sdar", "use_sliding_window", True), ("dream", "use_sliding_window", True),
    ("sdar", "partial_rotary_factor", 0.5), ("dream", "partial_rotary_factor", 0.5),
    ("llada2", "score_function", "softmax"), ("llada2", "use_bias", True),
    ("llada2", "norm_head", True), ("llada2", "use_rmsnorm", False),
    ("llada2", "moe_router_enable_expert_bias", False), ("llada2", "use_sliding_window", True),
    ("llada", "alibi", True), ("llada", "rope", False), ("llada", "include_bias", True),
    ("llada", "layer_norm_type", "default"), ("llada", "block_type", "sequential"),
    ("llada", "scale_logits", True), ("llada", "input_emb_norm", True),
    ("llada", "attention_layer_norm", True), ("llada", "multi_query_attention", True),
    ("llada", "clip_qkv", 5),
]  # fmt: skip


@pytest.mark.parametrize("family, field, value", UNLIKE)
def test_computations_that_the_native_class_lacks_are_refused(family, field, value):
    """The field would be ignored and the texts would still read well; null or nothing is as ours.
    """
    path, raw = targets.read_folder(os.path.join(CHECKPOINTS, f"golden-{family}"))
    for usual in (raw, raw | {field: None}, {k: v for k, v in raw.items() if k != field}):
        targets.native_config(path, usual, targets_of(family))
    with pytest.raises(ValueError, match=f"config.json.*{field} is {value!r}") as error:
        targets.native_config(path, raw | {field: value}, targets_of(family))
    assert one_sentence(error)


def test_groups_of_one_expert_are_refused():
    """A group is scored by its two best."""
    path, raw = targets.read_folder(os.path.join(CHECKPOINTS, "golden-llada2"))
    with pytest.raises(ValueError, match="n_group is 16 for 16 experts"):
        targets.native_config(path, raw | {"n_group": 16, "topk_group": 8}, targets.LLADA2)


@pytest.mark.parametrize("random_weights", (False, True))
def test_a_thousand_million_layers_do_not_hang(random_weights, tmp_path):
    folder = broken_config("sdar", tmp_path / "deep", num_hidden_layers=10**9)
    refused(folder, random_weights=random_weights, named="num_hidden_layers is 1000000000")


@pytest.mark.parametrize("fields, named", [
    (dict(stop_token_ids=[[1]]), "stop ids"), (dict(stop_token_ids={}), "stop ids"),
    (dict(stop_token_ids=[]), "stop ids"), (dict(stop_token_ids="95"), "stop ids"),
    (dict(stop_token_ids=[True]), "stop ids"), (dict(stop_token_ids=[96]), "differ"),
    (dict(eos_token_id=500), "stop ids"), (dict(eos_token_id=-1), "stop ids"),
    (dict(eos_token_id=97), "stop ids"), (dict(mask_token_id=97), "mask_token_id"),
    (dict(mask_token_id=500), "mask_token_id"), (dict(mask_token_id=-1), "mask_token_id"),
    (dict(mask_token_id=[96]), "mask_token_id"), (dict(mask_token_id=True), "mask_token_id"),
    (dict(mask_token_id=96.0), "mask_token_id"), (dict(mask_token_id=None), "mask_token_id"),
    (dict(block_size=0), "block_size"), (dict(block_size="8"), "block_size"),
    (dict(block_size=True), "block_size"), (dict(block_size=[8]), "block_size"),
    (dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    (dict(quantization_config="int8"), "quantization_config"),
])  # fmt: skip
def test_ids_and_settings_that_cannot_be_are_refused(fields, named, tmp_path):
    refused(broken_config("sdar", tmp_path / "ids", **fields), named=f"config.json.*{named}")


@pytest.mark.parametrize("model_type", ("gpt2", "dream", None, ["a"], {}, 7, True))
def test_an_unknown_model_type_is_refused(model_type, tmp_path):
    """Another architecture is not guessed at, whatever the type of its name."""
    folder = broken_config("sdar", tmp_path / "other", model_type=model_type)
    refused(folder, named="model_type.*sdar.*llada2_moe.*llada.*Dream")


# ------------------------------------------------------------------------- what identifies a target


def test_identity(tmp_path):
    """The same files elsewhere are the same target; other weights, another configuration and
    another tokenizer are others. What a training leaves beside them does not count."""
    folder = copy("embedded", tmp_path / "target")
    same = targets.identity("embedded")
    assert len(same) >= 16 and set(same) <= set("0123456789abcdef")
    assert targets.identity(folder) == same
    write(folder, "training.safetensors", b"1")
    write(folder, "model.safetensors.part7", b"2")
    assert targets.identity(folder) == same
    bare = targets.identity(folder, random_weights=True)
    edit_weights(folder, lambda t: t["model.norm.weight"][0].add_(1))
    other = targets.identity(folder)
    assert other != same and targets.identity(folder, random_weights=True) == bare
    edit_config(folder, block_size=16)
    third = targets.identity(folder)
    write(folder, "chat_template.jinja", b"{{ messages[0].content }}")
    assert len({same, other, third, targets.identity(folder)}) == 4


@pytest.mark.parametrize("file", sorted(os.listdir(TOKENIZER)))
def test_every_file_of_a_tokenizer_counts(file, tmp_path):
    folder = str(tmp_path / "tokenizer")
    shutil.copytree(TOKENIZER, folder)
    before = targets.identity(folder)
    write(folder, file, read(folder, file) + b" ")
    assert targets.identity(folder) != before


def test_identity_of_shards(tmp_path):
    """Every shard counts."""
    folder = copy("sdar", tmp_path / "shards")
    shards(folder)
    before = targets.identity(folder)
    path = os.path.join(folder, SHARDS[1])
    tensors = load_file(path)
    save_file({name: t + 1 for name, t in tensors.items()}, path, metadata={"format": "pt"})
    assert targets.identity(folder) != before
