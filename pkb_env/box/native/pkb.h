// What a candidate's C++ sees: std headers, vector intrinsics, and symmetric memory between the ranks of one machine.
// Included by itself before the first line of every source given to `compile_cpp`; no #include is needed.
//
//   extern "C" void f(pkb::Group* group, const float* input, float* output, size_t n) {
//     std::memcpy(group->buffer<float>(group->rank), input, n * sizeof(float));    // my buffer, seen by every peer
//     pkb::barrier(group);                                                         // every rank's buffer is filled
//     const float* theirs = group->buffer<float>((group->rank + 1) % group->world);
//     ...
//   }
//
// A Group* is `group_ptr` of the handle that `symm_mem.rendezvous` returns; ranks are those of its process group.
// Not here: memory itself (symm_mem.py makes it), deadlines (the supervisor outside ends ranks that wait too long).
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <numeric>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pkb {

// One signal pad per allocation and rank: 0/1 tokens, indexed [channel * world + source rank] as torch does, then as many
// counts of sleepers, so that a signal costs a system call only when somebody sleeps on it.
constexpr int kPadWords = 512;

struct Pad {
  std::atomic<uint32_t> token[kPadWords];
  std::atomic<uint32_t> sleepers[kPadWords];
};
static_assert(sizeof(Pad) == 4096 && std::atomic<uint32_t>::is_always_lock_free);

enum Wait : uint32_t { kNothing, kBarrier, kPutSignal, kWaitSignal, kRendezvous };

// What a rank is waiting for, in shared memory, for whoever watches from outside.  64 bytes; see wait_record.py.
struct Status {
  std::atomic<uint32_t> wait;  // a Wait; written last
  std::atomic<int32_t> peer;   // rank in the default group
  std::atomic<int32_t> channel;
  std::atomic<uint32_t> sleeps;  // grows while the rank waits
  uint8_t reserved[48];
};
static_assert(sizeof(Status) == 64);

constexpr int kMaxWorld = 64;

struct Group {
  int rank, world;
  char* buffers[kMaxWorld];    // buffer of every rank, mapped here
  Pad* pads[kMaxWorld];        // signal pad of every rank
  int32_t global[kMaxWorld];   // rank in the default group
  Status* status;
  int32_t spin;                // tries before sleeping
  uint32_t label;              // a Wait to report instead of the call's own, or 0
  uint64_t buffer_bytes;

  template <class T>
  T* buffer(int peer) const { return reinterpret_cast<T*>(buffers[peer]); }
  int channels() const { return kPadWords / world; }
};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

namespace detail {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

inline long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

inline bool try_move(std::atomic<uint32_t>& word, uint32_t from, uint32_t to) {
  uint32_t seen = from;
  return word.load(std::memory_order_relaxed) == from && word.compare_exchange_strong(seen, to, std::memory_order_seq_cst);
}

// Sleeps until the token moves or the time is up.  Sleeps are short: a token written past this library wakes nobody.
inline bool sleep_and_move(Pad* pad, int index, uint32_t from, uint32_t to, int64_t timeout_ms, Status* status) {
  constexpr int64_t nap_ns = 20000000;
  const int64_t end = timeout_ms > 0 ? now_ns() + timeout_ms * 1000000 : INT64_MAX;
  while (!try_move(pad->token[index], from, to)) {
    const int64_t left = timeout_ms > 0 ? end - now_ns() : nap_ns;
    if (left <= 0) return false;
    const timespec nap{0, static_cast<long>(std::min(left, nap_ns))};
    pad->sleepers[index].fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = pad->token[index].load(std::memory_order_seq_cst);
    if (seen != from) futex(&pad->token[index], FUTEX_WAIT, seen, &nap);
    pad->sleepers[index].fetch_sub(1, std::memory_order_seq_cst);
    status->sleeps.fetch_add(1, std::memory_order_relaxed);
  }
  return true;
}

inline bool wait_and_move(Group* group, Pad* pad, int index, uint32_t from, uint32_t to, Wait wait, int peer, int channel,
                          int64_t timeout_ms) {
  bool moved = false;
  for (int i = 0; i < group->spin && !(moved = try_move(pad->token[index], from, to)); ++i) relax();
  if (!moved) {
    Status* status = group->status;
    status->peer.store(group->global[peer], std::memory_order_relaxed);
    status->channel.store(channel, std::memory_order_relaxed);
    status->wait.store(group->label ? group->label : wait, std::memory_order_release);
    moved = sleep_and_move(pad, index, from, to, timeout_ms, status);
    status->wait.store(kNothing, std::memory_order_release);
  }
  if (moved && pad->sleepers[index].load(std::memory_order_seq_cst)) futex(&pad->token[index], FUTEX_WAKE, INT_MAX, nullptr);
  return moved;
}

inline bool put(Group* g, int peer, int channel, int64_t timeout_ms, Wait wait) {
  return wait_and_move(g, g->pads[peer], channel * g->world + g->rank, 0, 1, wait, peer, channel, timeout_ms);
}

inline bool take(Group* g, int peer, int channel, int64_t timeout_ms, Wait wait) {
  return wait_and_move(g, g->pads[g->rank], channel * g->world + peer, 1, 0, wait, peer, channel, timeout_ms);
}

}  // namespace detail

// All three return -1, or the rank that did not come within timeout_ms (0: wait for ever).  0 <= channel < channels().

// Leaves a token at `peer`: waits until its place for my token is empty, then fills it.  What I wrote before is seen by it.
inline int put_signal(Group* group, int peer, int channel = 0, int64_t timeout_ms = 0) {
  return detail::put(group, peer, channel, timeout_ms, kPutSignal) ? -1 : peer;
}

// Takes the token that `peer` leaves for me: waits until it is there, then empties the place.
inline int wait_signal(Group* group, int peer, int channel = 0, int64_t timeout_ms = 0) {
  return detail::take(group, peer, channel, timeout_ms, kWaitSignal) ? -1 : peer;
}

// Returns when every rank has called it; what a rank wrote before its call is seen by all after theirs.
inline int barrier(Group* group, int channel = 0, int64_t timeout_ms = 0) {
  for (int p = 0; p < group->world; ++p)
    if (p != group->rank && !detail::put(group, p, channel, timeout_ms, kBarrier)) return p;
  for (int p = 0; p < group->world; ++p)
    if (p != group->rank && !detail::take(group, p, channel, timeout_ms, kBarrier)) return p;
  return -1;
}

struct Range {
  size_t begin, end;
  size_t size() const { return end - begin; }
};

// The part of n elements that belongs to `index` of `parts`: in order, without gaps, cut at multiples of `align`; the last
// parts may be short or empty.
inline Range share(size_t n, int parts, int index, size_t align = 16) {
  const size_t step = ((n + parts - 1) / parts + align - 1) / align * align;
  return {std::min(n, step * index), std::min(n, step * (index + 1))};
}

}  // namespace pkb
