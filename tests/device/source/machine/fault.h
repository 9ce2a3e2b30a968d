// Faults: what went wrong where nobody could be told at once. The next call that can raises them all.
//
// Two kinds: an operator that failed in the thread of its stream, and a touch by the host of memory that it may not
// read. The second is noticed by the machine's page protection, and the host reads NaN there.
#pragma once

#include <string>

namespace sim {

void add_fault(std::string text);
void raise_faults();

// Installs the handler of page faults, if another has taken its place.
void watch_faults();

}  // namespace sim
