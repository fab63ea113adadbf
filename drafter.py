"""The order drafter (paper section 3): predicts where the target commits next, from its last
conditionals alone.

`Stale` holds what a round may know: the conditionals of the last verified state, of which the
current state is one transition ahead. `OrderDrafter` reads 72 features of them per masked position
and 2 of the hypothetical path, and gives q(s|y), the distribution over the next committed position
s of a hypothetical state y. It reads no hidden state, no embedding and no text, so one checkpoint
serves any target. At T > 0 (paper section 6) the noise is known, so `Stale` also tells which token
its conditionals would draw at each coming step.

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

import command
from decoder import commit_order

TOP = 32  # stale probabilities kept per position
STALE_FEATURES = 2 * TOP + 8
PATH_FEATURES = 2
NOISE_FEATURES = 4
LARGEST = 1 << 14  # of a drafter's sizes


# ---------------------------------------------------------------------------- what a round may know


@dataclass
class Candidates:
    """What may be committed at one step, at the k stale positions."""

    tokens: list  # k lists of 32 ids, the one foreseen first (zeros where V < 32)
    values: np.ndarray  # float32 [k, 32], p(v) of each
    confidence: torch.Tensor  # float64 [k], in the first
    ranking: list  # indices 0 … k−1 by falling confidence, ties to the lowest position


class Stale:
    """The conditionals of the last verified state, at its k masked positions.

    decoder: draws tokens, rounds the confidence and breaks ties as it does when committing; state:
    tuple of L ids, of block `block`; log_probs: float32 or float64 [k, V]. What a drafter reads of
    them is made on demand, as not every drafter needs all.

    >>> from decoder import Decoder
    >>> log_probs = torch.tensor([[.6, .4], [.1, .9]]).log()  # positions 0 and 2; 7: undecided
    >>> stale = Stale(Decoder(), (7, 1, 7), 7, 0, log_probs)
    >>> stale.positions, stale.candidates(1).ranking, stale.candidates(1).tokens[1][:2]
    ([0, 2], [1, 0], [1, 0])
    """

    def __init__(self, decoder, state, mask_id, block, log_probs):
        self.decoder, self.state, self.block, self.log_probs = decoder, state, block, log_probs
        self.positions = [s for s, token in enumerate(state) if token == mask_id]  # k offsets
        self.known = {}  # Candidates by step

    def step(self, decided):
        """Decided positions of the block in a state where, of the k stale positions, those in
        `decided` (bool [k]) are decided too."""
        return len(self.state) - len(self.positions) + int(decided.sum())

    def candidates(self, step):
        """The Candidates of a state with `step` decided positions (paper section 6).

        At T = 0 they are the likeliest tokens, whatever the step. At T > 0 the noise of that step
        says which token these conditionals would draw, and p(v) is the softmax of the perturbed
        conditionals [ours].
        """
        # without noise, or with noise that no step names, one answer serves all steps
        if self.decoder.temperature == 0 or self.decoder.noise != "step":
            step = 0
        if step not in self.known:
            self.known[step] = self.draw(step)
        return self.known[step]

    @torch.inference_mode()
    def draw(self, step):
        """The Candidates under the noise of `step`."""
        device = self.log_probs.device
        position = torch.tensor(self.positions, device=device)  # [k]
        block, step = (torch.full_like(position, number) for number in (self.block, step))
        perturbed = self.decoder.perturbed(self.log_probs, block, step, position)
        values, tokens = top(perturbed.softmax(-1))  # [k, 32] each
        confidence = self.decoder.confidence_in(tokens[:, 0], self.log_probs).double()
        ranking, _ = commit_order(confidence, torch.ones_like(position, dtype=torch.bool))
        return Candidates(tokens.tolist(), values.cpu().numpy(), confidence, ranking.tolist())

    @cached_property
    @torch.inference_mode()
    def features(self):
        """The 72 stale features, float32 [k, 72], which do not depend on the noise: the top-32
        probabilities, their logs (/10), and the 8 statistics of paper section 3 [ours]."""
        probs = self.log_probs.exp()  # [k, V]
        best, _ = top(probs)  # [k, 32]
        L, k, device = len(self.state), len(self.positions), probs.device
        offset = torch.tensor(self.positions, device=device, dtype=torch.float32)
        confidence = self.decoder.rounded(probs.amax(-1))
        order, _ = commit_order(confidence, torch.ones_like(offset, dtype=torch.bool))
        rank = order.argsort()  # order lists the positions by rank; this is the rank of each
        statistics = [
            best[:, 0],  # top-1 probability
            best[:, 0] - best[:, 1],  # its lead over the second
            torch.special.entr(probs).sum(-1).float(),  # entropy, in nats
            1 - best.sum(-1),  # mass outside the top 32
            rank / L,  # rank of the confidence among masked positions
            offset / L,  # offset in the block
            nearest_decided(self.positions, L, device) / L,  # distance to the nearest decided one
            torch.full((k,), k / L, device=device),  # fraction still masked
        ]
        logs = best.clamp(min=1e-9).log() / 10
        return torch.cat([best, logs, torch.stack(statistics, -1)], -1)

    def noised(self, step):
        """The 4 statistics of the noised conditionals at `step`, float32 [k, 4] [ours]."""
        seen, device = self.candidates(step), self.log_probs.device
        first = torch.tensor([tokens[0] for tokens in seen.tokens], device=device)
        rank = torch.tensor(seen.ranking, device=device).argsort()
        statistics = [
            seen.confidence.float(),  # confidence in the token that would be drawn
            torch.from_numpy(seen.values[:, 0]).to(device),  # p(v) of it
            (first == self.log_probs.argmax(-1)).float(),  # whether it is the likeliest
            rank / len(self.state),  # rank of the confidence
        ]
        return torch.stack(statistics, -1)


def top(probs):
    """The 32 most probable tokens of each row of [k, V], zeros where V < 32: probabilities float32
    [k, 32] and ids int64 [k, 32]."""
    values, tokens = probs.topk(min(TOP, probs.shape[1]), -1)
    missing = (0, TOP - values.shape[1])
    return nn.functional.pad(values.float(), missing), nn.functional.pad(tokens, missing)


def nearest_decided(positions, L, device="cpu"):
    """Distance from each of the k masked `positions` to the nearest decided one of its block, L
    where there is none. float32 [k].

    >>> nearest_decided([0, 1, 3], 4).tolist()
    [2.0, 1.0, 1.0]
    """
    masked = set(positions)
    decided = [s for s in range(L) if s not in masked]
    distances = [min((abs(s - d) for d in decided), default=L) for s in positions]
    return torch.tensor(distances, dtype=torch.float32, device=device)


# -------------------------------------------------------------------------------- the order drafter


class OrderDrafter(nn.Module):
    """q(s|y): a transformer encoder over the masked positions of the stale state. 617,089
    parameters (the paper: 0.62 M; the norms and the head are ours).

    What a round does not change, the projection of the 72 stale features and the position, is
    computed once by `project`; every hypothetical state then adds its 2 path features and, if
    `noised`, the 4 statistics of the noised conditionals at its own step, so that one drafter
    serves every temperature [ours]. hidden: width of the feed-forward layers.
    """

    def __init__(self, width=128, layers=3, heads=8, hidden=512, block_size=32, noised=False):
        super().__init__()
        self.shape = {
            "width": width, "layers": layers, "heads": heads, "hidden": hidden,
            "block_size": block_size, "noised": noised,
        }  # fmt: skip
        self.about = {}  # what it was trained on
        features = STALE_FEATURES + PATH_FEATURES + NOISE_FEATURES * noised
        self.input = nn.Linear(features, width)
        self.position = nn.Embedding(block_size, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        last = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(layer, layers, last, enable_nested_tensor=False)
        self.head = nn.Sequential(
            nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, 1)
        )

    def project(self, features, positions):
        """features [..., k, 72], positions int64 [..., k] -> [..., k, width]."""
        weight = self.input.weight[:, :STALE_FEATURES]
        return nn.functional.linear(features, weight, self.input.bias) + self.position(positions)

    def forward(self, projected, decided, noised=None):
        """Logits over the positions of N hypothetical states, [N, k].

        projected [N or 1, k, width]; decided bool [N, k], the positions already committed on the
        path: their logit is −inf, and their number is the depth; noised [N or 1, k, 4].
        """
        depth = decided.sum(-1, keepdim=True) / self.shape["block_size"]  # [N, 1]
        path = [decided, depth.expand(decided.shape)]
        path = torch.stack([part.to(projected.dtype) for part in path], -1)  # [N, k, 2]
        if self.shape["noised"]:
            noised = noised.to(projected.dtype).expand(len(decided), -1, -1)
            path = torch.cat([path, noised], -1)  # [N, k, 6]
        x = projected + nn.functional.linear(path, self.input.weight[:, STALE_FEATURES:])
        logits = self.head(self.encoder(x)).squeeze(-1)
        return logits.masked_fill(decided, -torch.inf)

    def order(self, stale):
        """For one round: a function from decided, bool numpy [N, k] with equally many in every row,
        to q, float32 numpy [N, k]."""
        device = self.input.weight.device

        @cache  # once a round, and only if it is asked for
        def projected():
            position = torch.tensor(stale.positions, device=device)
            return self.project(stale.features.to(device), position)[None]  # [1, k, width]

        @torch.inference_mode()
        def q(decided):
            noised = None
            if self.shape["noised"]:
                noised = stale.noised(stale.step(decided[0])).to(device)[None]  # [1, k, 4]
            logits = self(projected(), torch.from_numpy(decided).to(device), noised)
            return logits.softmax(-1).cpu().numpy()

        return q

    def save(self, folder, **about):
        """Write config.json (shape, and what it was trained on) and model.safetensors."""
        weights = os.path.join(folder, "model.safetensors")
        command.write(weights, lambda part: save_file(self.state_dict(), part))
        config = json.dumps({"shape": self.shape, **about}, indent=1)
        command.write_text(os.path.join(folder, "config.json"), config)


def load_drafter(folder, device="cpu"):
    """An OrderDrafter from a folder that `save` wrote. FileNotFoundError or ValueError, with one
    sentence, for missing, broken or unfit files."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"no drafter in {folder!r}: give a folder that holds one, or run train.py order"
        )
    again = "fetch or train it again"
    try:
        config = command.read_json(path)
        shape = config.pop("shape")
        weights = load_file(os.path.join(folder, "model.safetensors"))
        # sizes beyond the file's would take for ever to build, and other types load silently
        whole = shape.get("layers", 1) <= len(weights) and max(shape.values()) <= LARGEST
        if not whole or any(tensor.dtype != torch.float32 for tensor in weights.values()):
            raise ValueError("sizes or types that no drafter has")
        drafter = OrderDrafter(**shape)
        drafter.about = config
        drafter.load_state_dict(weights)
    except Exception as error:  # whatever a broken file makes torch or json raise
        why = command.reason(error)
        raise ValueError(f"the drafter in {folder} cannot be loaded ({why}): {again}") from None
    if not all(weight.isfinite().all() for weight in drafter.parameters()):
        raise ValueError(f"the drafter in {folder} holds weights that are not finite: {again}")
    return drafter.eval().to(device)
