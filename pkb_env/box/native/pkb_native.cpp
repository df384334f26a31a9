// The C face of pkb.h for symm_mem.py: makes groups, and lets Python wait.
// Not here: memory (mapped by symm_mem.py), anything a candidate's own C++ would call.
#include "pkb.h"

extern "C" {

// Null when world is out of range.  Without a status record of the supervisor, the group keeps a private one.
pkb::Group* pkb_group_new(int rank, int world, const uint64_t* buffers, const uint64_t* pads, const int32_t* global,
                          uint64_t buffer_bytes, uint64_t status, int spin, uint32_t label) {
  static pkb::Status unwatched{};
  if (world < 1 || world > pkb::kMaxWorld || rank < 0 || rank >= world) return nullptr;
  auto* group = new pkb::Group{};
  group->rank = rank;
  group->world = world;
  for (int p = 0; p < world; ++p) {
    group->buffers[p] = reinterpret_cast<char*>(buffers[p]);
    group->pads[p] = reinterpret_cast<pkb::Pad*>(pads[p]);
    group->global[p] = global[p];
  }
  group->status = status ? reinterpret_cast<pkb::Status*>(status) : &unwatched;
  group->spin = spin;
  group->label = label;
  group->buffer_bytes = buffer_bytes;
  return group;
}

int pkb_barrier(pkb::Group* group, int channel, int64_t timeout_ms) { return pkb::barrier(group, channel, timeout_ms); }

int pkb_put_signal(pkb::Group* group, int peer, int channel, int64_t timeout_ms) {
  return pkb::put_signal(group, peer, channel, timeout_ms);
}

int pkb_wait_signal(pkb::Group* group, int peer, int channel, int64_t timeout_ms) {
  return pkb::wait_signal(group, peer, channel, timeout_ms);
}
}
