"""Layout of a row's sampling parameters, and which kernels they need: shared by the host and the kernels."""

from __future__ import annotations

# Columns of the parameter table, int32 [max_rows, NUM_PARAMS]. Floats are stored by their bits, so that one upload
# carries everything.
TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, SEED_LOW, SEED_HIGH, FLAGS = range(10)
NUM_PARAMS = 10

# Bits of FLAGS. TOP_K is 0 where it keeps the whole vocabulary; RANKED is set where TOP_K or TOP_P drops anything.
RANDOM, USES_MIN_P, RANKED, PENALTIES, RULES, GRAMMAR, LOGPROBS, PROMPT_LOGPROBS = (1 << bit for bit in range(8))
EDITS = PENALTIES | RULES | GRAMMAR  # logits are changed before they are sampled from
FILTERS = USES_MIN_P | RANKED  # unlikely tokens are dropped
EXTENDED = EDITS | FILTERS  # the row needs more than temperature

# Follows the bits of FLAGS, for a whole step: some ranked row is not `is_complete`.
SEARCHES = 1 << 8
# The sets of kernels that are captured as CUDA graphs. A kernel leaves a row that does not need it at once, so few sets
# serve all steps: whether logits are edited, and how far filters go. The last has all kernels.
SAMPLING_GRAPHS = tuple(
    edits | filters for edits in (0, EDITS) for filters in (0, USES_MIN_P, RANKED, RANKED | SEARCHES) if edits | filters
)

# Up to this top-k, tokens are selected from the maxima of groups, without a search for the border.
SMALL_TOP_K = 128
# Tokens near the border that one program holds; a vocabulary that is not larger needs no search either.
CANDIDATES = 2048

# Token counts of penalties, int16: this bit is set for a token of the prompt, the lower bits count it in the output.
IN_PROMPT = 1 << 14
MOST_ANSWERED = IN_PROMPT - 1  # counted no further

# Columns of a row's rules, int32 [max_rows, NUM_RULE_COLUMNS, max_rules].
RULE_TOKEN, RULE_VALUE, RULE_UNTIL, RULE_PREFIX, RULE_PREFIX_LEN = range(5)
NUM_RULE_COLUMNS = 5


def is_complete(top_k: int, vocab_size: int) -> bool:
    """True where a ranked row can only sample the few most likely tokens, so that no search is needed."""
    return vocab_size <= CANDIDATES or 0 < top_k <= SMALL_TOP_K
