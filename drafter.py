"""The order drafter (paper section 3): predicts where the target commits next, from its last conditionals alone.

`Stale` holds what a round may know: the conditionals of the last verified state, of which the current state is one
transition ahead. `OrderDrafter` reads 72 features of them per masked position and 2 of the hypothetical path, and
gives q(s|y), the distribution over the next committed position s of a hypothetical state y. It reads no hidden state,
no embedding and no text, so one checkpoint serves any target.

What this file leaves out: growing a tree from q (ddtree.py), training (train.py), and set commits.
"""

import json
import os
from functools import cache, cached_property

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dlm

TOP = 32  # stale probabilities kept per position
STALE_FEATURES = 2 * TOP + 8


class Stale:
    """The conditionals of the last verified state, at its k masked positions; read on demand, as not every drafter
    needs all.

    state: tuple of L ids; probs float32 or float64 [k, V]; decoder: rounds the confidence and breaks ties as it
    does when committing.
    """

    def __init__(self, decoder, state, mask_id, probs):
        self.decoder, self.state, self.probs = decoder, state, probs
        self.positions = [s for s, token in enumerate(state) if token == mask_id]  # k offsets in the block

    @cached_property
    def best(self):
        """The 32 most probable tokens of each position: probabilities float32 [k, 32] and ids int64 [k, 32], zeros
        where V < 32."""
        top, tokens = self.probs.topk(min(TOP, self.probs.shape[1]), -1)
        return tuple(nn.functional.pad(part, (0, TOP - part.shape[1])) for part in (top.float(), tokens))

    @cached_property
    def tokens(self):
        """The most probable token ids of each position, best first: k lists of 32."""
        return self.best[1].tolist()

    @cached_property
    def confidence(self):
        """Top-1 probability at the decoder's precision, [k], in the type of the probabilities."""
        return self.decoder.rounded(self.probs.amax(-1))

    @cached_property
    def ranking(self):
        """Indices 0…k−1 by falling confidence, ties to the lowest position: a list."""
        return dlm.commit_order(self.confidence, torch.ones_like(self.confidence, dtype=torch.bool))[0].tolist()

    @cached_property
    @torch.inference_mode()
    def features(self):
        """The 72 stale features, float32 [k, 72]: top-32 probabilities, their logs (/10), 8 statistics [ours]."""
        top, device = self.best[0], self.probs.device
        L, k = len(self.state), len(self.positions)
        positions = torch.tensor(self.positions, device=device, dtype=torch.float32)
        rank = torch.empty(k, device=device)
        rank[self.ranking] = torch.arange(k, device=device, dtype=torch.float32)
        entropy = torch.special.entr(self.probs).sum(-1).float()
        statistics = [
            top[:, 0],
            top[:, 0] - top[:, 1],
            entropy,
            1 - top.sum(-1),
            rank / L,
            positions / L,
            nearest_decided(self.positions, L, device) / L,
            torch.full((k,), k / L, device=device),
        ]
        return torch.cat([top, top.clamp(min=1e-9).log() / 10, torch.stack(statistics, -1)], -1)


def nearest_decided(positions, L, device):
    """Distance from each of the k masked `positions` to the nearest decided one of its block, L where there is none.
    float32 [k]."""
    decided = [s for s in range(L) if s not in set(positions)]
    if not decided:
        return torch.full((len(positions),), float(L), device=device)
    return torch.tensor([float(min(abs(s - d) for d in decided)) for s in positions], device=device)


class OrderDrafter(nn.Module):
    """q(s|y): a transformer encoder over the masked positions of the stale state. 617,089 parameters (the
    paper: 0.62 M; the norms and the head are ours).

    What a round does not change, the projection of the 72 stale features and the position, is computed once by
    `project`; every hypothetical state then adds its 2 path features.
    """

    def __init__(self, width=128, layers=3, heads=8, hidden=512, block_size=32):
        super().__init__()
        self.shape = {"width": width, "layers": layers, "heads": heads, "hidden": hidden, "block_size": block_size}
        self.input = nn.Linear(STALE_FEATURES + 2, width)
        self.position = nn.Embedding(block_size, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, 1))

    def project(self, features, positions):
        """features [..., k, 72], positions int64 [..., k] -> [..., k, width]."""
        return nn.functional.linear(features, self.input.weight[:, :STALE_FEATURES], self.input.bias) + self.position(
            positions
        )

    def forward(self, projected, decided):
        """Logits over positions of N hypothetical states: projected [N or 1, k, width], decided bool [N, k] -> [N, k].

        decided: positions already committed on the path; their logit is −inf, and their number is the depth.
        """
        depth = decided.sum(-1, keepdim=True) / self.shape["block_size"]
        path = torch.stack([decided.to(projected.dtype), depth.to(projected.dtype).expand(decided.shape)], -1)
        x = projected + nn.functional.linear(path, self.input.weight[:, STALE_FEATURES:])
        return self.head(self.encoder(x)).squeeze(-1).masked_fill(decided, -torch.inf)

    def order(self, stale):
        """For one round: a function from decided, bool numpy [N, k], to q, float32 numpy [N, k]."""
        device = self.input.weight.device

        @cache  # once a round, and only if it is asked for
        def projected():
            return self.project(stale.features.to(device), torch.tensor(stale.positions, device=device))[None]

        @torch.inference_mode()
        def q(decided):
            return self(projected(), torch.from_numpy(decided).to(device)).softmax(-1).cpu().numpy()

        return q

    def save(self, folder, **about):
        """Write config.json (shape, and what it was trained on) and model.safetensors."""
        os.makedirs(folder, exist_ok=True)
        save_file(self.state_dict(), os.path.join(folder, "model.safetensors"))
        with open(os.path.join(folder, "config.json"), "w") as file:
            json.dump({"shape": self.shape, **about}, file, indent=1)


def load_drafter(folder, device="cpu"):
    """An OrderDrafter from a folder that `save` wrote. Raises one-sentence errors for missing, broken or unfit
    files."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"no drafter in {folder!r}: give a folder that holds one, or train one with train.py order"
        )
    try:
        with open(path) as file:
            drafter = OrderDrafter(**json.load(file)["shape"])
        drafter.load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
    except Exception as error:  # whatever a broken file makes torch or json raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the drafter in {folder} cannot be loaded ({reason}): fetch or train it again") from None
    if not all(weight.isfinite().all() for weight in drafter.parameters()):
        raise ValueError(f"the drafter in {folder} holds weights that are not finite: fetch or train it again")
    return drafter.eval().to(device)
