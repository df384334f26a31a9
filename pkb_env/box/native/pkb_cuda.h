// What a candidate's CUDA sees: the runtime, half-precision types, and signals between the GPUs of one machine.
// Included by itself before the first line of every source given to `compile_cuda`; no #include is needed.
//
//   __global__ void gather(float** buffers, uint32_t** pads, int rank, int world, float* output, size_t n) {
//     buffers[rank][i] = ...;                      // my symmetric buffer
//     pkb::barrier_blocks(pads, rank, world);      // block b of every rank has written
//     output[...] = buffers[peer][i];              // what block b of that peer wrote
//     pkb::barrier_blocks(pads, rank, world);      // block b of every rank has read: buffers may change again
//   }
//   extern "C" int run(...) { gather<<<blocks, threads, 0, (cudaStream_t)stream>>>(...); return cudaGetLastError(); }
//
// `buffers` and `pads` are device arrays of W addresses: `buffer_ptrs_dev` and `signal_pad_ptrs_dev` of a symmetric memory
// handle.  A pad holds one 32-bit word per (channel, source rank), at [channel * world + source]: 0 empty, 1 a signal.  It
// must start as zeros, and is zeros again after every signal was taken.  This is the protocol of torch's own signal pads:
// take other channels than those that a barrier of the handle uses at the same time.
// Every wait spins without end: a rank that never comes is for the supervisor outside.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace pkb {

// What this thread did before is seen, on every GPU, by a thread that reads the value with load_acquire_sys.
__device__ inline void store_release_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline uint32_t load_acquire_sys(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Both return what was there: the exchange happened if that equals `from`.
__device__ inline uint32_t exchange_release_sys(uint32_t* word, uint32_t from, uint32_t to) {
  uint32_t seen;
  asm volatile("atom.release.sys.cas.b32 %0, [%1], %2, %3;" : "=r"(seen) : "l"(word), "r"(from), "r"(to) : "memory");
  return seen;
}

__device__ inline uint32_t exchange_acquire_sys(uint32_t* word, uint32_t from, uint32_t to) {
  uint32_t seen;
  asm volatile("atom.acquire.sys.cas.b32 %0, [%1], %2, %3;" : "=r"(seen) : "l"(word), "r"(from), "r"(to) : "memory");
  return seen;
}

// Leaves a signal of `rank` at `peer`: waits until its place is empty, then fills it (0 -> 1, release).  Call it from one
// thread.  What that thread did before, and what its block did before a __syncthreads(), is seen after wait_signal.
__device__ inline void put_signal(uint32_t** pads, int rank, int peer, int world, int channel = 0) {
  uint32_t* word = pads[peer] + static_cast<size_t>(channel) * world + rank;
  while (exchange_release_sys(word, 0, 1) != 0) {
  }
}

// Takes the signal that `peer` leaves at `rank`: waits until it is there, then empties the place (1 -> 0, acquire).  Call it
// from one thread; a __syncthreads() afterwards hands on to its block what it has seen.
__device__ inline void wait_signal(uint32_t** pads, int rank, int peer, int world, int channel = 0) {
  uint32_t* word = pads[rank] + static_cast<size_t>(channel) * world + peer;
  while (exchange_acquire_sys(word, 1, 0) != 1) {
  }
}

// Block b of every rank waits for block b of every other rank; what those blocks wrote before is seen by this one after.
// Call it from every thread of a block.  Blocks of one rank do not wait for each other.  All ranks launch the same grid; it
// must fit on the GPU at once, and a pad must have gridDim.x * gridDim.y * gridDim.z * world words.
__device__ inline void barrier_blocks(uint32_t** pads, int rank, int world) {
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int threads = blockDim.x * blockDim.y * blockDim.z;
  __syncthreads();
  for (int peer = thread; peer < world; peer += threads)
    if (peer != rank) put_signal(pads, rank, peer, world, block);
  for (int peer = thread; peer < world; peer += threads)
    if (peer != rank) wait_signal(pads, rank, peer, world, block);
  __syncthreads();
}

}  // namespace pkb
