"""The whole in 30 lines: a target, a drafter, and the same text in a fraction of the passes.

    python example.py "Mia has 5 coins. Mia finds 4 more coins. How many coins does Mia have now?"
"""

import sys
from functools import partial

import ddtree
import dlm
import targets
from decoder import Decoder
from drafter import load_drafter
from verify import speculate

PROMPT = "Write a function f(xs) that returns the sum of the squares of the even numbers in xs."

if __name__ == "__main__":
    target = targets.load("embedded")  # or "sdar-8b", a hub id, a folder
    drafter = load_drafter("checkpoints/order")
    decoder = Decoder(gen_len=160)  # exact decoding: one commit a pass
    prompt = target.encode(" ".join(sys.argv[1:]) or PROMPT)  # int64 [P]

    free = dlm.generate(target, decoder, prompt)  # the definition of what the target writes
    spot = speculate(target, decoder, prompt, partial(ddtree.spot, budget=8, drafter=drafter))

    assert spot.written == free.written
    print(target.decode(spot.ids))
    print(f"\n{free.passes['denoise']} passes draft-free, {spot.passes['denoise']} with SPOT")
