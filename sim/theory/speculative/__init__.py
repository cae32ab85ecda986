"""Closed forms of speculative decoding.

Notation follows Chen et al.: *target* is the large model (q), *draft* the small one (p), *k* the number of drafted
tokens per round, *alpha* the probability that a drafted token is accepted given that those before it were, *c* the
draft's step time over the target's. Arguments broadcast; whole numbers may be arrays too.

Papers: Leviathan = Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023,
arXiv 2211.17192. Chen = Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling",
arXiv 2302.01318. Medusa = Cai et al., arXiv 2401.10774.
"""

from sim.theory.speculative.gains import (
    best_speedup,
    break_even_alpha,
    guaranteed_speedup,
    improves,
    measured_rate_speedup,
    memory_reads_reduction,
    operations_factor,
    optimal_k,
    speedup,
    time_for_tokens_s,
)
from sim.theory.speculative.heads import (
    dense_tree_mean_length,
    dense_tree_nodes,
    medusa_speedup,
    sparse_tree_mean_length,
    tree_mean_length,
    typical_acceptance_threshold,
)
from sim.theory.speculative.load import (
    SPECDECODE_BENCH,
    LinearServer,
    crossover_batch,
    free_verification_batch,
    load_aware_speedup,
    server_speedup,
)
from sim.theory.speculative.rates import (
    alpha_from_mean_length,
    conditional_rates,
    draft_acceptance_rate,
    mean_length_from_positions,
    unconditional_rates,
)
from sim.theory.speculative.rounds import (
    accepted_drafts,
    expected_rounds,
    expected_tokens,
    oracle_tokens,
    tokens_pmf,
    tokens_variance,
)
from sim.theory.speculative.sampling import (
    acceptance,
    lenient_acceptance,
    lenient_distance,
    lenient_output,
    naive_acceptance,
    one_shot_acceptance,
)

__all__ = [
    "SPECDECODE_BENCH",
    "LinearServer",
    "acceptance",
    "accepted_drafts",
    "alpha_from_mean_length",
    "best_speedup",
    "break_even_alpha",
    "conditional_rates",
    "crossover_batch",
    "dense_tree_mean_length",
    "dense_tree_nodes",
    "draft_acceptance_rate",
    "expected_rounds",
    "expected_tokens",
    "free_verification_batch",
    "guaranteed_speedup",
    "improves",
    "lenient_acceptance",
    "lenient_distance",
    "lenient_output",
    "load_aware_speedup",
    "mean_length_from_positions",
    "measured_rate_speedup",
    "medusa_speedup",
    "memory_reads_reduction",
    "naive_acceptance",
    "one_shot_acceptance",
    "operations_factor",
    "optimal_k",
    "oracle_tokens",
    "server_speedup",
    "sparse_tree_mean_length",
    "speedup",
    "time_for_tokens_s",
    "tokens_pmf",
    "tokens_variance",
    "tree_mean_length",
    "typical_acceptance_threshold",
    "unconditional_rates",
]
