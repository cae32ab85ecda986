"""One micro-batch: its sequences as running totals, iterations held together as spans, and their prices.

The room owns a micro-batch, the two sets of decoding sequences (one token a round, or speculating), spans, the stages
of a pipeline and the price of an iteration. It must not know the queue, the scheduler or other machines. Read `span` first, then
`micro_batch`.
"""
