"""What `pkb bench` runs: null test, latency beside fresh launches, throughput, lazy answers, a long run of planted candidates.

`null`, `latency`, `throughput`, `lazy` and `soak` are arithmetic; those ending in `_run` start processes.
Not here: tables on a terminal (`cli.bench_report`), evaluating (`evaluator`).
"""
