"""What `pkb bench` runs: the null test, latency beside fresh launches, throughput.

`null`, `latency` and `throughput` are arithmetic; `null_run`, `latency_run` and `throughput_run` start processes.
Not here: tables on a terminal (`cli.bench_report`), evaluating (`evaluator`).
"""
