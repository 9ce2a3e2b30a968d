// What is registered with PyTorch when the device starts.
#pragma once

namespace sim {

void register_hooks();
void register_operators();
void register_autocast();

}  // namespace sim
