"""The order drafter (paper section 3): predicts where the target commits next, from its last conditionals alone.

`Stale` holds what a round may know: the conditionals of the last verified state, of which the current state is one
transition ahead. `OrderDrafter` reads 72 features of them per masked position and 2 of the hypothetical path, and
gives q(s|y), the distribution over the next committed position s of a hypothetical state y. It reads no hidden state, no
embedding and no text, so one checkpoint serves any target.

What this file leaves out: growing a tree from q (ddtree.py), training (train.py), and set commits.
"""
import json
import os
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

import dlm

TOP = 32                            # stale probabilities kept per position
STALE_FEATURES = 2 * TOP + 8


@dataclass
class Stale:
    """The conditionals of the last verified state, at its k masked positions.

    positions: list of k offsets in the block; tokens int64 [k, 32] and top float32 [k, 32]: the 32 most probable tokens;
    confidence [k]: top-1 probability at the decoder's precision; order: list, indices 0…k−1 by falling confidence, ties to the
    lowest position, just as the decoder breaks them; features float32 [k, 72].
    """
    positions: list
    tokens: torch.Tensor
    top: torch.Tensor
    confidence: torch.Tensor
    order: list
    features: torch.Tensor


@torch.inference_mode()
def read_stale(decoder, state, mask_id, probs):
    """The Stale of a verified `state` (tuple of L ids) and its conditionals `probs` [k, V]; section 3, statistics [ours]."""
    L, k = len(state), len(probs)
    masked = torch.tensor([token == mask_id for token in state], device=probs.device)
    positions = masked.nonzero()[:, 0]
    top, tokens = probs.topk(min(TOP, probs.shape[1]), -1)
    top = nn.functional.pad(top, (0, TOP - top.shape[1])).float()                       # a vocabulary under 32 leaves zeros
    confidence = decoder.rounded(probs.max(-1).values).float()
    order, _ = dlm.commit_order(confidence, torch.ones_like(confidence, dtype=torch.bool))
    rank = torch.empty(k, device=probs.device).scatter_(0, order, torch.arange(k, device=probs.device, dtype=torch.float32))
    entropy = torch.special.entr(probs).sum(-1).float()
    distance = nearest_decided(masked)[positions]
    statistics = torch.stack([top[:, 0], top[:, 0] - top[:, 1], entropy, 1 - top.sum(-1), rank / L, positions / L, distance / L,
                              torch.full((k,), k / L, device=probs.device)], -1)
    features = torch.cat([top, top.clamp(min=1e-9).log() / 10, statistics], -1)
    return Stale(positions.tolist(), tokens, top, confidence, order.tolist(), features)


def nearest_decided(masked):
    """Distance from every position to the nearest decided one of its block, L where there is none. bool [L] -> float32 [L]."""
    L = len(masked)
    at = torch.arange(L, device=masked.device, dtype=torch.float32)
    gaps = (at[:, None] - at).abs().masked_fill(masked, L)
    return gaps.min(1).values


class OrderDrafter(nn.Module):
    """q(s|y): a transformer encoder over the masked positions of the stale state. 617,089 parameters as in the paper.

    What a round does not change, the projection of the 72 stale features and the position, is computed once by `project`;
    every hypothetical state then adds its 2 path features.
    """

    def __init__(self, width=128, layers=3, heads=8, hidden=512, block_size=32):
        super().__init__()
        self.shape = {"width": width, "layers": layers, "heads": heads, "hidden": hidden, "block_size": block_size}
        self.input = nn.Linear(STALE_FEATURES + 2, width)
        self.position = nn.Embedding(block_size, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0., batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, 1))

    def project(self, features, positions):
        """features [..., k, 72], positions int64 [..., k] -> [..., k, width]."""
        return nn.functional.linear(features, self.input.weight[:, :STALE_FEATURES], self.input.bias) + self.position(positions)

    def forward(self, projected, decided):
        """Logits over positions of N hypothetical states: projected [N or 1, k, width], decided bool [N, k] -> [N, k].

        decided: positions already committed on the path; their logit is −inf, and their number is the depth.
        """
        depth = decided.sum(-1, keepdim=True) / self.shape["block_size"]
        path = torch.stack([decided.to(projected.dtype), depth.to(projected.dtype).expand(decided.shape)], -1)
        x = projected + nn.functional.linear(path, self.input.weight[:, STALE_FEATURES:])
        return self.head(self.encoder(x)).squeeze(-1).masked_fill(decided, -torch.inf)

    @torch.inference_mode()
    def order(self, stale):
        """For one round: a function from decided, bool numpy [N, k], to q, float32 numpy [N, k]."""
        device = self.input.weight.device
        projected = self.project(stale.features.to(device), torch.tensor(stale.positions, device=device))[None]

        @torch.inference_mode()
        def q(decided):
            return self(projected, torch.from_numpy(decided).to(device)).softmax(-1).cpu().numpy()
        return q

    def save(self, folder, **about):
        """Write config.json (shape, and what it was trained on) and model.safetensors."""
        os.makedirs(folder, exist_ok=True)
        save_file(self.state_dict(), os.path.join(folder, "model.safetensors"))
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump({"shape": self.shape, **about}, file, indent=1)


def load_drafter(folder, device="cpu"):
    """An OrderDrafter from a folder that `save` wrote. Raises one-sentence errors for missing, broken or unfit files."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"no drafter in {folder!r}: give a folder with config.json and model.safetensors, or train one with train.py order")
    try:
        with open(path) as file:
            drafter = OrderDrafter(**json.load(file)["shape"])
        drafter.load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
    except (SafetensorError, OSError, RuntimeError, KeyError, TypeError, json.JSONDecodeError) as error:
        first = " ".join(str(error).split())
        raise ValueError(f"the drafter in {folder} cannot be loaded ({first}): fetch or train it again") from None
    return drafter.eval().to(device)
