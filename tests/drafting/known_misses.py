"""Where the lookahead misses its aims on recorded traces, by how much; test_lookahead allows no more than that.

Each key is trace-mode-costs-narrowest. The aims: at most 1.05 times the milliseconds of the best fixed lookahead, and
at least 0.97 of the speed of plain decoding over any 48 tokens, 0.99 over any 500. For real chats, whose keys are
trace-costs: 1.05 for each kind, and at least 0.93 of plain decoding for each chat.

All others are traces of models of 1 to 3 ms, in which a change of width takes as long as a round: a trial of several
tokens costs two rounds, and a text has to show for how long its kind lasts. These count less than the chats do.
"""

from __future__ import annotations

SLOWER_THAN_BEST = {
    "prose-T0-chain-learning-1": 1.09,
    "prose-T0-chain-learning-2": 1.089,
    "prose-T0-chain-profile-1": 1.174,
    "prose-T0-chain-profile-2": 1.149,
    "prose-T0-draft-learning-1": 1.099,
    "prose-T0-draft-learning-2": 1.139,
    "prose-T0-draft-profile-1": 1.163,
    "prose-T0-draft-profile-2": 1.163,
    "prose-T1-draft-learning-1": 1.079,
    "prose-T1-lookup-learning-1": 1.078,
    "prose-T1-lookup-learning-2": 1.069,
    "prose-T1-lookup-profile-2": 1.205,
    "shallow-T1-lookup-learning-1": 1.119,
    "shallow-T1-lookup-learning-2": 1.141,
    "shallow-T1-lookup-profile-1": 1.095,
    "shallow-T1-lookup-profile-2": 1.114,
}
SLOWEST_48 = {
    "shallow-T0-chain-learning-1": 0.941,
    "shallow-T0-draft-learning-1": 0.947,
    "shallow-T0-draft-learning-2": 0.958,
    "shallow-T1-chain-learning-1": 0.925,
    "shallow-T1-chain-learning-2": 0.967,
    "shallow-T1-chain-profile-2": 0.96,
    "shallow-T1-draft-learning-1": 0.925,
    "shallow-T1-draft-learning-2": 0.955,
    "shallow-T1-draft-profile-2": 0.969,
    "small-T0-draft-learning-1": 0.918,
    "small-T0-draft-learning-2": 0.93,
    "small-T0-draft-profile-2": 0.969,
    "small-T1-chain-learning-1": 0.904,
    "small-T1-chain-learning-2": 0.902,
    "small-T1-chain-profile-1": 0.951,
    "small-T1-chain-profile-2": 0.926,
    "small-T1-draft-learning-1": 0.929,
    "small-T1-draft-learning-2": 0.937,
    "small-T1-draft-profile-2": 0.969,
}
SLOWEST_500 = {
    "shallow-T0-draft-learning-2": 0.988,
    "shallow-T1-draft-learning-1": 0.989,
    "shallow-T1-draft-profile-2": 0.987,
    "small-T0-draft-learning-2": 0.987,
    "small-T0-draft-profile-2": 0.989,
    "small-T1-draft-learning-2": 0.988,
    "small-T1-draft-profile-2": 0.99,
}
KINDS_SLOWER_THAN_BEST = {
    "chats-135m-T0-learning": 1.069,
    "chats-135m-T0-profile": 1.065,
    "chats-135m-T1-learning": 1.053,
    "chats-135m-avx2-T0-learning": 1.09,
    "chats-135m-avx2-T0-profile": 1.056,
    "chats-135m-avx2-T1-learning": 1.053,
    "chats-1b-avx2-T0-learning": 1.064,
    "chats-1b-avx2-T1-learning": 1.056,
}
LOWEST_CHAT = {"chats-135m-T1-profile": 0.924}
