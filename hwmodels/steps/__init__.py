"""Cost models from measured times of whole steps, of an engine and device that need not be modelled.

A file's rows (`rows`; `forward` and `plain` read tables, `recording` reads what vllm-vcr wrote; `files` tells them apart) become a
table (`table`): two surfaces (`surface`), of prompt steps and of decode steps, and a stated rule for steps with both. `cost` is the
cost model over it. Read `table` first.
"""
