"""Variants of Hopper's attention on trial, chosen by name in a script; empty for users. What loses is removed.

`attn31.py` times them. Predictions, written before any timing (H100's figures of the notes, or H200's as marked):

- heads_apart (backward, few pieces of shared heads): a part of a piece has all blocks of some query heads, not some
  blocks of all. All parts of a head then begin at one block, and a turn is at most one hand-over away. A simulation of
  132 programs (a block 1, a hand-over 1.2) says 284 for 378 blocks in order, 259 for 285 unordered: 8/1 x 8192 causal
  814 -> about 640 us in order, 660 -> about 620 unordered. dq keeps its bits; dk and dv have other roundings.
- held (forward): queries are a register operand of later blocks' scores. At D 80 in blocks of 64 keys, reads of shared
  memory fall from 325 to 245 of 352 tensor-core cycles: 573 -> 630 TFLOP/s (0.83 of D 128). At D 128 from 0.875 to 0.75
  of the products' cycles: 0 to 2%, a window 1 to 3%. Results are the same bits.
- three_groups (window at D 128): 3 groups of 64 keys; each group sees 17 half blocks for 18, and two multiply while one
  ends its tile. Rounds fall from 0.97 to 0.95 full: 511 -> 560 TFLOP/s (0.74 of full), or a loss if 128 bytes of shared
  memory a cycle bind. keys64+held: 17 half blocks, two groups: 530. no_turns: level.
- one_room (backward, D 256): dQ leaves in 4 boxes of 64 columns a block for 8 of 32: half the fences and barriers of
  the third group. 5%. ds_held: it reads dS once into registers, and frees its only place at once: 24 of 472 KB of
  shared memory a block less, 3 to 6%. dq_ahead: the next columns' product runs beside the stores; it spills: 0 to 4%.
"""

ON: set[str] = set()
