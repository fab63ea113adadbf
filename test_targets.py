"""Tests of the real targets: SDAR, LLaDA2.0-mini, LLaDA and Dream, as small golden checkpoints in the hub's layout.

Covered: logits equal to the public reference implementations' in float32, uncached, behind a prefix cache and in the
whole-canvas cache of the full-attention targets; what the hub's files leave out (block size, mask, stop ids); prompts;
random weights; the hub's cache; every refusal as one sentence. Golden numbers come from the reference implementations
on random weights (3 layers, width 64; checkpoints/golden-*).

Left out: the trained weights, several GPUs, and decoding (test_exactness.py). Nothing is downloaded.

    python -m pytest test_targets.py          # about half a minute on one core
"""

import json
import os
import shutil
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dlm
import targets
from test_exactness import edit_config, edit_weights, one_sentence, remove_weights, truncate

CHECKPOINTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoints")
FAMILIES = ("sdar", "llada2", "llada", "dream")
BLOCK_CAUSAL, FULL = FAMILIES[:2], FAMILIES[2:]
L, S = 8, 24  # block and row of the golden logits


# ------------------------------------------------------------------------------------------------------ helpers


def golden(family, dtype=torch.float32):
    """The golden checkpoint of a family and what the reference implementation computes on it."""
    folder = os.path.join(CHECKPOINTS, f"golden-{family}")
    return targets.load(folder, dtype=dtype, block_size=L), load_file(os.path.join(folder, "expected.safetensors"))


def copy(family, folder):
    """A golden checkpoint copied to `folder`, to be changed there; returns the folder."""
    shutil.copytree(os.path.join(CHECKPOINTS, f"golden-{family}"), folder, ignore=shutil.ignore_patterns("expected*"))
    return str(folder)


@torch.inference_mode()
def logits(target, ids, positions, units):
    """Raw logits [1, P, V] of one pass over ids [1, P] at positions [P]."""
    hidden = target.model.model(input_ids=ids, position_ids=positions[None], units=units, use_cache=False)
    return target.model.lm_head(hidden.last_hidden_state)


def uncached(target, ids):
    """Raw logits [1, P, V] of a whole row: block by block, or all of it as one unit."""
    P, index = ids.shape[1], torch.arange(ids.shape[1] // L)
    whole = dlm.Units(P) if target.attention == "full" else dlm.Units(L, None, index, index[:, None] > index)
    return logits(target, ids, torch.arange(P), whole)


def conditionals(target, raw):
    """The probabilities of raw logits, over all ids as in released code; [MASK] is never committed."""
    return raw.softmax(-1).index_fill(-1, torch.tensor([target.mask_id]), 0)


def refused(*arguments, named="", **options):
    """`targets.load` must refuse with one sentence in which `named` (a regular expression) is found."""
    with pytest.raises((ValueError, FileNotFoundError), match=named) as error:
        targets.load(*arguments, **options)
    assert one_sentence(error)


# ------------------------------------------------------------------------------------------------- golden logits


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits(family):
    """The native class under our attention function computes the reference's logits, in float32 and from float64."""
    for dtype in (torch.float32, torch.float64):
        target, expected = golden(family, dtype)
        raw = uncached(target, expected["ids"])
        assert raw.dtype == dtype and (expected["ids"] == target.mask_id).sum() > 3
        assert torch.allclose(raw.float(), expected["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", BLOCK_CAUSAL)
def test_golden_logits_behind_a_prefix_cache(family):
    """Complete blocks prefilled, then one pass over two states of the next block: each as if it were alone."""
    target, expected = golden(family)
    ids = expected["ids"][0].tolist()
    states = [tuple(ids[16:]), (target.mask_id,) * 3 + tuple(ids[3:8])]
    for chosen in ([0], [1], [0, 1]):
        out = target.forward([states[u] for u in chosen], [2] * len(chosen), target.prefill(ids[:16]), {})
        for place, u in enumerate(chosen):
            row = torch.tensor([ids[:16] + list(states[u])])
            right = uncached(target, row)[0] if u else expected["logits"][0]
            right = conditionals(target, right[16:][row[0, 16:] == target.mask_id])
            assert torch.allclose(out.unit(place).exp(), right, rtol=0, atol=1e-5)


def test_golden_logits_of_llada_behind_padding():
    """The reference's logits with 4 positions masked out on the left: distances alone matter to RoPE, so those of the
    canvas without them."""
    target, expected = golden("llada")
    ids, right = expected["ids"][:, 4:], expected["logits_leftpad4"][:, 4:]
    for begin in (0, 4):
        raw = logits(target, ids, torch.arange(begin, begin + S - 4), dlm.Units(S - 4))
        assert torch.allclose(raw, right, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block", range(S // L))
@pytest.mark.parametrize("family", FULL)
def test_a_pass_over_one_block_of_a_cached_canvas(family, block):
    """K and V of the whole canvas stored, then the block alone behind those of all other positions: as uncached, also
    for two copies of the block in one pass."""
    target, expected = golden(family)
    store = dlm.Units(S, record=[])
    logits(target, expected["ids"], torch.arange(S), store)
    at = torch.arange(block * L, (block + 1) * L)
    others = torch.tensor([s for s in range(S) if s not in at])
    prefix = [(k[:, :, 0, others], v[:, :, 0, others]) for k, v in store.record]
    for copies in (1, 2):
        raw = logits(target, expected["ids"][:, at].repeat(1, copies), at.repeat(copies), dlm.Units(L, prefix))
        right = expected["logits"][:, at].repeat(1, copies, 1)
        assert torch.allclose(raw, right, rtol=0, atol=1e-4)


# ---------------------------------------------------------------------------------------- what a family brings along


@pytest.mark.parametrize(
    "family, attention, shift, mask_id, stop_ids",
    [
        ("sdar", "block", False, 96, {95}),
        ("llada2", "block", False, 100, {99}),
        ("llada", "full", False, 100, {99}),
        ("dream", "full", True, 100, {98}),
    ],
)
def test_what_a_target_says_of_itself(family, attention, shift, mask_id, stop_ids):
    """Attention, shift, stop rule and ids, for the loops that decode with it."""
    target, _ = golden(family)
    assert (target.attention, target.shift, target.stops) == (attention, shift, attention == "block")
    assert (target.block_size, target.mask_id, target.stop_ids) == (L, mask_id, stop_ids)
    assert target.n_ids == target.model.config.vocab_size and target.dtype == torch.float32


@pytest.mark.parametrize(
    "alias, gigabytes",
    [
        ("sdar-8b", 16.4),
        ("sdar-4b", 8.8),
        ("sdar-1.7b", 4.1),
        ("llada2.0-mini", 32.5),
        ("llada-8b", 16.0),
        ("dream-7b", 15.2),
    ],
)
def test_sizes_in_the_table(alias, gigabytes):
    """The table's sizes add up to the published checkpoints' bytes in bfloat16, and their ids and block are the
    table's."""
    path, raw = targets.known_config(alias)
    family = targets.FAMILIES[raw["model_type"]]
    config = targets.native_config(path, raw, family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model) is family.model
    assert 2 * sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(gigabytes, rel=0.015)
    assert targets.choose_block_size(path, raw, targets.HUB[alias][0], None, True) == 32
    mask_id, stop_ids = targets.read_ids(path, raw, family, None, config.vocab_size)
    assert mask_id == family.known["mask_token_id"] and len(stop_ids) >= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_from_the_files(family, tmp_path):
    """generation_config.json's list of stop ids counts before config.json's one id; the table only fills gaps."""
    folder = copy(family, tmp_path / "ids")
    with open(os.path.join(folder, "generation_config.json"), "w") as file:
        json.dump({"eos_token_id": [90, 91]}, file)
    assert targets.load(folder, block_size=L).stop_ids == {90, 91}
    os.remove(os.path.join(folder, "generation_config.json"))
    edit_config(eos_token_id=[93, 94])(folder)
    assert targets.load(folder, block_size=L).stop_ids == {93, 94}


@pytest.mark.parametrize("name, config, asked, right", [
    ("JetLM/SDAR-8B-Chat-b32", None, None, 32),
    ("JetLM/SDAR-8B-Chat-b16", None, None, 16),
    ("JetLM/SDAR-8B-Chat-b16", None, 64, 64),
    ("models/SDAR-4B-Chat-b8/", None, None, 8),
    ("JetLM/SDAR-8B-Chat", 4, None, 4),
    ("JetLM/SDAR-8B-Chat-b64", 64, 64, 64),
    ("mine-b16", 8, None, 8),
])  # fmt: skip
def test_where_the_block_size_comes_from(name, config, asked, right):
    """As asked for, else as SDAR's names say it, else as config.json says it."""
    raw = {"model_type": "sdar"} | ({"block_size": config} if config else {})
    assert targets.choose_block_size("config.json", raw, name, asked, False) == right


@pytest.mark.parametrize("model_type", ("llada2_moe", "llada", "Dream"))
def test_the_usual_block_size(model_type):
    """32 for the families whose block size is the decoder's choice."""
    assert targets.choose_block_size("config.json", {"model_type": model_type}, "x/y", None, False) == 32


# ------------------------------------------------------------------------------------------------------- prompts


def encode(tokenizer, prompt):
    return dlm.Target.encode(SimpleNamespace(tokenizer=tokenizer), prompt).tolist()


def test_the_real_sdar_prompt():
    """SDAR-8B's own template and tokens (its vocabulary cut to what is needed here, with its ids): ChatML, no system
    prompt, no think tags."""
    folder = os.path.join(CHECKPOINTS, "golden-sdar-tokenizer")
    tokenizer = targets.load_tokenizer(folder, targets.SDAR)
    user, answer = [151644, 872, 198], [151645, 198, 151644, 77091, 198]
    assert encode(tokenizer, "What is 17 plus 25?") == (
        user + [3838, 374, 220, 16, 22, 5519, 220, 17, 20, 30] + answer
    )  # one token a digit
    assert encode(tokenizer, "naïve café\n") == user + [3376, 37572, 586, 51950, 198] + answer
    path, raw = targets.read_folder(folder)
    assert targets.read_ids(path, raw, targets.SDAR, tokenizer, 151936) == (151669, {151643, 151645})
    raw.pop("mask_token_id"), raw.pop("eos_token_id")
    assert targets.read_ids(path, raw, targets.SDAR, tokenizer, 151936) == (151669, {151643, 151645})


def test_the_prompt_of_llada2():
    """The table's template, tokenised: thinking off, then the message."""
    target, _ = golden("llada2")
    shown = target.tokenizer.convert_ids_to_tokens(target.encode("What is t20"))
    system, human = (
        "<role> SYSTEM </role> detailed thinking off <|role_end|>",
        "<role> HUMAN </role> What is t20 <|role_end|>",
    )
    assert shown == [*system.split(), *human.split(), "<role>", "ASSISTANT", "</role>"]


@pytest.mark.parametrize("family, source, right", [
    (targets.SDAR, "golden-sdar-tokenizer", "<|im_start|>user\nA {}\n'\"<|im_end|>\n<|im_start|>assistant\n"),
    (targets.DREAM, "golden-sdar-tokenizer", "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
     "<|im_start|>user\nA {}\n'\"<|im_end|>\n<|im_start|>assistant\n"),
    (targets.LLADA, "golden-llada2", "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nA {}\n'\"<|eot_id|>"
     "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    (targets.LLADA2, "golden-llada2", "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>A {}\n'\""
     "<|role_end|><role>ASSISTANT</role>"),
])  # fmt: skip
def test_templates_in_the_table(family, source, right, tmp_path):
    """A tokenizer without a template gets its family's, which leaves the message as it is."""
    folder = str(tmp_path / "tokenizer")
    shutil.copytree(
        os.path.join(CHECKPOINTS, source), folder, ignore=shutil.ignore_patterns("*.jinja", "*.safetensors")
    )
    path = os.path.join(folder, "tokenizer_config.json")
    settings = targets.read_json(path)
    settings.pop("chat_template", None)
    with open(path, "w") as file:
        json.dump(settings, file)
    chat = [{"role": "user", "content": "A {}\n'\""}]
    tokenizer = targets.load_tokenizer(folder, family)
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == right


def test_a_template_of_the_checkpoint_comes_first(tmp_path):
    """A checkpoint's own template is used where there is one."""
    folder = copy("llada2", tmp_path / "own")
    with open(os.path.join(folder, "chat_template.jinja"), "w") as file:
        file.write("<role>{{ messages[0].content }}</role>")
    tokenizer = targets.load_tokenizer(folder, targets.LLADA2)
    assert tokenizer.convert_ids_to_tokens(encode(tokenizer, "What")) == ["<role>", "What", "</role>"]


def test_tokens_off_their_ids_are_refused(tmp_path):
    """A vocabulary that is not whole would shift the ids of all added tokens: refused, not decoded with."""
    folder = str(tmp_path / "short")
    shutil.copytree(os.path.join(CHECKPOINTS, "golden-sdar-tokenizer"), folder)
    path = os.path.join(folder, "vocab.json")
    words = {word: i for word, i in targets.read_json(path).items() if i < 151643}
    with open(path, "w") as file:
        json.dump(words, file)
    with pytest.raises(ValueError, match="has id .*, not 1516") as error:
        targets.load_tokenizer(folder, targets.SDAR)
    assert one_sentence(error)


# ------------------------------------------------------------------------------------------------ random weights


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_of_a_folder(family, tmp_path):
    """A model of the size that config.json says, without weights: N(0, 0.02²), norms 1, and RoPE as in the real one."""
    folder = copy(family, tmp_path / "bare")
    remove_weights(folder)
    torch.manual_seed(0)
    target, (real, expected) = (
        targets.load(folder, dtype=torch.bfloat16, block_size=L, random_weights=True),
        golden(family),
    )
    tensors, right = target.model.state_dict(), real.model.state_dict()
    assert {k: v.shape for k, v in tensors.items()} == {k: v.shape for k, v in right.items()}
    assert all(tensor.isfinite().all() for tensor in tensors.values()) and target.dtype == torch.bfloat16
    assert tensors["lm_head.weight"].float().std().item() == pytest.approx(0.02, rel=0.1)
    assert (tensors["model.norm.weight"] == 1).all()
    assert torch.equal(target.model.model.rotary_emb.inv_freq, real.model.model.rotary_emb.inv_freq)
    assert uncached(target, expected["ids"]).isfinite().all()
    assert (target.mask_id, target.stop_ids, target.attention) == (real.mask_id, real.stop_ids, real.attention)


@pytest.mark.parametrize("alias", ["sdar-8b", "llada2.0-mini", "llada-8b", "dream-7b"])
def test_random_weights_of_an_alias(alias, monkeypatch):
    """From the table alone: no file, no network, no tokenizer; here with the sizes made small."""
    hub, model_type, _ = targets.HUB[alias]
    small = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=8, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=4, num_experts=16, moe_intermediate_size=8, n_layers=2, d_model=16, mlp_hidden_size=8,
                 n_heads=4, n_kv_heads=4)  # fmt: skip
    known = targets.FAMILIES[model_type].known
    for name in [name for name in small if name in known]:
        monkeypatch.setitem(known, name, small[name])
    if model_type == "sdar":
        monkeypatch.setitem(targets.HUB, alias, (hub, model_type, (16, 8, 2, 4)))
    monkeypatch.setattr(targets, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    target = targets.load(alias, dtype=torch.bfloat16, random_weights=True)
    assert target.block_size == 32 and target.tokenizer is None
    assert target.mask_id == known["mask_token_id"] and target.stop_ids == set(known["stop_token_ids"])
    assert targets.load(alias, random_weights=True, block_size=16).block_size == 16
    if target.attention == "block":
        out = target.forward([(target.mask_id,) * 32], [1], target.prefill(list(range(32))), {})
        assert out.states.shape == (1, 32)


# -------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub's library and no network; returns a function that puts a golden checkpoint in it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def put(family, hub):
        root, revision = tmp_path / f"models--{hub.replace('/', '--')}", "0" * 40
        (root / "refs").mkdir(parents=True)
        (root / "refs" / "main").write_text(revision)
        return copy(family, root / "snapshots" / revision)

    return put


@pytest.mark.parametrize(
    "family, alias",
    [
        ("sdar", "sdar-1.7b"),
        ("sdar", "sdar-4b"),
        ("sdar", "sdar-8b"),
        ("llada2", "llada2.0-mini"),
        ("llada", "llada-8b"),
        ("dream", "dream-7b"),
    ],
)
def test_a_cached_checkpoint_needs_no_network(family, alias, cache):
    """By alias and by hub id; SDAR's block size, which its config.json lacks, comes from the repository's name."""
    hub = targets.HUB[alias][0]
    edit_config(block_size=None)(cache(family, hub))
    for name in (alias, hub):
        target = targets.load(name)
        assert target.block_size == 32 and type(target.model) is targets.FAMILIES[targets.HUB[alias][1]].model
    assert targets.load(alias, block_size=16).block_size == 16


def test_a_sibling_of_another_block_size(cache):
    """Any repository of the hub can be named; -b16 says the block size."""
    edit_config(block_size=None)(cache("sdar", "JetLM/SDAR-8B-Chat-b16"))
    assert targets.load("JetLM/SDAR-8B-Chat-b16").block_size == 16


@pytest.mark.parametrize("name", [*targets.HUB, "JetLM/SDAR-8B-Chat-b16", "no-such/repository"])
def test_an_unreachable_hub_is_one_sentence(name, cache):
    """Neither cached nor to be fetched."""
    refused(name, named="cannot fetch .*/.* from the hub.*network")


def test_an_incomplete_cache_is_not_taken_for_whole(cache):
    """A download that broke off is fetched on, and without a network refused."""
    shards(cache("llada", "GSAI-ML/LLaDA-8B-Instruct"), lost=True)
    refused("llada-8b", named="model-00002-of-00002.safetensors|cannot fetch")


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


# ----------------------------------------------------------------------------------------------- what is refused


def shards(folder, lost=False):
    """Splits the weights of `folder` in two files with an index, as on the hub; lost: the second is not there."""
    whole = os.path.join(folder, "model.safetensors")
    tensors = load_file(whole)
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, half in list(halves.items())[: 1 if lost else 2]:
        save_file({name: tensors[name] for name in half}, os.path.join(folder, file), metadata={"format": "pt"})
    with open(whole + ".index.json", "w") as index:
        json.dump({"metadata": {}, "weight_map": {name: file for file, half in halves.items() for name in half}}, index)
    os.remove(whole)


TENSOR = {  # in the second layer: a matrix of each family, by its name on the hub
    "sdar": "model.layers.1.mlp.up_proj.weight",
    "llada2": "model.layers.1.mlp.experts.3.up_proj.weight",
    "llada": "model.transformer.blocks.1.ff_out.weight",
    "dream": "model.layers.1.self_attn.q_proj.bias",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", ("missing", "surplus", "layer", "misshaped", "top", "transposed"))
def test_tensors_that_do_not_fit_are_refused(family, fault, tmp_path):
    """A missing, surplus or misshaped tensor is named, and nothing is filled up or cut to size."""
    folder, name = copy(family, tmp_path / "broken"), TENSOR[family]
    top = "model.transformer.ln_f.weight" if family == "llada" else "model.norm.weight"
    head = "model.transformer.ff_out.weight" if family == "llada" else "lm_head.weight"
    edit, named = {
        "missing": (lambda t: t.pop(name), "missing.*layers.1.|missing.*" + name),
        "surplus": (lambda t: t.update({"model.extra.weight": torch.zeros(2)}), "model.extra.weight"),
        "layer": (lambda t: t.update({name.replace(".1.", ".46."): t[name].clone()}), r"surplus.*\.46\."),
        "misshaped": (lambda t: t.update({name: t[name][:-1].clone()}), name + ".*shape"),
        "top": (lambda t: t.update({top: torch.zeros(63)}), "mismatched.*norm.weight.*63"),
        "transposed": (lambda t: t.update({head: t[head].T.contiguous()}), "mismatched.*lm_head"),
    }[fault]
    edit_weights(edit)(folder)
    refused(folder, block_size=L, named=named)


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_files_are_refused(family, tmp_path):
    """Truncated, lost or missing files of weights; whole ones in two shards are read."""
    folder = copy(family, tmp_path / "whole")
    right = targets.load(folder, block_size=L).model.state_dict()
    shards(folder)
    got = targets.load(folder, block_size=L).model.state_dict()
    assert all(torch.equal(got[name], right[name]) for name in right)
    second = os.path.join(folder, "model-00002-of-00002.safetensors")
    os.truncate(second, os.path.getsize(second) - 100)
    refused(folder, block_size=L, named="cannot be read")
    os.remove(second)
    refused(folder, block_size=L, named="lacks 1 file.*model-00002-of-00002.safetensors")
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        file.write("{}")
    refused(folder, block_size=L, named="weight_map")
    folder = copy(family, tmp_path / "other")
    truncate(folder)
    refused(folder, block_size=L, named="cannot be read")
    remove_weights(folder)
    refused(folder, block_size=L, named="lacks.*model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_broken_configurations_are_refused(family, tmp_path):
    """No object, a field that shapes the model missing or of another kind, scaled RoPE, ids off the vocabulary."""
    width = "d_model" if family == "llada" else "hidden_size"
    cases = [
        (edit_config(b"[1]"), "config.json"),
        (edit_config(b"{"), "config.json"),
        (edit_config(**{width: None}), width),
        (edit_config(**{width: "wide"}), "config.json"),
        (edit_config(rope_theta=None), "rope_theta"),
        (edit_config(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
        (edit_config(mask_token_id=500), "mask_token_id"),
        (edit_config(eos_token_id=500), "stop ids"),
        (edit_config(eos_token_id=-1), "stop ids"),
    ]
    for i, (edit, named) in enumerate(cases):
        folder = copy(family, tmp_path / str(i))
        edit(folder)
        refused(folder, block_size=L, named=named)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block_size", (0, -8, 2.0, "8"))
def test_wrong_block_sizes_are_refused(family, block_size):
    """Only a whole number of at least 1."""
    refused(os.path.join(CHECKPOINTS, f"golden-{family}"), block_size=block_size, named="block size")


def test_contradicting_block_sizes_are_refused(tmp_path):
    """What config.json says the model was trained with is not overridden, neither by the argument nor by the name."""
    refused(os.path.join(CHECKPOINTS, "golden-sdar"), block_size=16, named="block size 16 .* 8")
    refused("embedded", block_size=8, named="block size 8 .* 32")
    refused(copy("sdar", tmp_path / "SDAR-1.7B-Chat-b32"), named="block size 32 .* 8")
    folder = copy("sdar", tmp_path / "none")
    edit_config(block_size=None)(folder)
    refused(folder, named="names no block_size")


@pytest.mark.parametrize("model_type", ("gpt2", "dream", None))
def test_an_unknown_model_type_is_refused(model_type, tmp_path):
    """Another architecture is not guessed at."""
    folder = copy("sdar", tmp_path / "other")
    edit_config(model_type=model_type)(folder)
    refused(folder, named="model_type.*sdar.*llada2_moe.*llada.*Dream")


@pytest.mark.parametrize("name", ("sdar", "sdar-9b", "nowhere/at/all", "../none", "", CHECKPOINTS))
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    """All aliases are listed."""
    for random_weights in (False, True):
        refused(name, random_weights=random_weights, named=".*".join(["no model", "embedded", *targets.HUB]))


@pytest.mark.parametrize("device", ("cuda:99", "gpu", "meta-data"))
def test_an_unknown_device_is_refused(device):
    """Before anything is read."""
    refused("embedded", device, named=f"{device}.*cannot be used")


def test_several_devices_need_accelerate(monkeypatch):
    """device auto is the library's own placement; it and random weights on several devices are refused in words."""
    monkeypatch.setattr(targets, "is_accelerate_available", lambda: False)
    refused("embedded", "auto", named="accelerate")
    monkeypatch.setattr(targets, "is_accelerate_available", lambda: True)
    refused("sdar-1.7b", "auto", random_weights=True, named="one device")


def test_outputs_of_a_spread_model_are_gathered():
    """The hooks that bring outputs to the first device leave a model on one device as it is."""
    target, expected = golden("sdar")
    before = uncached(target, expected["ids"])
    target.model = targets.gather(target.model)
    assert torch.equal(uncached(target, expected["ids"]), before)
