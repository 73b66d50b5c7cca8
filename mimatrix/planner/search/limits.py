"""The limits of the search: where it stops, and when a problem is too large for an exact method.

Each name means one thing everywhere. Nothing here changes what a plan costs, only how near to the optimum it is and how
long the search takes; docs/planner-search.md has the methods.
"""

# Tolerances

SHARE_SLACK = 1e-12
"""How far sums of shares may be from what they should be: they round."""
CERTAIN_GAP = 1e-9
"""Two times that differ by less than this part are equal."""
REPEATED_ROUNDS_GAP = 1e-6
"""Rounds that repeat one size are taken if they are this close to the bound, where an exact search is cheap ..."""
REPEATED_ROUNDS_GAP_LARGE = 2e-3
"""... and this close if it is not."""
SMALL_STAGE_GAP = 1e-4
"""A stage is not searched further this close to its bound, if it was enumerated or memory does not limit it ..."""
STAGE_GAP = 5e-3
"""... and this close otherwise."""
RELAXATION_GAP = 1e-4
"""How exactly the least computing time of a relaxation is found."""
PRICE_GAP = 1e-6
"""How exactly the Lagrangian price of room is found."""
BRACKET_GAP = 1e-2
"""How exactly the first upper bound of a time is found."""

# Bisections

TIME_HALVINGS = 60
"""Of an interval of times."""
PRICE_HALVINGS = 40
"""Of an interval of prices."""

# Exact dynamic programme over samples

EXACT_DP_SUMS = 120_000_000
"""Sums that one table of the exact dynamic programme may take."""
DP_LINES = 10_000
"""Samples that a table may reach: each line takes its time, however short it is."""
DP_REACH = 4
"""Tables reach at least this many times as far as their largest micro-batch."""
WIDE_ROW = 256
"""Micro-batch sizes from which on a row is wide: it is filled by itself, and may be too much for an exact table."""

# Coarse dynamic programme, where micro-batches may be very large

COARSE_DP_SUMS = 100_000_000
"""Sums that its tables may take; the finest resolution within that is used."""
COARSE_RESOLUTIONS = ((8192, 256), (4096, 192), (2048, 128), (1024, 96), (512, 64))
"""Lines of a table, and up to how many units every size is told apart, from the finest on."""
COARSE_ROWS_BY_LINE = 32
"""From this many rows on all are filled line by line."""

# Rounds in lockstep

ROUND_SUMS = 2_000_000
"""Sums that the search over rounds may take; above it samples are counted by the unit."""
ROUND_RESIDUES = 1_000
"""Remainders among which a shortest path is looked for."""

# Every combination of largest micro-batches

MAX_COMBINATIONS = 50_000
MAX_COMBINATION_SUMS = 5_000_000
"""Sums that trying them all may take."""
MAX_COMBINATION_LINES = 20_000
"""Lines of tables that rounds of all combinations may take."""

# Knapsack and Lagrangian relaxation

MAX_PARTIAL_CHOICES = 20_000
"""Partial choices of the knapsack that are kept; beyond that nothing is claimed."""
MAX_KNAPSACK_RANKS = 64
"""With more ranks, what a single one rounds away is little, and no exact choice is looked for."""
MAX_SINGLE_RAISES = 32
"""Ranks that are raised one by one with the room that is left."""

# Relaxations of a stage

PRICE_FACTORS = (0.4, 0.7, 0.9, 1.0, 1.1, 1.5, 2.5)
"""Prices around the best one: what is too dear for one length of round is right for another."""
MANY_LEVELS = 5_000
"""Lengths of rounds from which on they are not refined."""
MAX_REFINEMENTS = 40

# Branch and bound over the time of the optimizer's step

STEPPING_GAP = 1e-6
"""An interval of the optimizer's time that is shorter than this part of a step is not split."""
MAX_SPLITS = 24
"""How often an interval is split, and how many improving steps are made, at the most."""
MAX_SPLIT_ENTRIES = 400_000
"""Entries of tables that all splits together may look at: large problems are split less often."""
MAX_IMPROVED_ENTRIES = 1_000
"""Up to this many entries single steps are tried if the bound is not reached."""

# Exclusion of slow ranks

EXCLUSION_GAIN = 1e-2
"""The part of a step that must be saved before a rank is left out."""
EQUAL_GAIN = 1e-3
"""Of sets whose plans differ by less than this part, the smallest is left out."""
MAX_EXCLUSION_RANKS = 64
"""With more ranks none are left out unless nothing fits with all of them."""
MAX_PAIRED_RANKS = 16
"""Up to this many ranks, all pairs are asked what they would pay."""
MAX_EXCLUSION_SETS = 12
"""Sets of one kind that are tried."""
MAX_READMISSIONS = 8
"""Ranks of an excluded set that may be taken back."""

# Plans

ROOMY_SHARES_SLACK = 2e-3
"""States lie where most room is left, if the step is not longer by more than this part."""
MAX_GLOBAL_BATCH = 1 << 24
