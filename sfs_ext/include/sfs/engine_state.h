// An engine's state leaves as a snapshot and comes back as a loop that can be run on.
#pragma once

#include <cstdint>

#include "sfs/batch_time.h"
#include "sfs/engine_loop.h"
#include "sfs/snapshot.h"

namespace sfs {

// The state right after a pass of the loop scheduled; `published_s` is on the loop's clock.
void capture(const EngineLoop& loop, double published_s, Snapshot& into);

// Total length of an answer that has `outputs` tokens already: what it exceeds with probability
// `chance`, within (0, 1), given that it is longer than these, where lengths are lognormal with
// mean `predicted` and a log of standard deviation `sigma`. Always more than `outputs`; sigma 0
// takes the prediction at its word until it is outlived.
std::int32_t likely_output_tokens(double predicted, double sigma, std::int32_t outputs,
                                  double chance);

// A request's own chance, from its id. Were all residents given their mean length, none of them
// would end soon, and a query that waits for the first of hundreds to end would wait for ever.
double chance_of(std::uint64_t request_id);

// One request at a time in each batch, or those that only decode together: the same outcome.
enum class Stepping : std::uint8_t { plain, grouped };

// The loop that published `snapshot`, its clock starting from 0 at the snapshot's time. `mirror`:
// of its KV blocks at that time, to stay as it is; without one it runs as if without prefix
// caching, from the same free count. Throws std::invalid_argument for a mirror of other blocks than
// the snapshot's.
void restore(const Snapshot& snapshot, const BatchTime& batch_time, double length_sigma,
             EngineLoop& into, Stepping stepping = Stepping::grouped,
             const KvMirror* mirror = nullptr);

}  // namespace sfs
