#!/bin/sh
# The long measurements of a CPU machine: results in a folder, one sub-folder each.  Leave the machine alone meanwhile; the null
# test goes on where it stopped when it is started again.
#
#     benchmarks/cpu.sh FOLDER
set -eu
out=${1:?name a folder for the results}
export OMP_NUM_THREADS=1
pkb bench examples --out "$out/examples"
pkb bench lazy --out "$out/lazy"
pkb bench null --readings 60 --out "$out/null"
pkb bench latency --with-load-inline --repeats 10 --out "$out/latency"
pkb bench throughput --slots 1,2,4 --candidates 80 --out "$out/throughput"
pkb bench throughput --slots 1,2,4 --candidates 80 --backend cpp --out "$out/throughput-cpp"
pkb bench throughput --slots 1,2,4 --candidates 80 --hanging 0 --out "$out/throughput-without-hangs"
