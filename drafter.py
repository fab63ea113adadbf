"""The order drafter (paper section 3): predicts where the target commits next, from its last conditionals alone.

`Stale` holds what a round may know: the conditionals of the last verified state, of which the current state is one
transition ahead. `OrderDrafter` reads 72 features of them per masked position and 2 of the hypothetical path, and
gives q(s|y), the distribution over the next committed position s of a hypothetical state y. It reads no hidden state,
no embedding and no text, so one checkpoint serves any target. At T > 0 (section 6) the noise is known, so `Stale` also
tells which token its conditionals would draw at each coming step.

What this file leaves out: growing a tree from q (ddtree.py), training (train.py), and set commits.
"""

import json
import os
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dlm

TOP = 32  # stale probabilities kept per position
STALE_FEATURES = 2 * TOP + 8


@dataclass
class Candidates:
    """What may be committed at one step, at the k stale positions: `tokens`, k lists of 32 ids (zeros where V < 32),
    the one foreseen first; `values` float32 [k, 32], p(v) of each; `confidence` float64 [k], of the first; `ranking`,
    indices 0…k−1 by falling confidence, ties to the lowest position."""

    tokens: list
    values: np.ndarray
    confidence: torch.Tensor
    ranking: list


class Stale:
    """The conditionals of the last verified state, at its k masked positions; read on demand, as not every drafter
    needs all.

    state: tuple of L ids, of block `block`; log_probs float32 or float64 [k, V]; decoder: draws tokens, rounds the
    confidence and breaks ties as it does when committing.
    """

    def __init__(self, decoder, state, mask_id, block, log_probs):
        self.decoder, self.state, self.block, self.log_probs = decoder, state, block, log_probs
        self.positions = [s for s, token in enumerate(state) if token == mask_id]  # k offsets in the block
        self.seen = {}

    def step(self, decided):
        """Decided positions of the block in a state where, of the k stale positions, those in `decided` (bool [k]) are
        decided too."""
        return len(self.state) - len(self.positions) + int(decided.sum())

    def at(self, step):
        """The Candidates of a state with `step` decided positions: section 6.

        At T = 0 they are the likeliest tokens, whatever the step. At T > 0 the noise of that step says which token
        these conditionals would draw, and p(v) is the softmax of the perturbed conditionals [ours].
        """
        step = step if self.decoder.temperature > 0 and self.decoder.noise == "step" else 0
        if step not in self.seen:
            self.seen[step] = self.draw(step)
        return self.seen[step]

    @torch.inference_mode()
    def draw(self, step):
        """The Candidates under the noise of `step`."""
        k, device = len(self.positions), self.log_probs.device
        block, step, position = torch.tensor([[self.block, step, s] for s in self.positions], device=device).T
        perturbed = self.decoder.perturbed(self.log_probs, block, step, position)
        values, tokens = top(perturbed.softmax(-1))
        confidence = self.decoder.read(self.log_probs, tokens[:, 0])[0].double()
        ranking = dlm.commit_order(confidence, torch.ones(k, dtype=torch.bool, device=device))[0]
        return Candidates(tokens.tolist(), values.cpu().numpy(), confidence, ranking.tolist())

    @cached_property
    @torch.inference_mode()
    def features(self):
        """The 72 stale features, float32 [k, 72]: top-32 probabilities, their logs (/10), 8 statistics [ours]. They do
        not depend on the noise."""
        probs, device = self.log_probs.exp(), self.log_probs.device
        best, L, k = top(probs)[0], len(self.state), len(self.positions)
        positions = torch.tensor(self.positions, device=device, dtype=torch.float32)
        order, _ = dlm.commit_order(self.decoder.rounded(probs.amax(-1)), torch.ones_like(positions, dtype=torch.bool))
        statistics = [
            best[:, 0],
            best[:, 0] - best[:, 1],
            torch.special.entr(probs).sum(-1).float(),
            1 - best.sum(-1),
            order.argsort() / L,
            positions / L,
            nearest_decided(self.positions, L, device) / L,
            torch.full((k,), k / L, device=device),
        ]
        return torch.cat([best, best.clamp(min=1e-9).log() / 10, torch.stack(statistics, -1)], -1)

    def noised(self, step):
        """The 4 statistics of the noised conditionals at `step` [ours], float32 [k, 4]: confidence in the token that
        these conditionals would draw, p(v) of it, whether it is the likeliest token, rank of the confidence."""
        seen, device = self.at(step), self.log_probs.device
        first = torch.tensor([tokens[0] for tokens in seen.tokens], device=device)
        rank = torch.tensor(seen.ranking, device=device).argsort() / len(self.state)
        value = torch.from_numpy(seen.values[:, 0]).to(device)
        return torch.stack([seen.confidence.float(), value, (first == self.log_probs.argmax(-1)).float(), rank], -1)


def top(probs):
    """The 32 most probable tokens of each row: probabilities float32 [k, 32] and ids int64 [k, 32], zeros where V <
    32."""
    values, tokens = probs.topk(min(TOP, probs.shape[1]), -1)
    return tuple(nn.functional.pad(part, (0, TOP - part.shape[1])) for part in (values.float(), tokens))


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
    `project`; every hypothetical state then adds its 2 path features and, if `noised`, the 4 statistics of the noised
    conditionals at its own step, so that one drafter serves every temperature [ours].
    """

    def __init__(self, width=128, layers=3, heads=8, hidden=512, block_size=32, noised=False):
        super().__init__()
        self.shape = {"width": width, "layers": layers, "heads": heads, "hidden": hidden, "block_size": block_size}
        self.shape["noised"] = noised
        self.about = {}  # what it was trained on
        self.input = nn.Linear(STALE_FEATURES + 2 + 4 * noised, width)
        self.position = nn.Embedding(block_size, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, 1))

    def project(self, features, positions):
        """features [..., k, 72], positions int64 [..., k] -> [..., k, width]."""
        return nn.functional.linear(features, self.input.weight[:, :STALE_FEATURES], self.input.bias) + self.position(
            positions
        )

    def forward(self, projected, decided, noised=None):
        """Logits over positions of N hypothetical states: projected [N or 1, k, width], decided bool [N, k], noised
        [N or 1, k, 4] -> [N, k].

        decided: positions already committed on the path; their logit is −inf, and their number is the depth.
        """
        depth = decided.sum(-1, keepdim=True) / self.shape["block_size"]
        path = [decided.to(projected.dtype)[..., None], depth.to(projected.dtype).expand(decided.shape)[..., None]]
        if self.shape["noised"]:
            path.append(noised.to(projected.dtype).expand(len(decided), -1, -1))
        x = projected + nn.functional.linear(torch.cat(path, -1), self.input.weight[:, STALE_FEATURES:])
        return self.head(self.encoder(x)).squeeze(-1).masked_fill(decided, -torch.inf)

    def order(self, stale):
        """For one round: a function from decided, bool numpy [N, k] with equally many in every row, to q, float32 numpy
        [N, k]."""
        device = self.input.weight.device

        @cache  # once a round, and only if it is asked for
        def projected():
            return self.project(stale.features.to(device), torch.tensor(stale.positions, device=device))[None]

        @torch.inference_mode()
        def q(decided):
            noised = stale.noised(stale.step(decided[0])).to(device)[None] if self.shape["noised"] else None
            return self(projected(), torch.from_numpy(decided).to(device), noised).softmax(-1).cpu().numpy()

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
            config = json.load(file)
        drafter = OrderDrafter(**config.pop("shape"))
        drafter.about = config
        drafter.load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
    except Exception as error:  # whatever a broken file makes torch or json raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"the drafter in {folder} cannot be loaded ({reason}): fetch or train it again") from None
    if not all(weight.isfinite().all() for weight in drafter.parameters()):
        raise ValueError(f"the drafter in {folder} holds weights that are not finite: fetch or train it again")
    return drafter.eval().to(device)
